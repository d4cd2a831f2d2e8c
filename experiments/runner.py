"""From a command line to a job. What goes wrong for the user's sake is said in one sentence."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from experiments import flag_tree
from txl_jax import config as config_lib
from txl_jax.checkpoint import CheckpointError
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs import evaluate, generate, train
from txl_jax.jobs.score import Interrupted
from txl_jax.run_log import RunLogError
from txl_jax.training.progress import NonFiniteError
from txl_jax.training.stop import StopRequest
from txl_jax.workdir import TextInfo, Workdir

_MODES = ("train", "eval", "generate")
# What a user can mend. Anything else is our mistake and keeps its traceback.
_USER_ERRORS = (ValueError, OSError, CheckpointError, NonFiniteError, RunLogError)

FLAGS = flags.FLAGS


def run(defaults: ExperimentConfig, argv: Sequence[str] | None = None) -> None:
    """The whole of `python -m experiments.NAME`; exits with 0, 1 (error), 2 (usage) or 128 + signal."""
    define_flags(defaults)
    parse_or_exit(argv)
    sys.exit(guarded(lambda: _run_mode(defaults)))


def define_flags(defaults: ExperimentConfig) -> None:
    """The flags of a run."""
    flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
    flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, logs, results. Made if missing.")
    flags.DEFINE_string("data_dir", "data", "Folder of the corpora's own files.")
    flag_tree.define(defaults)


def parse_or_exit(argv: Sequence[str] | None = None) -> None:
    """Parses the command line; on a mistake prints one sentence and exits with 2, on --help exits with 0."""
    argv = list(sys.argv if argv is None else argv)
    if {"--help", "-h", "--helpfull", "-help"} & set(argv[1:]):
        print(sys.modules["__main__"].__doc__ or "")
        print(_help())
        sys.exit(0)
    try:
        flag_tree.parse(argv)
    except ValueError as error:
        fail(error)
        sys.exit(2)


def guarded(job: Callable[[], int]) -> int:
    """Runs a job; a mistake that the user can mend becomes one sentence and the exit code 1."""
    try:
        return job()
    except _USER_ERRORS as error:
        if isinstance(error, ValueError) and not _is_ours(error):
            raise
        fail(error)
        return 1


def fail(error: BaseException) -> None:
    """One sentence on the error stream."""
    print(f"error: {error}", file=sys.stderr, flush=True)


def _run_mode(defaults: ExperimentConfig) -> int:
    if not FLAGS.workdir:
        raise ValueError("no workdir was given; say with --workdir=PATH where checkpoints and logs belong")
    workdir = Workdir(Path(FLAGS.workdir).expanduser().resolve())
    with StopRequest() as stop:
        if FLAGS.mode == "train":
            return _train(defaults, workdir, stop)
        return {"eval": _evaluate, "generate": _generate}[FLAGS.mode](workdir, stop)


def _train(defaults: ExperimentConfig, workdir: Workdir, stop: StopRequest) -> int:
    config = flag_tree.build(defaults)
    config.validate()
    corpus = read_corpus(config.data, FLAGS.data_dir)
    outcome = train.run(config, corpus, workdir, stop_requested=lambda: stop)
    return 0 if outcome.finished else _stopped(stop)


def _evaluate(workdir: Workdir, stop: StopRequest) -> int:
    config, _ = _trained_config(workdir)
    corpus = read_corpus(config.data, FLAGS.data_dir)
    try:
        evaluate.run(config, corpus, workdir, stop_requested=lambda: stop)
    except Interrupted as interrupted:
        print(f"stopped   on request while scoring {interrupted}; nothing was written")
        return _stopped(stop)
    return 0


def _generate(workdir: Workdir, stop: StopRequest) -> int:
    config, text = _trained_config(workdir)
    generate.run(config, text.vocabulary, workdir)
    return _stopped(stop)


def _stopped(stop: StopRequest) -> int:
    """The exit code of a job that a signal may have ended: 128 + its number, as shells count."""
    return 128 + stop.signal_number if stop else 0


def _trained_config(workdir: Workdir) -> tuple[ExperimentConfig, TextInfo]:
    """The config that a run was trained with, changed by what was given now, and its text.

    A trained run needs no flagfile to be read again.

    Raises:
      ValueError: what was given would change the trained model.
    """
    trained, text = workdir.load()
    config = flag_tree.build(trained)
    refused = [
        f"--{leaf.name} was {old!s} and is now {new!s}"
        for leaf, old, new in config_lib.differences(trained, config)
        if leaf.name.startswith(("model.", "compat."))
    ]
    if refused:
        raise ValueError(f"the run in {workdir.path} was trained with another model: {'; '.join(refused)}")
    config.validate()
    return config, text


def _is_ours(error: BaseException) -> bool:
    """Whether an error was raised by this project's own code, and not inside a library."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("txl_jax", "experiments", "__main__")


def _help() -> str:
    """All flags of this project, with defaults."""
    names = ["flagfile", "mode", "workdir", "data_dir", "compat"]
    names += [name for name in FLAGS if name not in names and FLAGS[name].help and _is_project_flag(name)]
    lines = ["Flags (a flagfile holds one per line; later flags win):", ""]
    for name in names:
        flag = FLAGS[name]
        choices = getattr(flag.parser, "enum_values", None)
        kind = f" ({'|'.join(choices)})" if choices else ""
        lines.append(f"  --{name}={flag.default_as_str or ''}{kind}\n      {flag.help}")
    lines += ["", f"Flagfiles: {', '.join(flag_tree.flagfile_names())}"]
    return "\n".join(lines)


def _is_project_flag(name: str) -> bool:
    return name == "seed" or "." in name
