"""Programs of the paper's tables and figures: a `Plan` whose settings are the flags, and a `run` that takes it.

A plan is a frozen dataclass of `setting(...)` fields with `validate()`. Its flags carry no prefix. It needs no other
list of them: help, absolute paths and the comparison between processes follow from the fields. There is a function for
each kind of study:

- `run_study`: of one trained run, named by --workdir. Its plan also has `check(config)`, for settings of the run that
  do not fit, called before a text is read.
- `run_training_study`: trains runs of its own in --out, from the settings of the flags. Its plan has `check(config)`.
- `run_group_study`: of several trained runs. Its plan has `load_runs()`, whose first run's text is read.
- `run_model_study`: of an untrained model; it reads no text.
- `run_plan`: the same, for a program that builds its configs itself.
"""

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from absl import flags

from txl_jax.cli import flag_tree, hosts, programs, runner, training_config
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.runtime import distributed

FLAGS = flags.FLAGS
_RESUMES = "the same command resumes from there"
_SETTINGS_KEPT = "Settings that are not given are those of the trained run, instead of the defaults shown."


def run_study(
    plan_class: type,
    run: Callable[..., Any],
    *,
    groups: Collection[str] = ("data", "mesh", "eval"),
    begin: Callable[[], None] = hosts.join,
    stopped: str = "nothing was written",
) -> None:
    """Runs a study of a trained run and exits.

    Args:
      plan_class: the plan.
      run: called as `run(config, corpus, workdir, plan, trained_on=, stop_requested=)`.
      groups: settings that it reads, for --help.
      begin: `hosts.alone` for a study that works in one process only.
      stopped: printed about its files if a signal ends it.
    """

    def job() -> int:
        plan = _plan(plan_class)
        hosts.check_same({"ensemble_member": FLAGS.ensemble_member})
        workdir = runner.given_workdir()
        config, text = runner.trained_config(workdir)
        plan.check(config)  # Before a text is read.
        return runner.score_trained(functools.partial(run, plan=plan), workdir, config, text, stopped=stopped)

    runner.define_workdir()
    _main(plan_class, job, begin=begin, groups=groups, note=_SETTINGS_KEPT)


def run_training_study(plan_class: type, run: Callable[..., Any]) -> None:
    """Runs a study that trains runs of its own, from the defaults of the corpus's program, and exits.

    Args:
      plan_class: the plan.
      run: called as `run(config, corpus, plan, stop_requested=)`; the same call resumes.
    """

    def job() -> int:
        plan = _plan(plan_class)
        config = programs.config_of_flags()
        plan.check(config)  # Before a text is read.
        corpus = distributed.run_on_all(lambda: read_corpus(config.data, FLAGS.data_dir, FLAGS.cache_dir))
        return runner.until_stopped(
            lambda stop: run(config, corpus, plan, stop_requested=lambda: stop), stopped=_RESUMES
        )

    groups = [group for group in flag_tree.groups() if group != "generate"]
    _main(plan_class, job, begin=hosts.join, groups=groups)


def run_group_study(plan_class: type, run: Callable[..., Any]) -> None:
    """Runs a study of several trained runs in one process and exits.

    Args:
      plan_class: the plan.
      run: called as `run(runs, corpus, plan, stop_requested=)`; the same call resumes.
    """

    def job() -> int:
        plan = _plan(plan_class)
        runs = plan.load_runs()
        corpus = runner.trained_corpus(runs[0].config, runs[0].trained_on)
        return runner.until_stopped(lambda stop: run(runs, corpus, plan, stop_requested=lambda: stop), stopped=_RESUMES)

    _main(plan_class, job, begin=hosts.alone, config=False)


def run_model_study(
    plan_class: type,
    run: Callable[..., Any],
    *,
    defaults: ExperimentConfig,
    groups: Collection[str] = ("model", "eval"),
) -> None:
    """Runs a study of an untrained model in one process and exits.

    Args:
      plan_class: the plan.
      run: called as `run(config, plan)`.
      defaults: the config that the flags change.
      groups: settings that it reads, for --help.
    """
    run_plan(
        plan_class,
        lambda plan: run(training_config.with_absolute_paths(flag_tree.build(defaults)), plan),
        defaults=defaults,
        groups=groups,
    )


def run_plan(
    plan_class: type, run: Callable[[Any], Any], *, defaults: ExperimentConfig, groups: Collection[str]
) -> None:
    """Runs what reads no text in one process and exits.

    Args:
      plan_class: the plan.
      run: called as `run(plan)`; it makes a config of the flags itself.
      defaults: the config that the flags change, for their default values.
      groups: settings that it reads, for --help.
    """

    def job() -> int:
        run(_plan(plan_class))
        return 0

    _main(plan_class, job, begin=hosts.alone, groups=groups, defaults=defaults, text=False)


def _main(
    plan_class: type,
    job: Callable[[], int],
    *,
    begin: Callable[[], None],
    groups: Collection[str] = (),
    defaults: ExperimentConfig | None = None,
    text: bool = True,
    config: bool = True,
    note: str = "",
) -> None:
    """Defines the flags, parses them and runs the job.

    Args:
      plan_class: the plan.
      job: returns the exit code.
      begin: of `runner.guarded`.
      groups: of `runner.parse_or_exit`.
      defaults: of the config's flags; None: those of the library.
      text: whether it reads a text.
      config: whether there are flags for the settings of a run.
      note: of `runner.parse_or_exit`.
    """
    flag_tree.define_plan(plan_class)
    if text:
        runner.define_data_folders()
    if begin is hosts.join:
        hosts.define_flags()
    if config:
        flag_tree.define(defaults or ExperimentConfig())
    runner.parse_or_exit(groups=groups, note=note)
    sys.exit(runner.guarded(job, begin=begin))


def _plan(plan_class: type) -> Any:
    """Returns the plan of the flags, the same in all processes; its paths may differ between hosts."""
    plan: Any = training_config.with_absolute_paths(flag_tree.build_plan(plan_class))
    compared = {
        leaf.name: config_tree.get(plan, leaf.name) for leaf in config_tree.leaves(plan_class) if not leaf.setting.path
    }
    hosts.check_same(compared)
    plan.validate()
    return plan
