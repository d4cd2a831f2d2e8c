"""Runs the job of a command line: modes, exit codes, and one sentence for every error that a user can mend."""

import dataclasses
import signal
import sys
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
from absl import flags

from txl_jax.cli import compilation_cache, flag_tree, help_text, hosts, score_input, training_config, watch
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.published import check_file, program_of
from txl_jax.errors import NonFiniteError, RemoteProcessError, UserError
from txl_jax.interop.portable import is_portable
from txl_jax.runs import generate, score, train, warm_start
from txl_jax.runs.run import TextInfo, Workdir
from txl_jax.runs.score import Interrupted
from txl_jax.runs.weights import Pretrained, open_pretrained
from txl_jax.runtime import distributed, stop
from txl_jax.runtime.checkpoint import quiet_orbax
from txl_jax.runtime.stop import StopRequest
from txl_jax.runtime.storage import as_path, shorten_storage_logs

_MODES = ("train", "eval", "score", "generate")
_RESUME = "start the same command on all hosts again, it resumes from the last checkpoint"
_SAVES_MEMORY = "try a smaller --train.batch_size or --eval.batch_size, or --model.remat=full"

FLAGS = flags.FLAGS

Config = TypeVar("Config")


def run(defaults: ExperimentConfig, *, aliases: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Runs a corpus's program, the whole of `python -m experiments.NAME`, and exits.

    Exit codes: 0, 1 (error), 2 (usage), 75 (another process is gone), 128 + signal.

    Args:
      defaults: the config that the flags change.
      aliases: short names of flags, to their full names.
    """
    define_flags(defaults)
    for alias, name in aliases.items():
        flags.DEFINE_alias(alias, name)
    parse_or_exit()
    sys.exit(guarded(lambda: _run_mode(defaults), begin=hosts.join))


def define_flags(defaults: ExperimentConfig) -> None:
    """Defines the flags of a run."""
    flags.DEFINE_enum("mode", "train", _MODES, "Job.")
    define_workdir()
    score_input.define_flags()
    watch.define_flags()
    define_data_folders()
    hosts.define_flags()
    flag_tree.define(defaults)


def define_workdir() -> None:
    """Defines the flags of the run's folder, and of the member if it holds an ensemble."""
    flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, logs, results. Created if missing.")
    flags.DEFINE_string("ensemble_member", None, "Member of an ensemble that is read, by name; not for training.")


def define_data_folders() -> None:
    """Defines the flags of the folders that a text is read from."""
    flags.DEFINE_string("data_dir", "data", "Folder of the corpora's own files.")
    flags.DEFINE_string("cache_dir", None, "Folder for records and token files; default: prepared in data_dir.")


def parse_or_exit(
    argv: Sequence[str] | None = None,
    *,
    groups: Collection[str] | None = None,
    note: str = "",
    required: Collection[str] = (),
    takes_words: bool = False,
) -> list[str]:
    """Parses the command line; on an error prints one sentence and exits with 2, on --help exits with 0.

    Args:
      argv: default: that of the process.
      groups: the groups of settings that the program reads, for --help; None: all.
      note: a line for --help above the flags.
      required: the flags that --help shows without their default, as the program does not use it.
      takes_words: whether words that are no flags are the program's, and no error.

    Returns:
      These words.
    """
    compilation_cache.define_flag()
    argv = list(sys.argv if argv is None else argv)
    if asked := {"--help", "-h", "-help", "--helpfull"} & set(argv[1:]):
        help_text.print_help(None if "--helpfull" in asked else groups, FLAGS, note=note, required=required)
        sys.exit(0)
    try:
        return flag_tree.parse(argv, takes_words=takes_words)
    except UserError as error:
        fail(error)
        sys.exit(2)


def guarded(job: Callable[[], int], *, begin: Callable[[], None] = hosts.alone) -> int:
    """Runs a job; an error that the user can mend becomes one sentence and an exit code, others keep their traceback.

    Args:
      job: returns the exit code.
      begin: called first, for other hosts: `hosts.join`, `hosts.each`, or `hosts.alone`, which refuses them.
    """
    quiet_orbax()
    shorten_storage_logs()
    try:
        begin()
        stop.act_on_notices()
        compilation_cache.enable()
        return hosts.leave(job(), together=True)
    except BaseException as error:
        code = exit_code_for(error)
        if code is None:
            if not jax.distributed.is_initialized():
                raise
            traceback.print_exc()
        # A loss is a sum over all processes, so that one that is not finite ends them all.
        together = distributed.is_known_to_all(error) or isinstance(error, NonFiniteError)
        return hosts.leave(code or 1, together=together)


def exit_code_for(error: BaseException) -> int | None:
    """Prints an error that the user can mend and returns its exit code; None, and nothing printed: a bug."""
    match error:
        case KeyboardInterrupt():
            fail("interrupted; what was saved before stays, and the same command resumes from there")
            return 128 + signal.SIGINT
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            fail(f"the device has too little memory ({_first_line(error)}); {_SAVES_MEMORY}")
        case Exception() if hosts.lost_another(error):
            fail(f"another process of this run is gone ({_first_line(error)}); {_RESUME}")
            return hosts.LOST
        case RemoteProcessError():
            if distributed.is_primary():  # The process that failed prints it too.
                fail(error)
        case UserError() | OSError():
            fail(error)
        case _:
            return None
    return 1


def fail(error: BaseException | str) -> None:
    """Prints one sentence on the error stream."""
    print(f"{hosts.prefix()}error: {error}", file=sys.stderr, flush=True)


def given_workdir() -> Workdir:
    """Returns the folder that the command line names; raises `UserError` if it names none."""
    if not FLAGS.workdir:
        raise UserError("no workdir was given; set --workdir=PATH, the folder of checkpoints and logs")
    return Workdir(as_path(FLAGS.workdir), member=FLAGS.ensemble_member)


def score_trained(
    job: Callable[..., Any], workdir: Workdir, config: ExperimentConfig, text: TextInfo, *, stopped: str
) -> int:
    """Runs a job that scores the text of a trained run, or another in its vocabulary; returns the exit code.

    Args:
      job: called as `evaluate.run`.
      workdir: of the run.
      config: of `trained_config`.
      text: of `trained_config`.
      stopped: printed about the files if a signal ends the job.
    """
    corpus = distributed.run_on_all(lambda: trained_corpus(config, text))
    return until_stopped(
        lambda stop: job(config, corpus, workdir, trained_on=text, stop_requested=lambda: stop), stopped=stopped
    )


def until_stopped(job: Callable[[StopRequest], Any], *, stopped: str) -> int:
    """Runs a job that raises `Interrupted` once a stop is requested; returns the exit code.

    Args:
      job: called with the request.
      stopped: printed about the files if a signal ends the job.
    """
    with StopRequest() as stop:
        try:
            job(stop)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}; {stopped}")
    return exit_code_of(stop)


