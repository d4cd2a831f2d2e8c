"""`main`, the whole of a program: flags of a plan and of a config, other hosts, errors, exit codes.

    @dataclasses.dataclass(frozen=True)
    class Plan(cli.TrainedRun):
        count: int = setting(3, "Passages.", at_least=1)

    def run(plan: Plan, job: cli.Job) -> None:
        config, corpus, trained = job.trained()
        with job.stop:
            ...

    if __name__ == "__main__":
        cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "eval"), hosts="join")

Exit codes: 0, 1 (error), 2 (a command line that cannot be parsed), 75 (another process is gone), 128 + signal.
"""

import dataclasses
import hashlib
import os
import platform
import signal
import sys
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import jax
from absl import flags

from txl_jax.cli import flag_tree, help, other_hosts
from txl_jax.config import CacheDType, CorpusName, ExperimentConfig, WeightDType, config_tree
from txl_jax.config.config_tree import Config, setting
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.data.published import check_file, default_data
from txl_jax.errors import NonFiniteError, RemoteProcessError, UserError
from txl_jax.runs import warm_start
from txl_jax.runs.run import Run
from txl_jax.runs.score import Interrupted
from txl_jax.runs.weights import Weights
from txl_jax.runtime import distributed, stop
from txl_jax.runtime.checkpoint import quiet_orbax
from txl_jax.runtime.storage import as_path, is_remote, shorten_storage_logs

FLAGS = flags.FLAGS
Settings = TypeVar("Settings")

_RESUME = "start the same command on all hosts again, it resumes from the last checkpoint"
_SAVES_MEMORY = "try a smaller --train.batch_size or --eval.batch_size, --model.remat=full or --model.attention=tiled"
_TRAINED = "Settings that are not given are those of the trained run, instead of the defaults shown."
# JAX compiles dozens of programs for a run; those that take less would gain little.
_MIN_COMPILE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Plan(Config):
    """What a program is asked to do: a dataclass of `setting` fields, each of them a flag without prefix.

    Help, absolute paths, and the comparison between hosts follow from the fields.

    Attributes:
      stopped: what becomes of its files if a signal ends it; printed then.
    """

    compilation_cache: str | None = setting(
        None,
        "Folder of compiled programs, which a second start reads; default: compilation in the cache_dir, if there is "
        "one and one process; off: none.",
    )

    stopped: ClassVar[str] = "the same command resumes from there"


@dataclasses.dataclass(frozen=True)
class TextPlan(Plan):
    """The plan of a program that reads a text."""

    data_dir: str = setting("data", "Folder of the corpora's own files.", path=True)
    cache_dir: str | None = setting(
        None, "Folder for records and token files; default: prepared in data_dir.", path=True
    )


@dataclasses.dataclass(frozen=True)
class TrainedRun(TextPlan):
    """The plan of a program that reads a trained run and a text."""

    workdir: str = setting("", "Folder of the run.", path=True, required=True)
    ensemble_member: str | None = setting(None, "Member of an ensemble, by name.")

    stopped: ClassVar[str] = "nothing was written"


@dataclasses.dataclass(frozen=True)
class StoredTypes(Plan):
    """The dtypes of a trained model's weights and KV caches, for quantization."""

    weight_dtype: WeightDType | None = setting(None, "Quantized type of the weights, in place of the saved one.")
    cache_dtype: CacheDType | None = setting(None, "Type of KV caches, in place of the saved one.")


