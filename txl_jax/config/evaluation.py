"""Settings of evaluation and generation."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from txl_jax.config.config_tree import Config, format_value, free_setting, require, to_dict
from txl_jax.config.training import Recurrence

__all__ = [
    "CacheDType",
    "DynamicConfig",
    "DynamicRule",
    "EvalConfig",
    "GenerateConfig",
    "WeightDType",
]


class CacheDType(enum.StrEnum):
    """Dtype of the stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"  # Has a scale per row, head and slot.


class WeightDType(enum.StrEnum):
    """Dtype of the weight matrices."""

    INT8 = "int8"  # Has a scale per channel.


class DynamicRule(enum.StrEnum):
    """Update rule of dynamic evaluation (`txl_jax.evaluation.dynamic`)."""

    # The learning rate times the gradient.
    SGD = "sgd"
    # SGD's step, divided by the root of the squared gradients of training text (Krause et al.,
    # 2018).
    RMS = "rms"
    # SGD's step, divided by the root of the squared gradients of the text that is scored.
    RMSPROP = "rmsprop"


_MAX_POSITIONS = 1 << 40  # XLA aborts the process if the size of an array overflows.
_MAX_CLAMP_LEN = 1 << 31  # Distances are int32.


@dataclasses.dataclass(frozen=True)
class DynamicConfig(Config, prefix="eval.dynamic."):
    """Dynamic evaluation: the model continues to learn from the text that it scores.

    The update is described in `txl_jax.evaluation.dynamic`. Training does not use these settings.
    """

    rule: DynamicRule | None = free_setting(
        None,
        "Dynamic evaluation: update rule, applied after each scored segment. none leaves the "
        "trained parameters unchanged.",
    )
    learning_rate: float = free_setting(
        1e-3,
        "Dynamic evaluation: learning rate, the same for all updates.",
        at_least=0,
        only_with={"rule": tuple(DynamicRule)},
    )
    decay: float = free_setting(
        0.0,
        "Dynamic evaluation: strength of the pull toward the trained parameters.",
        at_least=0,
        only_with={"rule": tuple(DynamicRule)},
    )
    epsilon: float = free_setting(
        1e-8,
        "Dynamic evaluation: added to the root of squared gradients.",
        above=0,
        only_with={"rule": (DynamicRule.RMS, DynamicRule.RMSPROP)},
    )
    statistics_segments: int | None = free_setting(
        None,
        "Dynamic evaluation: training segments whose squared gradients are summed for rms. "
        "none means 1/5,000 of them, as published.",
        at_least=1,
        only_with={"rule": (DynamicRule.RMS,)},
    )
    shared: bool = free_setting(
        False,
        "Dynamic evaluation of documents: keep what was learned from one document for the next, "
        "instead of starting each from the trained parameters.",
        only_with={"rule": tuple(DynamicRule)},
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Recurrence, prefix="eval."):
    """The evaluation recurrence.

    Its lengths usually differ from training's: short segments, a long memory.
    """

    batch_size: int = free_setting(
        1, "B, streams read in parallel, each from an empty memory.", at_least=1
    )
    segment_len: int = free_setting(80, "L, segment length: tokens per row and step.", at_least=1)
    mem_len: int = free_setting(2100, "M, memory length.", at_least=0)
    stride: int | None = free_setting(
        None,
        "Sliding window, without memory: scored tokens at the end of each window. none scores all.",
        at_least=1,
        not_with=("mem_len", "warmup_tokens", "weight_dtype"),
    )
    clamp_len: int | None = free_setting(
        820, "Clamp distances to at most this. none disables clamping.", at_least=1
    )
    same_length: bool = free_setting(True, "Every query attends to the same number of keys.")
    cache_dtype: CacheDType | None = free_setting(
        None,
        "Dtype of the KV cache: bfloat16 or int8 for 1/2 or 1/4 of float32's size. "
        "none keeps the compute dtype.",
    )
    weight_dtype: WeightDType | None = free_setting(
        None,
        "Quantization: int8 stores weights in 1/4 of float32's size, on one device. "
        "none disables it.",
    )
    average_checkpoints: int | None = free_setting(
        None,
        "Checkpoint averaging: score the mean of the latest N checkpoints. none scores the best.",
        at_least=1,
    )
    temperature: float = free_setting(
        1.0, "Softmax temperature: divisor of the logits. Full softmax only.", above=0
    )
    warmup_tokens: int = free_setting(
        0,
        "Unscored tokens that fill the memory of each row except the first, to avoid a cold start.",
        at_least=0,
    )
    valid_tokens: int | None = free_setting(
        None, "Validation tokens scored in training. none scores all.", at_least=2
    )
    dynamic: DynamicConfig = DynamicConfig()

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, or settings are incompatible."""
        # Checked first: with a stride, the other checks would suggest changes that do not help.
        self._validate_dynamic()
        super().validate()
        require(
            self.mem_len or not self.cache_dtype,
            f"eval.cache_dtype must be none for eval.mem_len=0, got {self.cache_dtype}. "
            "The KV cache requires a memory.",
        )
        n_position = self.batch_size * (self.segment_len + self.mem_len)
        require(
            n_position < _MAX_POSITIONS,
            "eval.batch_size * (eval.segment_len + eval.mem_len) must be below 2^40, got "
            f"{self.batch_size} * ({self.segment_len} + {self.mem_len}). No device has memory for "
            "so many positions.",
        )
        require(
            (self.clamp_len or 0) < _MAX_CLAMP_LEN,
            f"eval.clamp_len must be below 2^31, because distances are int32, got {self.clamp_len}",
        )

    def _validate_dynamic(self) -> None:
        """Raises `UserError` if another setting does not allow the model to learn."""
        # Learning needs the gradient of the parameters themselves, segment after segment:
        # - With eval.stride, most tokens are read again after the model has learned from them.
        # - Weights in int8 have no gradient.
        # - There is no KV cache, because the update is the one of training, whose memory stores
        #   states instead of keys and values.
        for name in ("stride", "weight_dtype", "cache_dtype"):
            value = getattr(self, name)
            require(
                self.dynamic.rule is None or not value,
                f"eval.{name} must be none for eval.dynamic.rule={self.dynamic.rule}, got "
                f"{format_value(value)}. Dynamic evaluation reads each segment once and updates "
                "the parameters themselves.",
            )


def training_settings(config: EvalConfig) -> dict[str, Any]:
    """Returns the settings on which the scores of a training run depend, by name, for its records.

    A training run does not use dynamic evaluation, so `eval.dynamic` is omitted.
    """
    return _without_dynamic(to_dict(config))


def is_same_in_training(recorded: Any, config: EvalConfig) -> bool:
    """Returns whether recorded scores of a training run were made at these settings.

    Args:
      recorded: The `training_settings` that a file records with its scores. A setting that did not
        exist when the file was written is missing, and means its default. Anything except a JSON
        object, as in a corrupted file, counts as different.
      config: The settings to compare with.
    """
    if not isinstance(recorded, Mapping):
        return False
    complete = training_settings(EvalConfig()) | _without_dynamic(recorded)
    return complete == training_settings(config)


def _without_dynamic(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith("dynamic.")}


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Config, prefix="generate."):
    """Sampling of text."""

    prompt: str | None = free_setting(
        None, "Text to continue, with \\n for a newline. none starts from an empty memory."
    )
    prompt_file: str | None = free_setting(
        None,
        "File whose entire content is the prompt. For multiple prompts, use --input.",
        path=True,
        not_with=("prompt",),
    )
    length: int = free_setting(500, "Number of tokens to generate.", at_least=1)
    stop: str | None = free_setting(
        None,
        "Text that ends a sample and is included in it, with \\n for a newline. "
        "none generates the full length.",
    )
    samples: int = free_setting(1, "Number of samples, generated in parallel.", at_least=1)
    temperature: float = free_setting(
        1.0, "Softmax temperature: divisor of the logits. 0 means greedy.", at_least=0
    )
    top_k: int | None = free_setting(
        40,
        "Top-k: sample from the k most likely tokens (the paper's appendix E uses 40). "
        "none means all.",
        at_least=1,
    )
    top_p: float = free_setting(
        1.0,
        "Top-p (nucleus) sampling: cumulative probability of the candidates. 1 means all tokens.",
        above=0,
        at_most=1,
    )
    seed: int = free_setting(0, "Random seed for sampling.")