def exit_code_of(stop: StopRequest) -> int:
    """Returns the exit code of a job that a signal may have ended: 128 + its number, as shells count."""
    return 128 + stop.signal_number if stop else 0


def trained_corpus(config: ExperimentConfig, text: TextInfo) -> Corpus:
    """Returns the text of `config` in the vocabulary of a trained run, by default from the run's own folders."""
    folders = (FLAGS.data_dir, FLAGS.cache_dir)
    if not FLAGS["data_dir"].present:  # As the run was started, unless this is another machine.
        folders = (text.data_dir, FLAGS.cache_dir or text.cache_dir)
    return read_corpus(config.data, *folders, vocabulary=text.vocabulary)


def trained_config(workdir: Workdir) -> tuple[ExperimentConfig, TextInfo]:
    """Returns the config that a run was trained with, changed by the flags given now, and its text.

    A trained run needs no flagfile to be read again.

    Raises:
      UserError: the flags would change the trained model or its tokens.
    """
    return distributed.run_on_all(lambda: _trained_config(workdir))


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Raises `UserError` if the flags ask for the corpus of another program, or for a file that is no part of it."""
    check_file(config.data)
    own, asked = defaults.data.corpus, config.data.corpus
    if program_of(asked) != program_of(own):
        raise UserError(
            f"data.corpus is {asked} and this is the program of {own}; run python -m experiments.{program_of(asked)}, "
            f"or take a flagfile of {own}"
        )


def _run_mode(defaults: ExperimentConfig) -> int:
    own_flags = ("mode", "ensemble_member", *score_input.FLAG_NAMES, *watch.FLAG_NAMES)
    hosts.check_same({name: FLAGS[name].value for name in own_flags})
    workdir = distributed.run_on_all(given_workdir)
    if FLAGS.input is not None:
        return score_input.run(FLAGS.mode, lambda: _pretrained(workdir))
    if FLAGS.mode == "train":
        return _train(defaults, workdir)
    if distributed.run_on_all(lambda: is_portable(workdir.path)):
        raise UserError(
            f"{workdir.path} is a portable folder and --mode={FLAGS.mode} reads a run; give --mode=score with --input, "
            "begin a run with --init_from, or use experiments.serve or txl_jax.load"
        )
    _print_other_corpus(defaults, workdir)
    return {"eval": _evaluate, "score": _score_tokens, "generate": _generate}[FLAGS.mode](workdir)


def _print_other_corpus(defaults: ExperimentConfig, workdir: Workdir) -> None:
    """Prints a line if the run, and so its text unless a flag names another, belongs to another corpus' program."""
    trained = distributed.run_on_all(lambda: workdir.load()[0].data.corpus)
    if program_of(trained) != program_of(defaults.data.corpus) and not FLAGS["data.corpus"].present:
        print(f"corpus    {trained}, as in training; this is the program of {defaults.data.corpus}")


