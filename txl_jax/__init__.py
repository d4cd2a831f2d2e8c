"""Transformer-XL (Dai et al., 2019) in JAX and Flax.

These are the public names; everything else may change. They are imported when they are first used, and the settings
import no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from txl_jax.version import __version__, check_jax

if TYPE_CHECKING:
    from txl_jax import config
    from txl_jax.config import *  # noqa: F403 (all settings are public)
    from txl_jax.config.experiment import preset
    from txl_jax.data.corpus import read_corpus
    from txl_jax.data.segments import SegmentReader, evaluation_segments, training_segments
    from txl_jax.errors import UserError
    from txl_jax.memory import Memory
    from txl_jax.memory import reset as reset_memory
    from txl_jax.metrics import Totals
    from txl_jax.modules.transformer_xl import TransformerXL
    from txl_jax.ops.attention import Visibility, attention, sinusoids
    from txl_jax.recurrence import Segments, scan_segments, weighted_sum
    from txl_jax.runs.train import train
    from txl_jax.runs.trainer import Outcome
    from txl_jax.runtime.sinks import Sink
    from txl_jax.trained_model import Continuation, LanguageModel, load
    from txl_jax.training.hooks import Hook, HookContext

    __all__ = ["__version__"]
    __all__ += config.__all__
    __all__ += [
        "Continuation",
        "Hook",
        "HookContext",
        "LanguageModel",
        "Memory",
        "Outcome",
        "SegmentReader",
        "Segments",
        "Sink",
        "Totals",
        "TransformerXL",
        "UserError",
        "Visibility",
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

# Module of each public name that is not a setting.
_PLACES = {
    "Continuation": "trained_model",
    "Hook": "training.hooks",
    "HookContext": "training.hooks",
    "LanguageModel": "trained_model",
    "Memory": "memory",
    "Outcome": "runs.trainer",
    "SegmentReader": "data.segments",
    "Segments": "recurrence",
    "Sink": "runtime.sinks",
    "Totals": "metrics",
    "TransformerXL": "modules.transformer_xl",
    "UserError": "errors",
    "Visibility": "ops.attention",
    "attention": "ops.attention",
    "evaluation_segments": "data.segments",
    "load": "trained_model",
    "preset": "config.experiment",
    "read_corpus": "data.corpus",
    "reset_memory": "memory",
    "scan_segments": "recurrence",
    "sinusoids": "ops.attention",
    "train": "runs.train",
    "training_segments": "data.segments",
    "weighted_sum": "recurrence",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _PLACES:
        check_jax()
        module = importlib.import_module(f"txl_jax.{_PLACES[name]}")
        return getattr(module, "reset" if name == "reset_memory" else name)
    settings = importlib.import_module("txl_jax.config")
    if name in settings.__all__:
        return getattr(settings, name)
    raise AttributeError(f"module 'txl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *importlib.import_module("txl_jax.config").__all__, *_PLACES]
