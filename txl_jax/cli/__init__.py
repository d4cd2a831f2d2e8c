"""Runs the commands: `main(run, Plan)`, or `train_main(DEFAULTS)` for a corpus's command."""

from txl_jax.cli.program import (
    Job,
    Plan,
    StoredTypes,
    TextPlan,
    TimedPlan,
    TrainedRun,
    WatchPlan,
    keep_compiled,
    main,
    train_main,
)
from txl_jax.config.config_tree import setting

__all__ = [
    "Job",
    "Plan",
    "StoredTypes",
    "TextPlan",
    "TimedPlan",
    "TrainedRun",
    "WatchPlan",
    "keep_compiled",
    "main",
    "setting",
    "train_main",
]
