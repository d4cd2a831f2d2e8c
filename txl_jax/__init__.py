"""Transformer-XL (Dai et al., 2019) in JAX and Flax.

The public names; everything else may change. They are imported when first used, so that `import txl_jax` and the
settings alone import no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from txl_jax.version import __version__, check_jax

if TYPE_CHECKING:
    from txl_jax.config import (
        AttentionPath,
        AttentionWindow,
        AverageConfig,
        CompatConfig,
        CorpusName,
        DataConfig,
        DropoutConfig,
        DType,
        EmptyEnd,
        Encoding,
        EpochMemory,
        EvalConfig,
        ExperimentConfig,
        GenerateConfig,
        Heldout,
        IdType,
        LineMark,
        LossPart,
        MemoryStart,
        MeshConfig,
        ModelConfig,
        Network,
        Newlines,
        NormPlace,
        OptimizerConfig,
        OptimizerName,
        Order,
        RegularizationConfig,
        Remat,
        Residual,
        Roll,
        ScheduleOffset,
        ShawTerms,
        Tokenizer,
        TokenizerConfig,
        TrainConfig,
    )
    from txl_jax.config.tree import preset
    from txl_jax.data.corpus import read_corpus
    from txl_jax.data.segments import SegmentReader, evaluation_segments, training_segments
    from txl_jax.errors import UserError
    from txl_jax.losses import weighted_sum
    from txl_jax.memory import Memory
    from txl_jax.memory import reset as reset_memory
    from txl_jax.metrics import Totals
    from txl_jax.modules.transformer_xl import TransformerXL
    from txl_jax.ops.attention import Visibility, attention, sinusoids
    from txl_jax.recurrence import scan_segments
    from txl_jax.runs.train import train
    from txl_jax.runs.trainer import Outcome
    from txl_jax.runtime.sinks import Sink
    from txl_jax.segments import Segments
    from txl_jax.trained_model import Continuation, LanguageModel, load
    from txl_jax.training.loop import Hook, HookContext

# Module and name there of each public name that is no setting; settings are in `txl_jax.config`.
_PLACES = {
    "Continuation": ("txl_jax.trained_model", "Continuation"),
    "Hook": ("txl_jax.training.loop", "Hook"),
    "HookContext": ("txl_jax.training.loop", "HookContext"),
    "LanguageModel": ("txl_jax.trained_model", "LanguageModel"),
    "Memory": ("txl_jax.memory", "Memory"),
    "Outcome": ("txl_jax.runs.trainer", "Outcome"),
    "SegmentReader": ("txl_jax.data.segments", "SegmentReader"),
    "Segments": ("txl_jax.segments", "Segments"),
    "Sink": ("txl_jax.runtime.sinks", "Sink"),
    "Totals": ("txl_jax.metrics", "Totals"),
    "TransformerXL": ("txl_jax.modules.transformer_xl", "TransformerXL"),
    "UserError": ("txl_jax.errors", "UserError"),
    "Visibility": ("txl_jax.ops.attention", "Visibility"),
    "attention": ("txl_jax.ops.attention", "attention"),
    "evaluation_segments": ("txl_jax.data.segments", "evaluation_segments"),
    "load": ("txl_jax.trained_model", "load"),
    "preset": ("txl_jax.config.tree", "preset"),
    "read_corpus": ("txl_jax.data.corpus", "read_corpus"),
    "reset_memory": ("txl_jax.memory", "reset"),
    "scan_segments": ("txl_jax.recurrence", "scan_segments"),
    "train": ("txl_jax.runs.train", "train"),
    "sinusoids": ("txl_jax.ops.attention", "sinusoids"),
    "training_segments": ("txl_jax.data.segments", "training_segments"),
    "weighted_sum": ("txl_jax.losses", "weighted_sum"),
}

__all__ = [
    "AttentionPath",
    "AttentionWindow",
    "AverageConfig",
    "CompatConfig",
    "Continuation",
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
    "Hook",
    "HookContext",
    "IdType",
    "LanguageModel",
    "LineMark",
    "LossPart",
    "Memory",
    "MemoryStart",
    "MeshConfig",
    "ModelConfig",
    "Network",
    "Newlines",
    "NormPlace",
    "OptimizerConfig",
    "OptimizerName",
    "Order",
    "Outcome",
    "RegularizationConfig",
    "Remat",
    "Residual",
    "Roll",
    "ScheduleOffset",
    "SegmentReader",
    "Segments",
    "ShawTerms",
    "Sink",
    "Tokenizer",
    "TokenizerConfig",
    "Totals",
    "TrainConfig",
    "TransformerXL",
    "UserError",
    "Visibility",
    "__version__",
    "attention",
    "evaluation_segments",
    "load",
    "preset",
    "read_corpus",
    "reset_memory",
    "scan_segments",
    "sinusoids",
    "train",
    "training_segments",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'txl_jax' has no attribute {name!r}")
    if name in _PLACES:
        check_jax()
    module, attribute = _PLACES.get(name, ("txl_jax.config", name))
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
