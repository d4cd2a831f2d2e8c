"""Runs the commands: `main(run, Plan)`, or `train_main(DEFAULTS)` for a corpus's command."""

from txl_jax.cli.program import Job as Job
from txl_jax.cli.program import Plan as Plan
from txl_jax.cli.program import StoredTypes as StoredTypes
from txl_jax.cli.program import TextPlan as TextPlan
from txl_jax.cli.program import TimedPlan as TimedPlan
from txl_jax.cli.program import TrainedRun as TrainedRun
from txl_jax.cli.program import WatchPlan as WatchPlan
from txl_jax.cli.program import main as main
from txl_jax.cli.program import train_main as train_main
from txl_jax.config.config_tree import setting as setting
from txl_jax.runtime.compilation_cache import keep_compiled as keep_compiled
