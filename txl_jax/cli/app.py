"""Runs a command (`main`). CONTRIBUTING.md has an example.

Exit codes: 0, 1 (error), 2 (a command line that cannot be parsed), 75 (another process was lost),
128 + signal.
"""

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NoReturn

import jax
from absl import flags

from txl_jax.cli import flag_tree, help, other_hosts
from txl_jax.cli.job import Job
from txl_jax.cli.plans import Plan, TrainedRun, with_recorded_folders
from txl_jax.cli.precedence import SMALL, defaults_in_force, defaults_of_corpus
from txl_jax.config import ExperimentConfig
from txl_jax.errors import (
    NonFiniteError,
    RemoteProcessError,
    UserError,
    describe_system_error,
    first_line,
    one_line,
)
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runtime import distributed, output
from txl_jax.runtime.checkpoint import quiet_orbax
from txl_jax.runtime.compilation_cache import check_outside, keep_compiled
from txl_jax.runtime.environment import is_out_of_memory
from txl_jax.runtime.remote import shorten_storage_logs
from txl_jax.runtime.stop import act_on_notices

FLAGS = flags.FLAGS

_SAVES_MEMORY = (
    "Lower --train.batch_size or --eval.batch_size, or try --model.remat=full or "
    "--model.attention=tiled"
)
_TRAINED = "Settings that you do not pass come from the trained run, instead of the defaults shown."
_PRESET = f"Without a flagfile or a --model flag, --flagfile={SMALL} is used, as shown here."
# Settings of plans that name the directory of a run.
_FOLDERS_OF_RUNS = ("workdir", "model", "model_path")
# Short names of the command's flags. Errors and documentation name the flags by them.
_aliases: dict[str, str] = {}


def main(
    run: Callable[..., int | None],
    plan: type[Plan],
    *,
    config: ExperimentConfig | None = None,
    by_corpus: bool = False,
    groups: Collection[str] | None = (),
    hosts: Literal["alone", "join", "each"] = "alone",
    takes_words: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> NoReturn:
    """Runs a command, all of `python -m experiments.NAME`, and exits.

    Args:
      run: `run(plan, job)` returns the exit code. None means 128 + the number of the signal that
        stopped it (like `Interrupted`), 141 if its output is no longer read, and 0 otherwise.
      plan: The command's own settings, each of which is a flag.
      config: The config that the flags change, or None if the command has no flags for a config.
      by_corpus: Whether the defaults of `data` come from the corpus that the flags name.
      groups: The groups of settings that the command uses, for --help, or None for all.
      hosts: What to do with multiple hosts: join them ("join"), fail ("alone"), or let each run the
        command by itself ("each").
      takes_words: Whether words that are not flags are passed to the command, instead of being an
        error.
      aliases: Short names of flags, mapped to their full names.
    """
    output.prepare()
    flag_tree.define_plan(plan)
    if hosts == "join":
        other_hosts.define_flags()
    if config is not None:
        flag_tree.define(config)
    _define_aliases(aliases or {})
    help_flags = {"--help", "-h", "-help", "--helpfull"} & set(sys.argv[1:])
    if help_flags:
        shown = None if "--helpfull" in help_flags else groups
        _print_help(plan, shown, config, by_corpus)
        sys.exit(0)
    parsed = _parse(takes_words)

    with guarded():
        processes = _join_others(hosts)
        # On a Google Cloud machine this starts to wait for preemption notices, in the background.
        act_on_notices()

        # If a flag is wrong in one process, all of them end here, and none waits for it.
        settings = distributed.run_on_all(lambda: flag_tree.build_plan(plan))
        if processes is not None:
            other_hosts.check_same(settings)
        settings.validate()
        # A flagfile may come from a stranger, so it must not set where code is loaded from.
        flag_tree.refuse_code(settings, parsed.places)
        # A resumed run reads its text from the directories in its record, unless flags set others.
        settings = with_recorded_folders(settings, parsed.places)
        _cache_compiled(settings)

        defaults = config or ExperimentConfig()
        if by_corpus:
            defaults = defaults_of_corpus(defaults, FLAGS)
        job = Job(settings, defaults, parsed.words, parsed.places, parsed.flagfile)
        try:
            code = run(settings, job)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}, {settings.stopped}")
            code = None

        # None means that a signal has stopped the command, or that it has printed its result. In
        # the second case the code is 0, or 141 if the output is no longer read.
        if code is None:
            # Shells report a process that was ended by a signal as 128 + the signal's number.
            code = 128 + job.stop.signal_number if job.stop else output.exit_code()
        # With one process this only flushes the output.
        other_hosts.leave(code, together=True)
    sys.exit(code)


def _define_aliases(aliases: Mapping[str, str]) -> None:
    for alias, name in aliases.items():
        flags.DEFINE_alias(alias, name)
    _aliases.clear()
    _aliases.update(aliases)


def _parse(takes_words: bool) -> flag_tree.Parsed:
    """Parses the command line. Exits with 2 after an error message."""
    try:
        return flag_tree.parse(sys.argv, takes_words=takes_words)
    except UserError as error:
        fail(error)
        sys.exit(2)