class Job:
    """What a command line says besides the plan.

    Attributes:
      words: Its words that are not flags.
      places: Where each flag was set: "" for the command line, else the flagfile and the line.
      flagfile: The name of the last flagfile, or None without a flagfile.
      defaults: The config that the flags change.
      stop: A request to stop, by a signal or a notice. `with job.stop:` begins to wait for it.
    """

    def __init__(self, plan: Any, defaults: ExperimentConfig, parsed: flag_tree.Parsed, *, by_corpus: bool):
        self.words, self.places, self.flagfile = parsed
        self.stop = stop.StopRequest()
        self.defaults = _defaults_of_corpus(defaults) if by_corpus else defaults
        self._plan = plan

    def config(self, run: Run | None = None) -> ExperimentConfig:
        """Returns the flags over the defaults; all processes call it.

        Args:
          run: The run to train, if any. If it is recorded, its record replaces the defaults. Otherwise, with
            `init_from`, the settings of the model that it begins with replace the same defaults.

        Raises:
          UserError: If settings cannot go together, or describe another model than the weights.
        """
        if run is not None and not run.is_new:
            recorded = run.config
            return distributed.run_on_all(lambda: _config(_without_old_files(recorded)))
        config = distributed.run_on_all(lambda: _config(self.defaults))
        if run is None or config.init_from is None:
            return config
        trained, which = warm_start.basis(config.init_from, run), config.init_vocabulary

        def over_trained() -> ExperimentConfig:
            changed = _config(warm_start.with_trained_settings(self.defaults, trained, which))
            warm_start.check_model(changed, trained.config)
            return changed

        return distributed.run_on_all(over_trained)

    def config_of_flagfile(self, name: str) -> ExperimentConfig:
        """Returns the config of another flagfile, of its corpus, changed by the settings on this command line."""
        typed = [f"--{leaf}={config_tree.format_value(value)}" for leaf, value in flag_tree.given(FLAGS).items()]
        values = flags.FlagValues()
        flag_tree.define(self.defaults, values)
        flag_tree.parse(["flagfile", f"--flagfile={name}", *typed], values)
        return _config(_defaults_of_corpus(self.defaults, values), values)

    def config_of(self, trained: Run | Weights) -> ExperimentConfig:
        """Returns the settings of a trained model and the flags over them, so that no flagfile is needed.

        Raises:
          UserError: If the flags would change the model or its tokens.
        """

        def over_trained() -> ExperimentConfig:
            config = _config(_without_old_files(trained.config))
            refused = [
                config_tree.describe_change(leaf, old, new)
                for leaf, old, new in config_tree.differences(trained.config, config)
                if (leaf.name.startswith("model.") and not leaf.setting.free_on_resume) or leaf.setting.shapes_tokens
            ]
            if refused:
                raise UserError(
                    f"the run in {trained.path} was trained with another model or other tokens: {'; '.join(refused)}; "
                    "leave these flags out"
                )
            return config

        return distributed.run_on_all(over_trained)

    def trained(
        self, check: Callable[[ExperimentConfig], Any] = lambda config: None
    ) -> tuple[ExperimentConfig, Corpus, Run]:
        """Reads the run of a `TrainedRun` plan: its settings with the flags over them, its text, and the run itself.

        `check` is called with the settings before the text is read, and raises `UserError` if they do not fit.
        """
        run = Run.read(self._plan.workdir, member=self._plan.ensemble_member)
        config = self.config_of(run)
        check(config)
        return config, self.corpus(config, run), run

    def corpus(self, config: ExperimentConfig, run: Run | None = None) -> Corpus:
        """Reads the text of a config.

        Args:
          run: A trained run, whose vocabulary is used, and whose folders are the default. Or the run to train, with the
            vocabulary of the model that it begins with.
        """
        folders = self._plan.data_dir, self._plan.cache_dir
        if run is None or (run.is_open and config.init_from is None):
            return distributed.run_on_all(lambda: read_corpus(config.data, *folders))
        if run.is_open:
            return warm_start.read_corpus(config, run, *folders)
        if "data_dir" not in self.places:  # As the run was started, unless this is another machine.
            folders = (run.text.data_dir, self._plan.cache_dir or run.text.cache_dir)
        vocabulary = run.text.vocabulary
        return distributed.run_on_all(lambda: read_corpus(config.data, *folders, vocabulary=vocabulary))


