"""The runner of programs: `main(run, Plan)`; a corpus's program is `train_main(DEFAULTS)`."""

from txl_jax.cli.program import Job, Plan, StoredTypes, TextPlan, TrainedRun, WatchPlan, keep_compiled, main, train_main
from txl_jax.config.config_tree import setting

__all__ = [
    "Job",
    "Plan",
    "StoredTypes",
    "TextPlan",
    "TrainedRun",
    "WatchPlan",
    "keep_compiled",
    "main",
    "setting",
    "train_main",
]
