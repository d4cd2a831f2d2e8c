"""The config of a run that is to be trained: flags on top of a program's defaults, or of a trained model's settings."""

import os
from typing import Any, TypeVar

from absl import flags

from txl_jax.cli import flag_tree
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.runs import warm_start
from txl_jax.runs.run import Workdir
from txl_jax.runtime.storage import as_path, is_remote

Config = TypeVar("Config")


def build(
    defaults: ExperimentConfig, workdir: Workdir, flag_values: flags.FlagValues = flags.FLAGS
) -> ExperimentConfig:
    """Returns the config of the flags; with --init_from the trained model's settings are the defaults of the model.

    Raises:
      UserError: settings that cannot go together, no weights, or flags that describe another model than theirs.
    """
    config = with_absolute_paths(flag_tree.build(defaults, flag_values))
    if config.init_from is None:
        config.validate()
        return config
    trained = warm_start.basis(config.init_from, workdir)
    begins_with = warm_start.with_trained_settings(defaults, trained, config.init_vocabulary)
    config = with_absolute_paths(flag_tree.build(begins_with, flag_values))
    config.validate()
    if not workdir.holds_run():  # Else the settings are compared with those of the earlier start.
        warm_start.check_model(config, trained.config)
    return config


def with_absolute_paths(config: Config) -> Config:
    """Returns a config, or a study's plan, with absolute paths, so that it means the same in any folder.

    Raises:
      UserError: a URL that nothing here can open.
    """
    leaves = [leaf for leaf in config_tree.leaves(type(config)) if leaf.setting.path]
    paths = {leaf.name: config_tree.get(config, leaf.name) for leaf in leaves}
    return config_tree.replace(config, {name: _absolute(value) for name, value in paths.items()})


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    if is_remote(value or ""):
        return as_path(value)
    return value and os.path.abspath(os.path.expanduser(value))
