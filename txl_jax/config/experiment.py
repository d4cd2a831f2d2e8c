"""The root of the settings, relations between its groups, and presets of other implementations.

Letters: B batch, L segment length, M memory length, K = M + L keys, D model width, H heads, E head
width, F inner width, V vocabulary, N layers, C clusters of the adaptive softmax, S segments per call.
"""

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any, cast

from txl_jax.config.data import DataConfig
from txl_jax.config.evaluation import EvalConfig, GenerateConfig
from txl_jax.config.model import AttentionWindow, CompatConfig, LambRule, MemoryStart, ModelConfig, Network, ShawTerms
from txl_jax.config.settings import Config, check_fields, require, setting
from txl_jax.config.training import (
    AverageConfig,
    MeshConfig,
    OptimizerConfig,
    RegularizationConfig,
    ScheduleOffset,
    TrainConfig,
)

# Settings by dotted name, on top of the defaults, that make this model the one of another implementation.
COMPAT_PRESETS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "ours": {},
        # The authors' PyTorch release.
        "pytorch": {
            "compat.shaw_terms": ShawTerms.ORIGINAL,
            "compat.final_norm": False,
            "optimizer.schedule_offset": ScheduleOffset.ORIGINAL,
        },
        # The authors' TensorFlow release, as run on TPU.
        "tf": {
            "compat.memory_start": MemoryStart.ZEROS,
            "compat.same_length_window": AttentionWindow.MEM_LEN_PLUS_ONE,
            "compat.layer_norm_eps": 1e-12,
            "compat.final_norm": False,
            "optimizer.min_lr_ratio": 0.01,
        },
        # Hugging Face's TransfoXLLMHeadModel.
        "hf": {"compat.memory_start": MemoryStart.ZEROS, "compat.final_norm": False},
        # NVIDIA's DeepLearningExamples: the authors' PyTorch model, a cosine after the warm-up, and LAMB of their own.
        "nvidia": {
            "compat.shaw_terms": ShawTerms.ORIGINAL,
            "compat.final_norm": False,
            "compat.lamb": LambRule.NVIDIA,
            "optimizer.adam_eps": 1e-6,
        },
    }
)


class InitVocabulary(enum.StrEnum):
    """Vocabulary of a warm start."""

    OWN = "own"  # The text's; rows of the tables are matched by the spelling of their tokens.
    KEPT = "kept"  # That of the trained model; words that it lacks are <unk>.


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(Config):
    """One run."""

    seed: int = setting(1111, "Seed of initial weights, dropout, and the order of the training text.")
    init_from: str | None = setting(
        None,
        "Warm start (fine-tuning): folder of a trained model that gives the initial weights; none: random ones.",
        path=True,
    )
    init_vocabulary: InitVocabulary = setting(
        InitVocabulary.OWN, "Warm start: the text's own vocabulary, or that of the trained model."
    )
    model: ModelConfig = ModelConfig()
    compat: CompatConfig = CompatConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    average: AverageConfig = AverageConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()

    def resolved(self) -> "ExperimentConfig":
        """Returns the config with the fields that follow from others: the table size of a learned encoding."""
        if not self.model.encoding.is_learned or self.model.num_positions is not None:
            return self
        num_positions = self.train.segment_len + self.train.mem_len
        return dataclasses.replace(self, model=dataclasses.replace(self.model, num_positions=num_positions))

    def validate(self) -> None:
        """Raises `UserError`, one sentence with both numbers, for values that cannot go together."""
        check_fields(self, "")
        for group in (getattr(self, field.name) for field in dataclasses.fields(self)):
            if dataclasses.is_dataclass(group):
                cast(Any, group).validate()
        self._validate_softmax()
        self._validate_schedule()
        self._validate_warm_start()
        self._validate_documents()
        require(
            self.model.network is Network.TRANSFORMER_XL or not self.train.stride,
            f"train.stride is {self.train.stride} and model.network is {self.model.network}, whose state has read "
            "already what would be read again; leave it out",
        )
        for name, given, what in (
            ("weight_dtype", self.eval.weight_dtype, "whose weights are not quantized"),
            ("cache_dtype", self.eval.cache_dtype, "which has no KV cache"),
        ):
            require(
                self.model.network is Network.TRANSFORMER_XL or given is None,
                f"eval.{name} is {given} and model.network is {self.model.network}, {what}; leave it out",
            )

    def _validate_documents(self) -> None:
        if self.data.reset_at is None and self.model.end_token is None:
            return
        for name, value, needed in (
            ("model.network", self.model.network, Network.TRANSFORMER_XL),
            ("compat.memory_start", self.compat.memory_start, MemoryStart.MASKED),
        ):
            require(
                value is needed,
                f"data.reset_at is {self.data.reset_at!r} and {name} is {value}; it goes with {needed}",
            )

    def _validate_warm_start(self) -> None:
        if self.init_vocabulary is InitVocabulary.OWN:
            return
        require(
            self.init_from is not None,
            f"init_vocabulary is {self.init_vocabulary} and init_from is none; give --init_from=PATH",
        )
        for name in ("vocab_file", "hf_file"):
            given = getattr(self.data.tokenizer, name)
            require(
                given is None,
                f"data.tokenizer.{name} is {given!r} and init_vocabulary is {self.init_vocabulary}; give one of them",
            )

    def _validate_softmax(self) -> None:
        given = {
            "eval.temperature": (self.eval.temperature, 1.0),
            "regularization.adversarial": (self.regularization.adversarial, 0.0),
        }
        for name, (value, usual) in given.items():
            require(
                value == usual or not (self.model.cutoffs or self.model.has_projections),
                f"{name} is {value} and the softmax has clusters or projections (model.cutoffs "
                f"{list(self.model.cutoffs)}, model.d_embed {self.model.d_embed}); "
                "it goes with a full softmax over d_model",
            )

    def _validate_schedule(self) -> None:
        optimizer, steps = self.optimizer, self.train.steps
        start = self.average.start_step
        require(
            start is None or start < steps,
            f"average.start_step is {start} and train.steps is {steps}; averaging would never start",
        )
        require(
            optimizer.min_lr_ratio <= optimizer.embedding_lr_multiplier,
            f"optimizer.min_lr_ratio is {optimizer.min_lr_ratio} and optimizer.embedding_lr_multiplier is "
            f"{optimizer.embedding_lr_multiplier}; the embedding's peak would lie below the minimum",
        )
        ends, name = optimizer.decay_steps, "optimizer.decay_steps"
        require(
            ends is None or ends <= steps,
            f"{name} is {ends} and train.steps is {steps}; the decay must end with the training, or before",
        )
        if ends is None:
            ends, name = steps, "train.steps"
        require(
            optimizer.warmup_steps < ends,
            f"optimizer.warmup_steps is {optimizer.warmup_steps} and {name} is {ends}; "
            "the warm-up must end before that: give a shorter --optimizer.warmup_steps",
        )