def _train(defaults: ExperimentConfig, workdir: Workdir) -> int:
    more = distributed.run_on_all(lambda: watch.given(workdir))

    def prepare() -> tuple[ExperimentConfig, Corpus]:
        if workdir.member is not None:
            raise UserError(
                f"--ensemble_member is {workdir.member!r} and --mode=train would train it alone; make it a run of its "
                "own with python -m experiments.ensemble --mode=split"
            )
        config = training_config.build(defaults, workdir)
        check_program(defaults, config)
        workdir.check_same_settings(config)  # Before a text is read, which may take minutes.
        return config, warm_start.read_corpus(config, workdir, FLAGS.data_dir, FLAGS.cache_dir)

    config, corpus = distributed.run_on_all(prepare)
    with StopRequest() as stop:  # From here on: while a text is read a signal ends the process at once.
        outcome = train.run(config, corpus, workdir, stop_requested=lambda: stop, **more)
    return 0 if outcome.finished else exit_code_of(stop)


def _evaluate(workdir: Workdir) -> int:
    return score_trained(score.evaluate_splits, workdir, *trained_config(workdir), stopped="nothing was written")


def _score_tokens(workdir: Workdir) -> int:
    return score_trained(score.score_tokens, workdir, *trained_config(workdir), stopped="its scores were not written")


def _generate(workdir: Workdir) -> int:
    config, text = trained_config(workdir)
    with StopRequest() as stop:
        generate.run(config, text.vocabulary, workdir, stop_requested=lambda: stop)
    return exit_code_of(stop)


def _trained_config(workdir: Workdir) -> tuple[ExperimentConfig, TextInfo]:
    trained, text = workdir.load()
    return _changed_by_flags(trained, workdir.path), text


def _pretrained(workdir: Workdir) -> Pretrained:
    """Returns the weights of a run or of a portable folder, with the flags given now in their config."""
    pretrained = open_pretrained(workdir.path, member=workdir.member)
    return dataclasses.replace(pretrained, config=_changed_by_flags(pretrained.config, pretrained.path))


def _changed_by_flags(trained: ExperimentConfig, path: str) -> ExperimentConfig:
    """Returns the config of a trained model with the flags given now; raises `UserError` if they change the model."""
    config = training_config.with_absolute_paths(flag_tree.build(_without_old_files(trained)))
    refused = [
        config_tree.describe_change(leaf, old, new)
        for leaf, old, new in config_tree.differences(trained, config)
        if (leaf.name.startswith(("model.", "compat.")) and not leaf.setting.free_on_resume)
        or leaf.setting.shapes_tokens
    ]
    if refused:
        raise UserError(
            f"the run in {path} was trained with another model or other tokens: {'; '.join(refused)}; leave "
            "these flags out"
        )
    config.validate()
    return config


def _without_old_files(trained: ExperimentConfig) -> ExperimentConfig:
    """Returns the config without the files of its training, if others are given now."""
    names = [f"data.{name}" for name in ("file", "train", "valid", "test")]
    given = flag_tree.given(FLAGS)
    other_corpus = given.get("data.corpus", trained.data.corpus) != trained.data.corpus
    if not other_corpus and not any(name in given for name in names):
        return trained
    return config_tree.replace(trained, {name: config_tree.get(ExperimentConfig(), name) for name in names})


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
