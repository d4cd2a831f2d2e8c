"""Settings of evaluation and generation."""

import dataclasses
import enum

from txl_jax.config.config_tree import Config, free_setting
from txl_jax.config.training import Recurrence

__all__ = ["CacheDType", "EvalConfig", "GenerateConfig", "WeightDType"]


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
class EvalConfig(Recurrence, prefix="eval."):
    """The evaluation recurrence. Its lengths are usually not those of training: short segments, long memory."""

    batch_size: int = free_setting(1, "B, streams read side by side; each starts from an empty memory.", at_least=1)
    segment_len: int = free_setting(80, "L, tokens per row and step.", at_least=1)
    mem_len: int = free_setting(2100, "M, memory length.", at_least=0)
    stride: int | None = free_setting(
        None,
        "Sliding window, without memory: scored tokens at the window's end; none: all.",
        at_least=1,
        not_with=("mem_len", "warmup_tokens", "weight_dtype"),
    )
    clamp_len: int | None = free_setting(820, "Distances above this share one position code; none: off.", at_least=1)
    same_length: bool = free_setting(True, "Every query sees the same number of keys.")
    cache_dtype: CacheDType | None = free_setting(
        None, "Type of the KV cache: bfloat16 or int8 for a half or a quarter of float32's size; none: as computed."
    )
    weight_dtype: WeightDType | None = free_setting(
        None, "Quantization: int8 for weights of a quarter of float32's size, on one device; none: as computed."
    )
    average_checkpoints: int | None = free_setting(
        None, "Checkpoint averaging: score the mean of the newest N checkpoints; none: the best.", at_least=1
    )
    temperature: float = free_setting(
        1.0, "Softmax temperature: logits are divided by this; full softmax only.", above=0
    )
    warmup_tokens: int = free_setting(
        0, "Unscored tokens that each row but the first reads first, against a cold start.", at_least=0
    )
    valid_tokens: int | None = free_setting(None, "Validation tokens scored during training; none: all.", at_least=2)

    def validate(self) -> None:
        """Raises `UserError` for a setting out of its range, or settings that cannot go together."""
        super().validate()
        self.expect(self.mem_len or not self.cache_dtype, "cache_dtype mem_len", "without memory there is no cache")
        # Distances are int32, and XLA ends the process if the size of an array overflows.
        fits = self.batch_size * (self.segment_len + self.mem_len) < 1 << 40 and (self.clamp_len or 0) < 1 << 31
        self.expect(fits, "batch_size segment_len mem_len clamp_len", "no device holds as many positions")


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Config, prefix="generate."):
    """Sampling of text."""

    prompt: str | None = free_setting(None, "Prompt: text to continue, \\n for a newline; none: an empty memory.")
    prompt_file: str | None = free_setting(
        None, "Prompt: the whole text of this file (many: --input).", path=True, not_with=("prompt",)
    )
    length: int = free_setting(500, "Number of tokens to generate.", at_least=1)
    stop: str | None = free_setting(
        None, "Text that ends a sample and is part of it, \\n for a newline; none: only the length does."
    )
    samples: int = free_setting(1, "Number of samples, generated side by side.", at_least=1)
    temperature: float = free_setting(1.0, "Softmax temperature: logits are divided by this; 0: greedy.", at_least=0)
    top_k: int | None = free_setting(
        40, "Top-k sampling: k likeliest tokens (40: the paper's appendix E); none: all tokens.", at_least=1
    )
    top_p: float = free_setting(
        1.0, "Top-p (nucleus) sampling: likeliest tokens of this total probability; 1: all tokens.", above=0, at_most=1
    )
    seed: int = free_setting(0, "Seed of the sampling.")
