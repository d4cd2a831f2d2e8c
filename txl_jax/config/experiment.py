"""The root of the settings, relations between its groups, and presets of other implementations.

Letters: B batch, L segment length, M memory length, K = M + L keys, D model width, H heads, E head
width, F inner width, V vocabulary, N layers, C clusters of the adaptive softmax, S segments per call.
"""

import dataclasses
import enum
import json
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from txl_jax.config.config_tree import (
    Config,
    check_fields,
    did_you_mean,
    format_value,
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
    OptimizerName,
    RegularizationConfig,
    ScheduleOffset,
    TrainConfig,
)
from txl_jax.errors import UserError

__all__ = [
    "COMPAT_PRESETS",
    "ExperimentConfig",
    "InitVocabulary",
]

# Settings by dotted name, on top of the defaults, that make this model the one of another implementation.
COMPAT_PRESETS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
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
)
# Settings of earlier versions with the values at which they did nothing: records may still have them.
REMOVED: Mapping[str, Any] = types.MappingProxyType(
    {
        "model.residual": "sum",
        "model.end_token": None,
        "model.dropout.weight": 0.0,
        "model.compat.lamb": "paper",
        "data.tokenizer.lower_case": False,
        "data.tokenizer.empty_end": "refuse",
        "data.tokenizer.bin_type": "uint16",
        "data.epoch_memory": "emptied",
        "optimizer.adam_b1": 0.9,
        "optimizer.mu_dtype": None,
        "mesh.dcn_data": None,
        "regularization.adversarial": 0.0,
        "eval.segments_per_call": 8,
    }
)
REMOVED_ADVICE = "the setting was removed, and commit eea3a51 is the last that has it"
_PRESETS = Path(__file__).parents[1] / "presets"


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
        _validate_lengths("train", self.train)
        _validate_lengths("eval", self.eval)
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
        if self.data.reset_at is None:
            return
        for name, value, needed in (
            ("model.network", self.model.network, Network.TRANSFORMER_XL),
            ("model.compat.memory_start", self.model.compat.memory_start, MemoryStart.MASKED),
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
        require(
            self.eval.temperature == 1 or not (self.model.cutoffs or self.model.has_projections),
            f"eval.temperature is {self.eval.temperature} and the softmax has clusters or projections (model.cutoffs "
            f"{list(self.model.cutoffs)}, model.d_embed {self.model.d_embed}); it goes with a full softmax over "
            "d_model",
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


def _validate_lengths(group: str, lengths: TrainConfig | EvalConfig) -> None:
    """Raises `UserError` for lengths of a recurrence that cannot go together."""
    require(
        lengths.stride is None or lengths.stride <= lengths.segment_len,
        f"{group}.stride is {lengths.stride} and {group}.segment_len is {lengths.segment_len}; the stride lies between "
        "1 and that, or is none for all of it",
    )
    require(
        not (lengths.stride and lengths.mem_len),
        f"{group}.stride is {lengths.stride} and {group}.mem_len is {lengths.mem_len}; tokens that a segment reads "
        "again are not to be remembered too, so give one of them",
    )
    require(
        not lengths.same_length or lengths.mem_len > 0,
        f"{group}.same_length is on and {group}.mem_len is {lengths.mem_len}; the window would be empty",
    )


def from_record(values: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the config that `to_dict` turned into a dictionary, in this version or an earlier one.

    Raises:
      UserError: If a setting is unknown (with the nearest names) or has been removed, or a value has another type.
    """
    values = {re.sub(r"^compat\.", "model.compat.", name): value for name, value in values.items()}  # Of older records.
    if values.get("data.reset_at") is not None:
        values.pop("model.end_token", None)  # It follows from that and the vocabulary.
    if values.get("model.compat.lamb") == "nvidia":
        del values["model.compat.lamb"]
        if values.get("optimizer.name") == OptimizerName.LAMB:
            values["optimizer.name"] = OptimizerName.LAMB_NVIDIA
    for name in REMOVED.keys() & values.keys():
        if (value := values.pop(name)) != REMOVED[name]:
            raise UserError(f"{name} is {format_value(value)}; {REMOVED_ADVICE}")
    return from_dict(ExperimentConfig, values)


def apply_preset(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Returns the config with a preset of `COMPAT_PRESETS`; settings of other presets get their defaults."""
    named = {setting: get(ExperimentConfig(), setting) for preset in COMPAT_PRESETS.values() for setting in preset}
    return replace(config, named | dict(COMPAT_PRESETS[name]))


def preset_names() -> list[str]:
    """Returns the names that `preset` takes."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def preset(name: str) -> ExperimentConfig:
    """Returns a published configuration: the settings of `experiments/flags/NAME.flags`, with its sources.

    >>> preset("enwik8_12l").model.n_layer
    12

    Raises:
      UserError: If there is none of this name. The message has all names.
    """
    if name not in (known := preset_names()):
        raise UserError(f"there is no preset {name!r} among {', '.join(known)}{did_you_mean(name, known)}")
    return from_dict(ExperimentConfig, json.loads((_PRESETS / f"{name}.json").read_text()))
