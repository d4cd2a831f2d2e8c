"""Configurations of several flagfiles in one program, changed by the settings on its command line."""

from absl import flags

from txl_jax.cli import flag_tree
from txl_jax.cli.programs import config_of_flags
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree

FLAGS = flags.FLAGS


def config_of_flagfile(name: str) -> ExperimentConfig:
    """Returns the config of a flagfile, changed by the settings on this command line; raises `UserError`."""
    changed = flags.FlagValues()
    flag_tree.define(ExperimentConfig(), changed)
    given = [f"--{leaf}={config_tree.format_value(value)}" for leaf, value in flag_tree.given(FLAGS).items()]
    flag_tree.parse(["flagfile", f"--flagfile={name}", *given], changed)
    return config_of_flags(changed)