def main(
    run: Callable[..., int | None],
    plan: type[Plan],
    *,
    config: ExperimentConfig | None = None,
    by_corpus: bool = False,
    groups: Collection[str] | None = (),
    hosts: Literal["alone", "join", "each"] = "alone",
    takes_words: bool = False,
    aliases: Mapping[str, str] = types.MappingProxyType({}),
) -> NoReturn:
    """Runs a program, the whole of `python -m experiments.NAME`, and exits.

    Args:
      run: Called as `run(plan, job)`. Returns the exit code, or None for 0, or for 128 + the number of the signal that
        stopped it. It may raise `Interrupted`.
      plan: The program's settings; each is a flag.
      config: The config that the flags change, or None if the program has no flags for a config.
      by_corpus: Whether the defaults of `data` come from the corpus that the flags name.
      groups: The groups of settings that the program reads, for --help, or None for all.
      hosts: With several hosts: "join" them, fail ("alone"), or let each run the program by itself ("each").
      takes_words: Whether words that are not flags are passed to the program, instead of being an error.
      aliases: Short names of flags, and their full names.
    """
    flag_tree.define_plan(plan)
    if hosts == "join":
        other_hosts.define_flags()
    if config is not None:
        flag_tree.define(config)
    for alias, name in aliases.items():
        flags.DEFINE_alias(alias, name)
    parsed = _parse(plan, groups, takes_words)

    def job() -> int:
        # With one process `distributed.run_on_all(f)` is `f()`, and nothing is compared between hosts.
        made = distributed.run_on_all(lambda: _with_absolute_paths(flag_tree.build_plan(plan)))
        other_hosts.check_same(
            {
                flag_tree.flag_name(leaf): config_tree.get(made, leaf.name)
                for leaf in config_tree.leaves(plan)
                if not leaf.setting.path and leaf.name != "compilation_cache"
            }
        )
        made.validate()
        keep_compiled(getattr(made, "data_dir", None), getattr(made, "cache_dir", None), given=made.compilation_cache)
        asked = Job(made, config or ExperimentConfig(), parsed, by_corpus=by_corpus)
        code = None
        try:
            code = run(made, asked)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}; {made.stopped}")
        if code is not None:
            return code
        return 128 + asked.stop.signal_number if asked.stop else 0  # As shells count.

    sys.exit(
        guarded(job, begin={"alone": other_hosts.alone, "join": other_hosts.join, "each": other_hosts.each}[hosts])
    )


def _parse(plan: type[Plan], groups: Collection[str] | None, takes_words: bool) -> flag_tree.Parsed:
    """Parses the command line; on an error prints one sentence and exits with 2, on --help exits with 0."""
    if asked := {"--help", "-h", "-help", "--helpfull"} & set(sys.argv[1:]):
        required = [flag_tree.flag_name(leaf) for leaf in config_tree.leaves(plan) if leaf.setting.required]
        note = _TRAINED if issubclass(plan, TrainedRun) else ""
        help.print_help(None if "--helpfull" in asked else groups, FLAGS, note=note, required=required)
        sys.exit(0)
    try:
        return flag_tree.parse(sys.argv, takes_words=takes_words)
    except UserError as error:
        fail(error)
        sys.exit(2)


def guarded(job: Callable[[], int], *, begin: Callable[[], None] = other_hosts.alone) -> int:
    """Runs a job; an error that the user can mend becomes one sentence and an exit code, others keep their traceback.

    Args:
      job: returns the exit code.
      begin: called first, for other hosts: `join`, `each`, or `alone` of `other_hosts`; the last refuses them.
    """
    quiet_orbax()
    shorten_storage_logs()
    try:
        begin()  # With one process nothing happens.
        stop.act_on_notices()  # Of machines on Google Cloud, else nothing.
        return other_hosts.leave(job(), together=True)
    except BaseException as error:
        code = exit_code_for(error)
        if code is None:
            if not jax.distributed.is_initialized():
                raise
            traceback.print_exc()
        # A loss is a sum over all processes, so that one that is not finite ends them all.
        together = distributed.is_known_to_all(error) or isinstance(error, NonFiniteError)
        return other_hosts.leave(code or 1, together=together)


