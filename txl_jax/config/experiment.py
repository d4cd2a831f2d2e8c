"""The root of the settings, relations between its groups, and presets of other implementations.

Letters: B batch, L segment length, M memory length, K = M + L keys, D model size, H heads, E head
size, F feed-forward size, V vocabulary, N layers, C clusters of the adaptive softmax, S segments
per call.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_jax.config.config_tree import (
    Config,
    did_you_mean,
    from_dict,
    get,
    replace,
    require,
    setting,
)
from txl_jax.config.data import DataConfig
from txl_jax.config.evaluation import EvalConfig, GenerateConfig
from txl_jax.config.model import AttentionWindow, MemoryStart, ModelConfig, Network, ShawTerms
from txl_jax.config.training import (
    AverageConfig,
    MeshConfig,
    OptimizerConfig,
    RegularizationConfig,
    ScheduleOffset,
    TrainConfig,
)
from txl_jax.errors import UserError

__all__ = ["COMPAT_PRESETS", "ExperimentConfig", "InitVocabulary"]

# Settings by dotted name, on top of the defaults, that make this model match another
# implementation.
COMPAT_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ours": {},
    # The authors' PyTorch release.
    "pytorch": {
        "model.compat.shaw_terms": ShawTerms.ORIGINAL,
        "model.compat.final_norm": False,
        "optimizer.schedule_offset": ScheduleOffset.ORIGINAL,
    },
    # The authors' TensorFlow release, as run on TPU.
    "tf": {
        "model.compat.memory_start": MemoryStart.ZEROS,
        "model.compat.same_length_window": AttentionWindow.MEM_LEN_PLUS_ONE,
        "model.compat.layer_norm_eps": 1e-12,
        "model.compat.final_norm": False,
        "optimizer.min_lr_ratio": 0.01,
    },
    # Hugging Face's TransfoXLLMHeadModel.
    "hf": {"model.compat.memory_start": MemoryStart.ZEROS, "model.compat.final_norm": False},
    # NVIDIA's DeepLearningExamples: the authors' PyTorch model, and a cosine after the warm-up.
    "nvidia": {
        "model.compat.shaw_terms": ShawTerms.ORIGINAL,
        "model.compat.final_norm": False,
        "optimizer.adam_eps": 1e-6,
    },
}
_PRESETS = Path(__file__).parents[1] / "presets"


class InitVocabulary(enum.StrEnum):
    """Vocabulary of a warm start."""

    OWN = "own"  # The text's. Rows of the tables are matched by the spelling of their tokens.
    KEPT = "kept"  # The trained model's. Words that it lacks become <unk>.


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(Config):
    """One run."""

    seed: int = setting(
        1111, "Random seed for initial weights, dropout, and the order of the training split."
    )
    init_from: str | None = setting(
        None,
        "Warm start (fine-tuning): workdir or portable checkpoint to load initial weights from. "
        "none means random.",
        path=True,
    )
    init_vocabulary: InitVocabulary = setting(
        InitVocabulary.OWN,
        "Warm start: use the text's own vocabulary, or keep the trained model's.",
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    average: AverageConfig = AverageConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()

    def resolved(self) -> "ExperimentConfig":
        """Returns the config with fields derived from others: a learned encoding's table size."""
        if not self.model.encoding.is_learned or self.model.num_positions is not None:
            return self
        return replace(self, {"model.num_positions": self.train.segment_len + self.train.mem_len})

    def validate(self) -> None:
        """Raises `UserError`, with both values, if settings are incompatible."""
        super().validate()
        expect, model, average, optimizer = self.expect, self.model, self.average, self.optimizer
        if model.network is not Network.TRANSFORMER_XL:
            for name in ("data.reset_at", "train.stride", "eval.weight_dtype", "eval.cache_dtype"):
                expect(
                    not get(self, name),
                    f"{name} model.network",
                    f"The former requires {Network.TRANSFORMER_XL}",
                )
        expect(
            self.data.reset_at is None or model.compat.memory_start is MemoryStart.MASKED,
            "data.reset_at model.compat.memory_start",
            f"Resets require {MemoryStart.MASKED} memory",
        )
        expect(
            self.eval.temperature == 1 or not (model.cutoffs or model.has_projections),
            "eval.temperature model.cutoffs model.div_val model.d_embed model.d_model",
            "A temperature requires a full softmax over d_model, without clusters or projections",
        )
        if self.init_vocabulary is InitVocabulary.KEPT:
            expect(self.init_from, "init_vocabulary init_from", "Set --init_from=PATH")
            for name in ("data.tokenizer.vocab_file", "data.tokenizer.hf_file"):
                expect(not get(self, name), f"{name} init_vocabulary", "Set only one of them")
        steps, start = self.train.steps, average.start_step
        expect(
            start is None or start < steps,
            "average.start_step train.steps",
            "Averaging would never start",
        )
        expect(
            optimizer.min_lr_ratio <= optimizer.embedding_lr_multiplier,
            "optimizer.min_lr_ratio optimizer.embedding_lr_multiplier",
            "The embedding's peak would be below the minimum",
        )
        end, name = (
            optimizer.decay_steps or steps,
            "optimizer.decay_steps" if optimizer.decay_steps else "train.steps",
        )
        expect(end <= steps, f"{name} train.steps", "The decay must not end after training")
        wanted = (
            f"optimizer.warmup_steps must be less than {name} ({end}), got {optimizer.warmup_steps}"
        )
        require(optimizer.warmup_steps < end, f"{wanted}. Lower --optimizer.warmup_steps.")


def apply_preset(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Returns the config with a preset of `COMPAT_PRESETS`.

    Settings of other presets get their defaults.
    """
    named = {
        setting: get(ExperimentConfig(), setting)
        for preset in COMPAT_PRESETS.values()
        for setting in preset
    }
    return replace(config, named | dict(COMPAT_PRESETS[name]))


def preset_names() -> list[str]:
    """Returns the names that `preset` takes."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def preset(name: str) -> ExperimentConfig:
    """Returns a published configuration.

    It has the settings of `experiments/flags/NAME.flags`, which cites its sources.

    Raises `UserError`, which lists all names, if the name is unknown.

    >>> preset("enwik8_12l").model.n_layer
    12
    """
    if name not in (known := preset_names()):
        raise UserError(
            f"the preset must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )
    return from_dict(ExperimentConfig, json.loads((_PRESETS / f"{name}.json").read_text()))
