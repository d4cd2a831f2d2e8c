"""Settings of a run: a tree of frozen dataclasses. `ExperimentConfig` is its root.

Nothing here imports jax. Each setting is declared once, by `txl_jax.config.settings.setting`; `txl_jax.config.tree`
reads and changes the tree by dotted names.
"""

from txl_jax.config.data import (
    CorpusName,
    DataConfig,
    EmptyEnd,
    EpochMemory,
    Heldout,
    IdType,
    LineMark,
    Newlines,
    Order,
    Roll,
    Tokenizer,
    TokenizerConfig,
)
from txl_jax.config.evaluation import EvalConfig, GenerateConfig
from txl_jax.config.experiment import COMPAT_PRESETS, ExperimentConfig, InitVocabulary
from txl_jax.config.model import (
    AttentionPath,
    AttentionWindow,
    CompatConfig,
    DropoutConfig,
    DType,
    Encoding,
    MemoryStart,
    ModelConfig,
    Network,
    NormPlace,
    Remat,
    Residual,
    ShawTerms,
)
from txl_jax.config.training import (
    AverageConfig,
    LossPart,
    MeshConfig,
    OptimizerConfig,
    RegularizationConfig,
    ScheduleOffset,
    TrainConfig,
)

__all__ = [
    "COMPAT_PRESETS",
    "AttentionPath",
    "AttentionWindow",
    "AverageConfig",
    "CompatConfig",
    "CorpusName",
    "DType",
    "DataConfig",
    "DropoutConfig",
    "EmptyEnd",
    "Encoding",
    "EpochMemory",
    "EvalConfig",
    "ExperimentConfig",
    "GenerateConfig",
    "Heldout",
    "IdType",
    "InitVocabulary",
    "LineMark",
    "LossPart",
    "MemoryStart",
    "MeshConfig",
    "ModelConfig",
    "Network",
    "Newlines",
    "NormPlace",
    "OptimizerConfig",
    "Order",
    "RegularizationConfig",
    "Remat",
    "Residual",
    "Roll",
    "ScheduleOffset",
    "ShawTerms",
    "Tokenizer",
    "TokenizerConfig",
    "TrainConfig",
]
