"""Runs the commands: `main(run, Plan)`, or `train_main(DEFAULTS)` for the command of a corpus."""

from txl_jax.cli.app import main as main
from txl_jax.cli.job import Job as Job
from txl_jax.cli.plans import Plan as Plan
from txl_jax.cli.plans import StoredTypes as StoredTypes
from txl_jax.cli.plans import TextPlan as TextPlan
from txl_jax.cli.plans import TimedPlan as TimedPlan
from txl_jax.cli.plans import TrainedRun as TrainedRun
from txl_jax.cli.plans import WatchPlan as WatchPlan
from txl_jax.cli.train_command import train_main as train_main
from txl_jax.config.config_tree import setting as setting
from txl_jax.runtime.compilation_cache import keep_compiled as keep_compiled
