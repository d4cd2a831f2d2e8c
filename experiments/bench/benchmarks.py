"""What the programs of the benchmarks share: flags from a plan and a config, one process, no text."""

import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from absl import flags

from experiments.cli import flag_tree, programs, runner
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.config import tree as config_tree

FLAGS = flags.FLAGS

Plan = TypeVar("Plan")


def run_benchmark(
    plan_class: type[Plan], run: Callable[[Plan], Any], *, defaults: ExperimentConfig, groups: Collection[str]
) -> None:
    """Runs a benchmark and exits.

    Args:
      plan_class: a frozen dataclass of `setting(...)` fields with `validate()`; the fields are flags without a prefix.
      run: called with the plan of the flags.
      defaults: the config that the other flags change.
      groups: settings that it reads, for --help.
    """

    def job() -> int:
        plan: Any = flag_tree.build_plan(plan_class)
        plan.validate()
        run(plan)
        return 0

    flag_tree.define_plan(plan_class)
    flag_tree.define(defaults)
    runner.parse_or_exit()
    sys.exit(runner.guarded(job))


def corpus_config(defaults: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns the config of the flags; of a corpus with a program, its defaults are used instead of `defaults`.

    Raises:
      UserError: values that cannot go together.
    """
    corpus = CorpusName(flag_values["data.corpus"].value or defaults.data.corpus)
    config = flag_tree.build(programs.DEFAULTS.get(corpus, defaults), flag_values)
    config.validate()
    return config


def flagfile_config(name: str, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns the config of a flagfile, changed by the settings that were given on the command line."""
    changed = flags.FlagValues()
    flag_tree.define(ExperimentConfig(), changed)
    given = [f"--{leaf}={config_tree.format_value(value)}" for leaf, value in flag_tree.given(flag_values).items()]
    flag_tree.parse([name, f"--flagfile={name}", *given], changed)
    return corpus_config(ExperimentConfig(), changed)
