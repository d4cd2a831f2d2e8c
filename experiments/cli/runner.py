"""From a command line to a job. What the user can mend is said in one sentence."""

import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.cli import flag_tree, hosts
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.sources.corpora import program_of
from txl_jax.errors import CheckpointError, LogError, NonFiniteError, RemoteProcessError
from txl_jax.jobs import evaluate, generate, score_tokens, train
from txl_jax.jobs.score import Interrupted
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import distributed
from txl_jax.runtime.orbax_io import quiet_orbax
from txl_jax.runtime.preemption import StopRequest

_MODES = ("train", "eval", "score", "generate")
# The program that knows how a corpus's text becomes tokens.
_PROGRAMS = {name: program_of(name) for name in CorpusName}
# What a user can mend. Anything else is our mistake and keeps its traceback.
_USER_ERRORS = (ValueError, OSError, CheckpointError, NonFiniteError, LogError)
_GOES_ON = "start the same command on all hosts again, it goes on from the last checkpoint"
_SAVES_MEMORY = "try a smaller --train.batch_size or --eval.batch_size, or --model.remat=full"

FLAGS = flags.FLAGS


def run(defaults: ExperimentConfig, *, aliases: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """The whole of `python -m experiments.NAME`; exits with 0, 1 (error), 2 (usage), 75 (another process is gone) or 128 + signal.

    Args:
      defaults: what the flags change.
      aliases: short names of flags, to their full names.
    """
    define_flags(defaults)
    for alias, name in aliases.items():
        flags.DEFINE_alias(alias, name)
    parse_or_exit()
    sys.exit(guarded(lambda: _run_mode(defaults), begin=hosts.join))


def define_flags(defaults: ExperimentConfig) -> None:
    """The flags of a run."""
    flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
    define_workdir()
    define_data_folders()
    hosts.define_flags()
    flag_tree.define(defaults)


def define_workdir() -> None:
    """The flag of the run's folder."""
    flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, logs, results. Made if missing.")


def define_data_folders() -> None:
    """The flags of the folders that a text is read from."""
    flags.DEFINE_string("data_dir", "data", "Folder of the corpora's own files.")
    flags.DEFINE_string(
        "cache_dir", None, "Folder for what is made of a text: records, tokens; none: prepared in data_dir."
    )


def parse_or_exit(argv: Sequence[str] | None = None) -> None:
    """Parses the command line; on a mistake prints one sentence and exits with 2, on --help exits with 0."""
    argv = list(sys.argv if argv is None else argv)
    if {"--help", "-h", "-help", "--helpfull"} & set(argv[1:]):
        print(sys.modules["__main__"].__doc__ or "")
        print(_help())
        sys.exit(0)
    try:
        flag_tree.parse(argv)
    except ValueError as error:
        fail(error)
        sys.exit(2)


def guarded(job: Callable[[], int], *, begin: Callable[[], None] = hosts.alone) -> int:
    """Runs a job; a mistake that the user can mend becomes one sentence and the exit code 1.

    Args:
      begin: what is done about other hosts before: `hosts.join`, `hosts.each`, or `hosts.alone`, which refuses them.
    """
    quiet_orbax()
    try:
        begin()
        return hosts.leave(job(), together=True)
    except BaseException as error:
        code = _told(error)
        if code is None:
            if not jax.distributed.is_initialized():
                raise
            traceback.print_exc()
        # A loss is a sum over all processes, so that one that is not finite ends them all.
        together = distributed.is_known_to_all(error) or isinstance(error, NonFiniteError)
        return hosts.leave(code or 1, together=together)


def _told(error: BaseException) -> int | None:
    """The exit code for an error of a user, who is told what it was; None: it is none."""
    match error:
        case KeyboardInterrupt():
            fail("interrupted; what was saved before stays, and the same command goes on from there")
            return 128 + signal.SIGINT
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            fail(f"the device has too little memory ({_first_line(error)}); {_SAVES_MEMORY}")
        case Exception() if hosts.lost_another(error):
            fail(f"another process of this run is gone ({_first_line(error)}); {_GOES_ON}")
            return hosts.LOST
        case RemoteProcessError():
            if distributed.is_primary():  # Where it happened it is said too.
                fail(error)
        case ValueError() if not _raised_by_us(error):
            return None
        case _ if isinstance(error, _USER_ERRORS):
            fail(error)
        case _:
            return None
    return 1


def fail(error: BaseException | str) -> None:
    """Says one sentence on the error stream."""
    print(f"{hosts.prefix()}error: {error}", file=sys.stderr, flush=True)


def given_workdir() -> Workdir:
    """The folder that the command line names; raises `ValueError` if it names none."""
    if not FLAGS.workdir:
        raise ValueError("no workdir was given; say with --workdir=PATH where checkpoints and logs belong")
    return Workdir(Path(FLAGS.workdir).expanduser().resolve())


def check_same_flags(*names: str) -> None:
    """Raises `ValueError`, in all processes, for one whose values of these flags are not those of the first.

    For flags that are no settings: those are compared with the text.
    """
    for name in names:
        distributed.assert_same_on_all(
            str(FLAGS[name].value),
            lambda first, other, name=name: f"--{name} is {other}, and {first} in process 0; give all the same",
        )


def _run_mode(defaults: ExperimentConfig) -> int:
    check_same_flags("mode")
    workdir = distributed.run_on_all(given_workdir)
    if FLAGS.mode == "train":
        return _train(defaults, workdir)
    return {"eval": _evaluate, "score": _score_tokens, "generate": _generate}[FLAGS.mode](workdir)


def _train(defaults: ExperimentConfig, workdir: Workdir) -> int:
    def prepare() -> tuple[ExperimentConfig, Corpus]:
        config = with_absolute_paths(flag_tree.build(defaults))
        config.validate()
        check_program(defaults, config)
        workdir.check_same_settings(config)  # Before a text is read, which may take minutes.
        return config, read_corpus(config.data, FLAGS.data_dir, FLAGS.cache_dir)

    config, corpus = distributed.run_on_all(prepare)
    with StopRequest() as stop:  # From here on: a text that is being read may be stopped at once.
        outcome = train.run(config, corpus, workdir, stop_requested=lambda: stop)
    return 0 if outcome.finished else _stopped(stop)


def _evaluate(workdir: Workdir) -> int:
    return score_trained(evaluate.run, workdir, *trained_config(workdir), stopped="nothing was written")


def _score_tokens(workdir: Workdir) -> int:
    return score_trained(score_tokens.run, workdir, *trained_config(workdir), stopped="its scores were not written")


def score_trained(
    job: Callable[..., Any], workdir: Workdir, config: ExperimentConfig, text: TextInfo, *, stopped: str
) -> int:
    """Runs a job that scores the text of a trained run, or another in its vocabulary; returns the exit code.

    Args:
      job: called as `evaluate.run`.
      config, text: of `trained_config`.
      stopped: what is said of the files if a signal ends the job.
    """
    corpus = distributed.run_on_all(lambda: trained_corpus(config, text))
    with StopRequest() as stop:
        try:
            job(config, corpus, workdir, trained_on=text, stop_requested=lambda: stop)
        except Interrupted as interrupted:
            print(f"stopped   on request while scoring {interrupted}; {stopped}")
    return _stopped(stop)


def trained_corpus(config: ExperimentConfig, text: TextInfo) -> Corpus:
    """The text that `config` names, in the vocabulary of a trained run; in the run's own folders unless others are given."""
    folders = (FLAGS.data_dir, FLAGS.cache_dir)
    if not FLAGS["data_dir"].present:  # As the run was started, unless this is another machine.
        folders = (text.data_dir, FLAGS.cache_dir or text.cache_dir)
    return read_corpus(config.data, *folders, vocabulary=text.vocabulary)


def _generate(workdir: Workdir) -> int:
    config, text = trained_config(workdir)
    with StopRequest() as stop:
        generate.run(config, text.vocabulary, workdir, stop_requested=lambda: stop)
    return _stopped(stop)


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Raises `ValueError` if a flagfile, or a flag, asks for the corpus of another program."""
    own, asked = defaults.data.corpus, config.data.corpus
    if _PROGRAMS[asked] != _PROGRAMS[own]:
        raise ValueError(
            f"data.corpus is {asked} and this is the program of {own}; run python -m experiments.{_PROGRAMS[asked]}, or "
            f"take a flagfile of {own}"
        )


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """The config with its files named from the root, so that the run may be picked up from any folder."""
    paths = {leaf.name: config_tree.get(config, leaf.name) for leaf in config_tree.leaves() if leaf.setting.path}
    return config_tree.replace(config, {name: _absolute(value) for name, value in paths.items()})


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(os.path.abspath, value))
    return value and os.path.abspath(value)


def _stopped(stop: StopRequest) -> int:
    """The exit code of a job that a signal may have ended: 128 + its number, as shells count."""
    return 128 + stop.signal_number if stop else 0


def trained_config(workdir: Workdir) -> tuple[ExperimentConfig, TextInfo]:
    """The config that a run was trained with, changed by what was given now, and its text.

    A trained run needs no flagfile to be read again.

    Raises:
      ValueError: what was given would change the trained model.
    """
    return distributed.run_on_all(lambda: _trained_config(workdir))


def _trained_config(workdir: Workdir) -> tuple[ExperimentConfig, TextInfo]:
    trained, text = workdir.load()
    config = with_absolute_paths(flag_tree.build(_without_old_files(trained)))
    refused = [
        config_tree.describe_change(leaf, old, new)
        for leaf, old, new in config_tree.differences(trained, config)
        if leaf.name.startswith(("model.", "compat.")) or leaf.setting.shapes_tokens
    ]
    if refused:
        raise ValueError(
            f"the run in {workdir.path} was trained with another model or other tokens: {'; '.join(refused)}"
        )
    config.validate()
    return config, text


def _without_old_files(trained: ExperimentConfig) -> ExperimentConfig:
    """The config without the files of its training, if others were given now."""
    names = [f"data.{name}" for name in ("file", "train", "valid", "test")]
    given = flag_tree.given(FLAGS)
    other_corpus = given.get("data.corpus", trained.data.corpus) != trained.data.corpus
    if not other_corpus and not any(name in given for name in names):
        return trained
    return config_tree.replace(trained, {name: config_tree.get(ExperimentConfig(), name) for name in names})


def _raised_by_us(error: BaseException) -> bool:
    """Whether an error was raised by this project's own code, and not inside a library."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return _is_ours(traceback.tb_frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    """Whether a module, as Python or absl names it, belongs to this project."""
    return module.partition(".")[0] in ("txl_jax", "experiments", "__main__") or module == sys.argv[0]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _help() -> str:
    """The program's flags with their defaults; the libraries' own are left out."""
    first = ["flagfile", "mode", "workdir", "data_dir", "cache_dir", *hosts.FLAG_NAMES, "compat", "seed"]
    ours = {flag.name for module, found in FLAGS.flags_by_module_dict().items() if _is_ours(module) for flag in found}
    names = [name for name in first if name in FLAGS] + sorted(ours - set(first))
    lines = ["Flags (a flagfile holds one per line; later flags win):", ""]
    for name in names:
        flag = FLAGS[name]
        choices = getattr(flag.parser, "enum_values", None)
        kind = f" ({'|'.join(choices)})" if choices else ""
        text = flag.help.partition(">: ")[2] if choices else flag.help  # absl puts "<a|b>: " before it.
        default = (flag.default_as_str or "").strip("'")
        lines.append(f"  --{name}={default}{kind}\n      {text}")
    lines += ["", f"Flagfiles: {', '.join(flag_tree.flagfile_names())}"]
    return "\n".join(lines)
