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
    format_value,
    from_dict,
    get,
    replace,
    require,
    setting,
    to_dict,
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
        "optimizer.clip_eps": 1e-6,  # A constant of torch.nn.utils.clip_grad_norm_.
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
# Settings of published evaluations, which are applied to a trained run.
_EVALUATION_PRESETS = _PRESETS / "evaluation"


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
        "none starts from random weights.",
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
        if not self.model.encoding.is_learned:
            return self
        if self.model.num_positions is not None:
            return self
        return replace(self, {"model.num_positions": self.train.segment_len + self.train.mem_len})

    def validate(self) -> None:
        """Raises `UserError`, with both values, if settings are incompatible."""
        super().validate()
        self._validate_network()
        self._validate_init_vocabulary()
        self._validate_steps()

    def _validate_network(self) -> None:
        """Raises `UserError` if settings need another network, memory or softmax."""
        model = self.model
        # Recurrent networks do not have what these settings change:
        # - reset_at masks the keys of other documents.
        # - train.stride lets segments overlap, without a memory. A recurrent network always has a
        #   memory: the state after a segment would enter the next one, which begins before its end.
        # - weight_dtype is for prepared parameters (`inference.prepare`). Recurrent networks are
        #   evaluated with their parameters as they are.
        # - cache_dtype is for the KV cache.
        if model.network is not Network.TRANSFORMER_XL:
            for name in ("data.reset_at", "train.stride", "eval.weight_dtype", "eval.cache_dtype"):
                value = get(self, name)
                require(
                    not value,
                    f"model.network must be {Network.TRANSFORMER_XL} for "
                    f"{name}={format_value(value)}, got {model.network}",
                )

        # A document begins with a masked memory (`memory.Documents`), also within a segment. A mask
        # can hide the keys before the document, but cannot replace them with zeros that are
        # attended to.
        require(
            self.data.reset_at is None or model.compat.memory_start is MemoryStart.MASKED,
            f"model.compat.memory_start must be {MemoryStart.MASKED} for "
            f"data.reset_at={format_value(self.data.reset_at)}, got {model.compat.memory_start}",
        )

        # Evaluation divides the hidden states and the biases (`scorer.at_temperature`), and so the
        # logits of one softmax over all tokens. With clusters, head and tails would be divided
        # separately, which gives another distribution. Projections without clusters would allow it,
        # because they are linear, but this is not supported.
        is_full_softmax = not model.cutoffs and not model.has_projections
        require(
            self.eval.temperature == 1 or is_full_softmax,
            "eval.temperature must be 1 unless the softmax is full, without clusters or "
            f"projections, got {self.eval.temperature} with "
            f"model.cutoffs={format_value(model.cutoffs) or 'empty'}, "
            f"model.div_val={model.div_val}, model.d_embed={format_value(model.d_embed)} and "
            f"model.d_model={model.d_model}",
        )

    def _validate_init_vocabulary(self) -> None:
        """Raises `UserError` if a vocabulary is kept, but there is none or another one is set."""
        if self.init_vocabulary is not InitVocabulary.KEPT:
            return
        require(
            self.init_from,
            f"init_from must be set for init_vocabulary={InitVocabulary.KEPT}, got none. "
            "Set --init_from=PATH.",
        )
        for name in ("data.tokenizer.vocab_file", "data.tokenizer.hf_file"):
            value = get(self, name)
            require(
                not value,
                f"{name} must be none for init_vocabulary={InitVocabulary.KEPT}, got {value}. "
                "Set only one of them.",
            )

    def _validate_steps(self) -> None:
        """Raises `UserError` if averaging, warm-up or decay do not match the training steps."""
        steps = self.train.steps
        start_step = self.average.start_step
        optimizer = self.optimizer
        require(
            start_step is None or start_step < steps,
            f"average.start_step must be less than train.steps ({steps}), got {start_step}. "
            "Averaging would never start.",
        )
        require(
            optimizer.min_lr_ratio <= optimizer.embedding_lr_multiplier,
            "optimizer.min_lr_ratio must be at most optimizer.embedding_lr_multiplier "
            f"({optimizer.embedding_lr_multiplier}), got {optimizer.min_lr_ratio}. "
            "The embedding's peak would be below the minimum.",
        )

        # The decay ends with training, or after optimizer.decay_steps.
        end = steps
        end_name = "train.steps"
        if optimizer.decay_steps is not None:
            end = optimizer.decay_steps
            end_name = "optimizer.decay_steps"
        require(
            end <= steps,
            f"{end_name} must be at most train.steps ({steps}), got {end}. "
            "The decay must not end after training.",
        )
        require(
            optimizer.warmup_steps < end,
            f"optimizer.warmup_steps must be less than {end_name} ({end}), got "
            f"{optimizer.warmup_steps}. Lower --optimizer.warmup_steps.",
        )


def apply_preset(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Returns the config with a preset of `COMPAT_PRESETS`.

    Settings that only other presets change are reset to their defaults.
    """
    defaults = ExperimentConfig()
    # First reset every setting that any preset changes, then apply this preset.
    values: dict[str, Any] = {}
    for preset_values in COMPAT_PRESETS.values():
        for setting_name in preset_values:
            values[setting_name] = get(defaults, setting_name)
    values |= COMPAT_PRESETS[name]
    return replace(config, values)


def preset_names() -> list[str]:
    """Returns the names that `preset` accepts."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def preset(name: str) -> ExperimentConfig:
    """Returns a published configuration.

    It has the settings of `experiments/flags/NAME.flags`, which cites its sources.

    Raises `UserError`, which lists all names, if the name is unknown.

    >>> preset("enwik8_12l").model.n_layer
    12
    """
    known = preset_names()
    if name not in known:
        raise UserError(
            f"the preset must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )
    values = json.loads((_PRESETS / f"{name}.json").read_text())
    return from_dict(ExperimentConfig, values)


def evaluation_preset_names() -> list[str]:
    """Returns the names that `evaluation_preset` accepts."""
    return sorted(path.stem for path in _EVALUATION_PRESETS.glob("*.json"))


def evaluation_preset(name: str) -> dict[str, Any]:
    """Returns the settings of a published evaluation by dotted name, for `config_tree.replace`.

    They are the settings of `experiments/flags/NAME.flags`, which cites its sources.

    >>> evaluation_preset("enwik8_24l_dynamic")["eval.mem_len"]
    3800
    """
    values: dict[str, Any] = json.loads((_EVALUATION_PRESETS / f"{name}.json").read_text())
    # Convert the JSON values to the settings' types, such as a rule from its name.
    config = from_dict(ExperimentConfig, to_dict(ExperimentConfig()) | values)
    return {setting_name: get(config, setting_name) for setting_name in values}
