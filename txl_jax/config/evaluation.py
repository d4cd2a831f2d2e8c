"""Settings of evaluation and generation."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, check_fields, require, setting

__all__ = [
    "CacheDType",
    "EvalConfig",
    "GenerateConfig",
    "WeightDType",
]


class CacheDType(enum.StrEnum):
    """Type of the stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"  # With a scale per row, head and slot.


class WeightDType(enum.StrEnum):
    """Type of the weights that every token is multiplied with."""

    INT8 = "int8"  # With a scale per channel.


@dataclasses.dataclass(frozen=True)
class EvalConfig(Config):
    """The evaluation recurrence. Its lengths are usually not those of training: short segments, long memory."""

    batch_size: int = setting(
        1, "B, streams read side by side; each starts from an empty memory.", at_least=1, free_on_resume=True
    )
    segment_len: int = setting(80, "L, tokens per row and step.", at_least=1, free_on_resume=True)
    mem_len: int = setting(2100, "M, memory length.", at_least=0, free_on_resume=True)
    stride: int | None = setting(
        None,
        "Sliding window, without memory: scored tokens at the window's end; none: all.",
        at_least=1,
        free_on_resume=True,
    )
    clamp_len: int | None = setting(
        820, "Distances above this share one position code; none: off.", at_least=1, free_on_resume=True
    )
    same_length: bool = setting(True, "Every query sees the same number of keys.", free_on_resume=True)
    cache_dtype: CacheDType | None = setting(
        None,
        "Type of the KV cache: bfloat16 or int8 for a half or a quarter of float32's size; none: as computed.",
        free_on_resume=True,
    )
    weight_dtype: WeightDType | None = setting(
        None,
        "Quantization: int8 for weights of a quarter of float32's size, on one device; none: as computed.",
        free_on_resume=True,
    )
    average_checkpoints: int | None = setting(
        None,
        "Checkpoint averaging: score the mean of the newest N checkpoints; none: the best.",
        at_least=1,
        free_on_resume=True,
    )
    temperature: float = setting(
        1.0, "Softmax temperature: logits are divided by this; full softmax only.", above=0, free_on_resume=True
    )
    warmup_tokens: int = setting(
        0,
        "Unscored tokens that each row but the first reads first, against a cold start.",
        at_least=0,
        free_on_resume=True,
    )
    valid_tokens: int | None = setting(
        None, "Validation tokens scored during training; none: all.", at_least=2, free_on_resume=True
    )

    def validate(self) -> None:
        """Raises `UserError` for a field out of its range, or fields that cannot go together."""
        check_fields(self, "eval")
        require(
            not (self.stride and self.warmup_tokens),
            f"eval.stride is {self.stride} and eval.warmup_tokens is {self.warmup_tokens}; windows have no cold start "
            "but the text's own, so leave them out",
        )
        require(
            not (self.stride and self.weight_dtype),
            f"eval.stride is {self.stride} and eval.weight_dtype is {self.weight_dtype}, which is for evaluation with "
            "a memory; leave one of them out",
        )
        require(
            bool(self.mem_len) or self.cache_dtype is None,
            f"eval.cache_dtype is {self.cache_dtype} and eval.mem_len is 0: there is no cache; leave one of them out",
        )


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Config):
    """Sampling of text."""

    prompt: str | None = setting(None, "Prompt: text to continue; none: an empty memory.", free_on_resume=True)
    prompt_file: str | None = setting(None, "Prompt: the whole text of this file.", path=True, free_on_resume=True)
    length: int = setting(500, "Number of tokens to generate.", at_least=1, free_on_resume=True)
    stop: str | None = setting(
        None, "Text of one token that ends a sample; \\n is a newline; none: only the length does.", free_on_resume=True
    )
    samples: int = setting(1, "Number of samples, generated side by side.", at_least=1, free_on_resume=True)
    temperature: float = setting(
        1.0, "Softmax temperature: logits are divided by this; 0: greedy.", at_least=0, free_on_resume=True
    )
    top_k: int | None = setting(
        40,
        "Top-k sampling: k likeliest tokens (40: the paper's appendix E); none: all tokens.",
        at_least=1,
        free_on_resume=True,
    )
    top_p: float = setting(
        1.0,
        "Top-p (nucleus) sampling: likeliest tokens of this total probability; 1: all tokens.",
        above=0,
        at_most=1,
        free_on_resume=True,
    )
    seed: int = setting(0, "Seed of the sampling.", free_on_resume=True)

    def validate(self) -> None:
        """Raises `UserError` for a field out of its range, or fields that cannot go together."""
        check_fields(self, "generate")
        require(not (self.prompt and self.prompt_file), "generate.prompt and generate.prompt_file are both given")