def exit_code_for(error: BaseException) -> int | None:
    """Prints an error that the user can mend and returns its exit code; prints nothing and returns None for a bug."""
    match error:
        case KeyboardInterrupt():
            fail("interrupted; what was saved before stays, and the same command resumes from there")
            return 128 + signal.SIGINT
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            fail(f"the device has too little memory ({_first_line(error)}); {_SAVES_MEMORY}")
        case Exception() if other_hosts.lost_another(error):
            fail(f"another process of this run is gone ({_first_line(error)}); {_RESUME}")
            return other_hosts.LOST
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
    print(f"{other_hosts.prefix()}error: {error}", file=sys.stderr, flush=True)


def keep_compiled(data_dir: str | None = None, cache_dir: str | None = None, *, given: str | None = None) -> None:
    """Turns JAX's compilation cache on: a program that was compiled once is read from disk at the next start.

    It never ends a run: entries that cannot be read or written are warnings, and a folder that cannot be used is one
    line. Where the environment names a folder already (JAX_COMPILATION_CACHE_DIR) only `given` changes it.

    Args:
      data_dir: Directory of the texts, if any.
      cache_dir: Directory of the prepared text, or None for `prepared` in `data_dir`.
      given: The directory, or "off", or None for `compilation` in the directory of the prepared text if there is one
        process. Several processes share a directory only if the user says so: only process 0 writes there, and on GPUs
        the others would wait forever for its part of the autotuning if they did not see it.
    """
    folder = given
    if given is None and jax.config.values["jax_compilation_cache_dir"] is None and not distributed.is_multiprocess():
        prepared = cache_dir or (data_dir and os.path.join(data_dir, "prepared"))
        # Object storage is paid by the request.
        folder = None if is_remote(prepared or "") else prepared and os.path.join(prepared, "compilation")
    if folder in (None, "", "off", "none"):
        return
    # XLA compiles for the processor that it finds, and JAX's keys do not name it: on a disk that machines share, one
    # would read programs with instructions that it lacks.
    folder = os.path.join(folder if is_remote(folder) else os.path.abspath(os.path.expanduser(folder)), _processor())
    if reason := None if is_remote(folder) else _unusable(folder):
        print(f"note      compiled programs are not kept: {folder} {reason}", flush=True)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)


def _processor() -> str:
    """Returns a name for the instructions of this processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _unusable(folder: str) -> str | None:
    """Returns why a directory cannot be written to, or None if nothing is in the way. JAX makes it when it is used."""
    nearest = Path(folder)
    while not os.path.exists(nearest):  # False too where a folder above may not be entered.
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"lies below {nearest}, which is a file; give --compilation_cache=PATH, or off"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return "cannot be written to; give --compilation_cache=PATH, or off"


def config_of_words(
    defaults: ExperimentConfig, words: Sequence[str], *, without: Collection[str] = ()
) -> ExperimentConfig:
    """Returns the config that a program would make of a command line.

    Args:
      words: The command line, after the program's name.
      without: Its flags that are not settings.

    Raises:
      UserError: If the program would.
    """
    values = flags.FlagValues()
    flag_tree.define(defaults, values)
    for name in without:
        flags.DEFINE_string(name, None, "", flag_values=values)
    flag_tree.parse(words, values)
    return _config(defaults, values)


def _defaults_of_corpus(defaults: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    corpus = CorpusName(str(flag_values["data.corpus"].value))
    return dataclasses.replace(defaults, data=default_data(corpus))


def _config(base: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns the flags over a config, with absolute paths; raises `UserError` for settings that do not go together."""
    config = _with_absolute_paths(flag_tree.build(base, flag_values))
    config.validate()
    check_file(config.data)
    return config


def _with_absolute_paths(settings: Settings) -> Settings:
    """Returns a config or a plan with absolute paths, so that it means the same in any folder.

    Raises:
      UserError: If no installed package opens a URL.
    """
    leaves = [leaf for leaf in config_tree.leaves(type(settings)) if leaf.setting.path]
    return config_tree.replace(
        settings, {leaf.name: _absolute(config_tree.get(settings, leaf.name)) for leaf in leaves}
    )


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    if is_remote(value or ""):
        return as_path(value)
    return value and os.path.abspath(os.path.expanduser(value))


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