def _print_help(
    plan: type[Plan],
    groups: Collection[str] | None,
    config: ExperimentConfig | None,
    by_corpus: bool,
) -> None:
    """Prints the command's docstring and its flags, of these groups or, with None, of all.

    The defaults shown are the values of a run without further flags. They come from the flagfiles
    on the command line, or from the preset that a command chooses by itself.
    """
    # `--help | head` ends quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    names = []
    for name in FLAGS:
        # Other libraries define flags too, such as absl's own.
        if "txl_jax.cli" in str(FLAGS.find_module_defining_flag(name)):
            names.append(name)
    leaves = flag_tree.setting_leaves(plan)
    required = [flag_tree.flag_name(leaf) for leaf in leaves if leaf.setting.required]
    note = _TRAINED if issubclass(plan, TrainedRun) else ""

    in_force = None
    if config is not None:
        words = [word for word in sys.argv[1:] if word.lstrip("-").startswith("flagfile=")]
        own_flags = [flag_tree.flag_name(leaf) for leaf in leaves]
        try:
            in_force = defaults_in_force(
                config, [sys.argv[0], *words], without=own_flags, by_corpus=by_corpus
            )
        except UserError as error:
            fail(error)
            sys.exit(2)
        if config.model != in_force.model and not words:
            note = f"{note} {_PRESET}".strip()
    print(sys.modules["__main__"].__doc__ or "")
    print(help.help_text(names, groups, FLAGS, note, required, in_force))


def _join_others(hosts: Literal["alone", "join", "each"]) -> other_hosts.Processes | None:
    """Joins the other processes of this command. Returns None if there are none to join.

    Raises:
      UserError: If the command must run as a single process, but there are more.
      ConnectionError: If not all processes connect.
    """
    if hosts == "each":
        return None
    processes = other_hosts.announced(other_hosts.environment())
    if processes is None:
        return None
    if hosts == "alone":
        raise UserError(
            f"this command must run as a single process, got {processes.num_processes} "
            f"processes (announced by {processes.source}). Start it once, outside of them."
        )
    other_hosts.join(processes)
    return processes


def _cache_compiled(settings: Plan) -> None:
    """Enables a command's compilation cache. Raises `UserError` if it is inside a run."""
    cache = settings.compilation_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    check_outside(cache, [getattr(settings, name, None) for name in _FOLDERS_OF_RUNS])
    keep_compiled(settings.compilation_cache, by_default=settings.caches_compiled)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turns an error that the user can fix into a message and an exit code.

    Other errors keep their traceback.
    """
    quiet_orbax()
    shorten_storage_logs()
    try:
        yield
    except BaseException as error:
        code = exit_code_for(error)
        if code is None:
            if not jax.distributed.is_initialized():
                raise
            # This process exits below, without giving Python the chance to print the traceback.
            traceback.print_exc()
        # A loss is a sum over all processes, so a loss that is not finite ends all of them.
        together = distributed.is_known_to_all(error) or isinstance(error, NonFiniteError)
        sys.exit(other_hosts.leave(code or 1, together=together))


def exit_code_for(error: BaseException) -> int | None:
    """Prints an error that the user can fix and returns its exit code.

    Returns None, silently, for a bug.
    """
    match error:
        case KeyboardInterrupt():
            fail("interrupted. Saved files are kept. Rerun the same command to resume.")
            return 128 + signal.SIGINT
        case Exception() if is_out_of_memory(error):
            fail(f"out of device memory ({first_line(error)}). {_SAVES_MEMORY}.")
        case Exception() if other_hosts.lost_another(error):
            # This process ends meanwhile if it is known which one.
            time.sleep(other_hosts.SECONDS_TO_NAME)
            fail(
                f"another process of this run was lost ({first_line(error)}). {other_hosts.RESUME}."
            )
            return other_hosts.LOST
        case RemoteProcessError():
            # The process that failed prints it too.
            if distributed.is_primary():
                fail(error)
        case UserError():
            fail(error)
        case OSError():
            fail(describe_system_error(error))
        case RuntimeError() | AssertionError() if _is_about_devices(error):
            platforms = jax.config.values["jax_platforms"] or "not set"
            fail(
                f"jax cannot use the devices ({first_line(error)}, JAX_PLATFORMS is {platforms}). "
                "Check JAX_PLATFORMS, and whether another process uses the devices."
            )
        case _:
            return None
    return 1


def _is_about_devices(error: BaseException) -> bool:
    """Returns whether JAX raised the error while it was looking for devices."""
    innermost_call = traceback.extract_tb(error.__traceback__)[-1:]
    return "xla_bridge" in str(innermost_call)


def fail(error: BaseException | str) -> None:
    """Prints an error message to standard error, on one line even if names contain newlines."""
    text = str(error)
    for alias, name in _aliases.items():
        # --data.train is named by its alias, --data.train.more is not.
        text = re.sub(rf"--{re.escape(name)}\b(?!\.)", f"--{alias}", text)
    print(f"{other_hosts.prefix()}error: {one_line(text)}", file=sys.stderr, flush=True)
