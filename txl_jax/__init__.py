"""Transformer-XL (Dai et al., 2019) in JAX and Flax.

These are the public names. Everything else may change. They are imported on first use, and the
settings do not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from txl_jax.version import __version__ as __version__
from txl_jax.version import check_jax

if TYPE_CHECKING:  # `as`: each is public for type checkers too.
    from txl_jax.config import *  # noqa: F403 (all settings are public)
    from txl_jax.config.experiment import preset as preset
    from txl_jax.data.corpus import read_corpus as read_corpus
    from txl_jax.data.segments import SegmentReader as SegmentReader
    from txl_jax.data.segments import evaluation_segments as evaluation_segments
    from txl_jax.data.segments import training_segments as training_segments
    from txl_jax.errors import UserError as UserError
    from txl_jax.memory import Memory as Memory
    from txl_jax.memory import init, reset, update
    from txl_jax.metrics import Totals as Totals
    from txl_jax.modules.transformer_xl import TransformerXL as TransformerXL
    from txl_jax.ops.adaptive_softmax import Cluster as Cluster
    from txl_jax.ops.adaptive_softmax import TailEntries as TailEntries
    from txl_jax.ops.adaptive_softmax import embed, log_probabilities, negative_log_likelihood
    from txl_jax.ops.attention import Visibility as Visibility
    from txl_jax.ops.attention import attention as attention
    from txl_jax.ops.attention import sinusoids as sinusoids
    from txl_jax.recurrence import Segments as Segments
    from txl_jax.recurrence import scan_segments as scan_segments
    from txl_jax.recurrence import weighted_sum as weighted_sum
    from txl_jax.runs.trainer import Outcome as Outcome
    from txl_jax.runs.trainer import train as train
    from txl_jax.runtime.sinks import Sink as Sink
    from txl_jax.trained_model import Continuation as Continuation
    from txl_jax.trained_model import LanguageModel as LanguageModel
    from txl_jax.trained_model import load as load
    from txl_jax.training.hooks import Hook as Hook
    from txl_jax.training.hooks import HookContext as HookContext

    adaptive_embed = embed
    adaptive_log_probabilities = log_probabilities
    adaptive_nll = negative_log_likelihood
    init_memory = init
    reset_memory = reset
    update_memory = update

# The public names that are not settings, by module.
_MODULES = {
    "config.experiment": ("preset",),
    "data.corpus": ("read_corpus",),
    "data.segments": ("SegmentReader", "evaluation_segments", "training_segments"),
    "errors": ("UserError",),
    "memory": ("Memory", "init_memory", "reset_memory", "update_memory"),
    "metrics": ("Totals",),
    "modules.transformer_xl": ("TransformerXL",),
    "ops.adaptive_softmax": (
        "Cluster",
        "TailEntries",
        "adaptive_embed",
        "adaptive_log_probabilities",
        "adaptive_nll",
    ),
    "ops.attention": ("Visibility", "attention", "sinusoids"),
    "recurrence": ("Segments", "scan_segments", "weighted_sum"),
    "runs.trainer": ("Outcome", "train"),
    "runtime.sinks": ("Sink",),
    "trained_model": ("Continuation", "LanguageModel", "load"),
    "training.hooks": ("Hook", "HookContext"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

# Public names that are different in their module, such as `txl_jax.memory.init`.
_NAMES_IN_MODULE = {
    "adaptive_embed": "embed",
    "adaptive_log_probabilities": "log_probabilities",
    "adaptive_nll": "negative_log_likelihood",
    "init_memory": "init",
    "reset_memory": "reset",
    "update_memory": "update",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _PLACES:
        check_jax()
        module = importlib.import_module(f"txl_jax.{_PLACES[name]}")
        return getattr(module, _NAMES_IN_MODULE.get(name, name))
    settings = importlib.import_module("txl_jax.config")
    if name in settings.__all__:
        return getattr(settings, name)
    raise AttributeError(f"module 'txl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *importlib.import_module("txl_jax.config").__all__, *_PLACES]
