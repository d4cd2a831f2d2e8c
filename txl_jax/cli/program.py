"""Runs a command (`main`) or a corpus's command (`train_main`). CONTRIBUTING.md has an example.

Exit codes: 0, 1 (error), 2 (a command line that cannot be parsed), 75 (another process was lost),
128 + signal.
"""

import contextlib
import dataclasses
import enum
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import jax
from absl import flags

from txl_jax.cli import flag_tree, help, other_hosts
from txl_jax.config import (
    CacheDType,
    CorpusName,
    DataConfig,
    ExperimentConfig,
    WeightDType,
    config_tree,
)
from txl_jax.config.config_tree import Config, require, setting
from txl_jax.config.experiment import preset
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import Corpus, read_corpus, refuse_packed
from txl_jax.data.published import check_file, default_data, program_of
from txl_jax.data.text import json_texts
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import (
    NonFiniteError,
    RemoteProcessError,
    UserError,
    describe_system_error,
    first_line,
    one_line,
)
from txl_jax.runs import score, warm_start
from txl_jax.runs.generate import check_can_generate, continue_prompts, generate_text
from txl_jax.runs.run import Run, recorded_folders
from txl_jax.runs.score import InputFormat, Interrupted
from txl_jax.runs.train import steps_in, train_run
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import distributed, output
from txl_jax.runtime.checkpoint import quiet_orbax
from txl_jax.runtime.compilation_cache import check_outside, keep_compiled
from txl_jax.runtime.environment import is_out_of_memory
from txl_jax.runtime.sinks import Sink, WeightsAndBiases
from txl_jax.runtime.stop import StopRequest, act_on_notices
from txl_jax.runtime.storage import shorten_storage_logs

FLAGS = flags.FLAGS

_SAVES_MEMORY = (
    "Lower --train.batch_size or --eval.batch_size, or try --model.remat=full or "
    "--model.attention=tiled"
)
_TRAINED = "Settings that you do not pass come from the trained run, instead of the defaults shown."
_FOLDERS_OF_RUNS = ("workdir", "model", "model_path")  # Settings of plans.
_WARMUP = "optimizer.warmup_steps"
# The command's short names of flags, by which its errors name them, as its documentation does.
_aliases: dict[str, str] = {}
# The preset for your own text if no sizes are set: the paper's would take months on a CPU.
SMALL = "small"


@dataclasses.dataclass(frozen=True)
class Plan(Config):
    """A command's own settings: a dataclass of `setting` fields, each a flag without prefix.

    Help, absolute paths, and the comparison between hosts follow from the fields.
    """

    compilation_cache: str | None = setting(
        None,
        "Directory that caches compiled functions for later starts. "
        "By default one per user, ~/.cache/txl_jax, for one process of a command that reads a "
        "text. off disables the cache.",
        loads_code=True,
    )

    # Whether there is a cache if no flag names one.
    caches_compiled: ClassVar[bool] = False
    # Printed when a signal ends the command.
    stopped: ClassVar[str] = "rerun the same command to resume"


@dataclasses.dataclass(frozen=True)
class TextPlan(Plan):
    """The settings of a command that reads a text."""

    data_dir: str = setting("data", "Directory of the original corpus files.", path=True)
    cache_dir: str | None = setting(
        None, "Directory for records and token files. By default 'prepared' in data_dir.", path=True
    )

    caches_compiled: ClassVar[bool] = True

    @property
    def trains(self) -> bool:
        """Whether the run in the workdir is trained.

        If so, it continues in the directories that its record names.
        """
        return False


@dataclasses.dataclass(frozen=True)
class TrainedRun(TextPlan):
    """The settings of a command that reads a trained run and a text."""

    workdir: str = setting("", "Directory of the run.", path=True, required=True)
    ensemble_member: str | None = setting(None, "Name of the ensemble member to use.")

    stopped: ClassVar[str] = "nothing was written"


@dataclasses.dataclass(frozen=True)
class StoredTypes(Plan):
    """The dtypes of a trained model's weights and KV caches, for quantization."""

    weight_dtype: WeightDType | None = setting(
        None, "Quantized dtype of the weights, instead of the saved one."
    )
    cache_dtype: CacheDType | None = setting(None, "Dtype of KV caches, instead of the saved one.")


@dataclasses.dataclass(frozen=True)
class WatchPlan(Plan):
    """Settings for watching a training run."""

    profile_steps: tuple[int, ...] = setting(
        (),
        "First and last training step of a profile for TensorBoard in the workdir, such as 10,15.",
    )
    wandb_project: str | None = setting(None, "Weights & Biases project to log to as well.")
    verbose: bool = setting(
        False, "Print details of attention and memory, which log.txt always contains."
    )

    def watch(self, run: Run) -> dict[str, Any]:
        """Returns arguments for training: sinks, profile_steps, verbose.

        Raises `UserError` if W&B is missing.
        """
        sinks: list[Sink] = (
            [WeightsAndBiases(self.wandb_project, run.path)] if self.wandb_project else []
        )
        return {
            "sinks": sinks,
            "profile_steps": self.profile_steps or None,
            "verbose": self.verbose,
        }


@dataclasses.dataclass(frozen=True)
class TimedPlan(Plan):
    """The setting for training as long as a given time."""

    minutes: float | None = setting(
        None,
        "Minutes to train and evaluate, not to compile. Sets train.steps at the first start, by "
        "the measured speed.",
        above=0,
    )

    def keep_steps(self, config: ExperimentConfig, job: "Job", run: Run) -> ExperimentConfig:
        """Returns the config with the steps that --minutes set at the first start.

        This applies if the run has started already.

        Raises `UserError` if --train.steps is passed too, or with several processes, whose clocks
        differ.
        """
        if self.minutes is None:
            return config
        both = job.places.get("train.steps") == ""
        require(
            not both,
            "--minutes and --train.steps both set how long to train. Leave one of them out.",
        )
        require(
            not distributed.is_multiprocess(),
            "--minutes works with one process only. Pass --train.steps instead.",
        )
        if run.is_new:
            return config
        run.notes.append(
            "train.steps stays as --minutes set it at the first start. "
            "Pass --train.steps to change it."
        )
        return config_tree.replace(config, {"train.steps": run.config.train.steps})

    def fit_steps(
        self, config: ExperimentConfig, corpus: Corpus, job: "Job", run: Run
    ) -> ExperimentConfig:
        """Returns the config with as many steps as fit into --minutes, at the first start of a run.

        At most a tenth of the steps are warm-up, unless the warm-up is passed.
        """
        if self.minutes is None or not run.is_new:
            return config
        print(
            "speed     compiling, then timing some steps, to set train.steps by --minutes",
            flush=True,
        )
        steps, seconds = steps_in(60 * self.minutes, config, corpus)
        warmup = config.optimizer.warmup_steps
        if job.places.get(_WARMUP) != "":
            warmup = min(warmup, steps // 10)
        run.notes.append(
            f"--minutes={self.minutes:g} gives {steps:,} steps of {seconds:.3g} s, "
            f"{warmup} of warm-up"
        )
        return config_tree.replace(config, {"train.steps": steps, _WARMUP: warmup})


class Mode(enum.StrEnum):
    """What a corpus's command does."""

    TRAIN = "train"
    EVAL = "eval"
    SCORE = "score"
    GENERATE = "generate"


# Groups of settings that only training reads.
_OF_TRAINING = (
    "seed",
    "init_",
    "minutes",
    "optimizer.",
    "train.",
    "regularization.",
    "average.",
    "profile_",
    "wandb_",
)


@dataclasses.dataclass(frozen=True)
class TrainPlan(WatchPlan, TimedPlan, TextPlan):
    """The settings of a corpus's command."""

    mode: Mode = setting(Mode.TRAIN, "What to do.")
    workdir: str | None = setting(
        None,
        "Directory for the run's checkpoints, logs and results. Created if missing. "
        "The default for training is runs/NAME, named after the flagfile or else the corpus.",
        path=True,
    )
    ensemble_member: str | None = setting(
        None, "Name of the ensemble member to use. Not for training."
    )
    out: str | None = setting(
        None, "Output directory of modes other than train. none means the workdir.", path=True
    )
    input: str | None = setting(
        None, "File of documents to score (--mode=score) or to continue (--mode=generate)."
    )
    input_format: InputFormat = setting(InputFormat.LINES, "What counts as a document in --input.")
    per_token: bool = setting(
        False, "With --mode=score --input: write one record per token, not per document."
    )

    stopped: ClassVar[str] = "no scores were written"

    @property
    def trains(self) -> bool:
        """Whether the run in the workdir is trained."""
        return self.mode is Mode.TRAIN and self.input is None


def train_main(defaults: ExperimentConfig, *, aliases: Mapping[str, str] | None = None) -> NoReturn:
    """Runs a corpus's command, with the arguments of `main`, and exits."""
    main(_train, TrainPlan, config=defaults, groups=None, hosts="join", aliases=aliases)


def _train(plan: TrainPlan, job: "Job") -> int | None:
    """Trains a run to the end, or until a signal. Other modes use a trained run."""
    if not plan.trains:
        return _use_trained(plan, job)
    require(
        plan.out is None,
        f"--out must not be set with --mode=train, which writes to the workdir, got {plan.out}",
    )
    require(
        plan.ensemble_member is None,
        f"--ensemble_member must not be set with --mode=train, got {plan.ensemble_member!r}. "
        "To train it by itself, first run python -m experiments.ensemble --mode=split.",
    )
    if (workdir := plan.workdir) is None:
        corpus = flag_tree.given().get("data.corpus", job.defaults.data.corpus)
        workdir = os.path.abspath(os.path.join("runs", job.flagfile or str(corpus)))
        print(f"workdir   {workdir} (change with --workdir=PATH)", flush=True)
    with Run.open(workdir) as run:
        watched = plan.watch(run)
        config = job.config(run)
        _note_unread(plan, job, config, config)
        check_program(job.defaults, config)
        config = plan.keep_steps(config, job, run)
        run.compare(config)  # Before a text is read, which may take minutes.
        corpus = job.corpus(config, run)
        if run.is_new and not {"tokenizer", "data.tokenizer.kind"} & job.places.keys():
            distributed.run_on_all(lambda: refuse_packed(corpus))
        config = plan.fit_steps(config, corpus, job, run)
        with job.stop:  # From here on: while a text is read a signal ends the process at once.
            outcome = train_run(config, corpus, run, stop_requested=lambda: job.stop, **watched)
    if outcome.finished:
        _print_next(config, workdir)
    return 0 if outcome.finished else None


def _print_next(config: ExperimentConfig, workdir: str) -> None:
    """Prints the files of a finished run and the commands to try next."""
    place = shlex.quote(workdir)
    commands = [f"python -m experiments.report {place}"]
    with contextlib.suppress(UserError):
        check_can_generate(config)
        commands.insert(
            0,
            f"python -m experiments.{program_of(config.data.corpus)} --mode=generate "
            f"--workdir={place}",
        )
    print(f"files     log.txt, metrics.jsonl and checkpoints are in {workdir}")
    print("next      " + "\n          ".join(commands), flush=True)


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
        stopped it, as `Interrupted` does, or else 0, or 141 if nobody reads its output any longer.
      plan: The command's own settings, each of which is a flag.
      config: The config that the flags change, or None if the command has no flags for a config.
      by_corpus: Whether the defaults of `data` come from the corpus that the flags name.
      groups: The groups of settings that the command uses, for --help, or None for all.
      hosts: With multiple hosts: "join" them, fail ("alone"), or let each run the command by itself
        ("each").
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
    for alias, name in (aliases or {}).items():
        flags.DEFINE_alias(alias, name)
    _aliases.clear()
    _aliases.update(aliases or {})
    parsed = _parse(plan, groups, takes_words)
    with guarded():
        several = None if hosts == "each" else other_hosts.announced(other_hosts.environment())
        if several:  # One process by itself skips this.
            require(
                hosts == "join",
                f"this command must run as a single process, got {several.num_processes} "
                f"processes (announced by {several.source}). Start it once, outside of them.",
            )
            other_hosts.join(several)
        # Of machines on Google Cloud, else nothing.
        act_on_notices()
        # With one process `build_plan(plan)`.
        made = distributed.run_on_all(lambda: flag_tree.build_plan(plan))
        if several:
            other_hosts.check_same(made)
        made.validate()
        flag_tree.refuse_code(made, parsed[1])
        made = _with_recorded_folders(made, parsed[1])
        named = made.compilation_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
        check_outside(named, [getattr(made, name, None) for name in _FOLDERS_OF_RUNS])
        keep_compiled(made.compilation_cache, by_default=made.caches_compiled)
        defaults = config or ExperimentConfig()
        job = Job(made, _defaults_of_corpus(defaults, FLAGS) if by_corpus else defaults, *parsed)
        try:
            code = run(made, job)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}, {made.stopped}")
            code = None
        if code is None:
            # As shells count.
            code = 128 + job.stop.signal_number if job.stop else output.exit_code()
        other_hosts.leave(code, together=True)  # With one process only the output is flushed.
    sys.exit(code)


def _parse(plan: type[Plan], groups: Collection[str] | None, takes_words: bool) -> flag_tree.Parsed:
    """Parses the command line. Exits with 2 after an error message, and with 0 after --help."""
    if asked := {"--help", "-h", "-help", "--helpfull"} & set(sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly.
        own = [
            name for name in FLAGS if "txl_jax.cli" in str(FLAGS.find_module_defining_flag(name))
        ]
        required = [
            flag_tree.flag_name(leaf) for leaf in config_tree.leaves(plan) if leaf.setting.required
        ]
        note = _TRAINED if issubclass(plan, TrainedRun) else ""
        groups = None if "--helpfull" in asked else groups
        print(
            sys.modules["__main__"].__doc__ or "",
            help.help_text(own, groups, FLAGS, note, required),
            sep="\n",
        )
        sys.exit(0)
    try:
        return flag_tree.parse(sys.argv, takes_words=takes_words)
    except UserError as error:
        fail(error)
        sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Job:
    """A parsed command line, and what follows from it."""

    plan: Any
    # The config that the flags change.
    defaults: ExperimentConfig
    # The words that are not flags.
    words: list[str]
    # Where each flag was set: "" for the command line, else "FILE, line N: ".
    places: Mapping[str, str]
    # The name of the last flagfile, without directory and suffix, if any.
    flagfile: str | None
    # A request to stop, by a signal or a notice. `with job.stop:` begins to wait for it.
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)

    def config(self, run: Run | None = None) -> ExperimentConfig:
        """Returns the flags applied to the defaults, or to a run's recorded config.

        All processes call it.

        For a new run with `init_from`, the trained model's settings replace the same defaults.
        Notes of the run list the settings of a flagfile that yield (`_config`). Raises `UserError`
        if settings are incompatible, or describe another model than the weights.
        """
        recorded = None if run is None or run.is_new else run.config
        base, weights, notes = recorded or self.defaults, None, list[str]()
        if run is not None and run.is_new:
            asked = distributed.run_on_all(lambda: flag_tree.build(base))
            if _names_no_sizes(base, self.places):
                base = preset(SMALL)
                but = " and the sizes of the weights" if asked.init_from else ""
                notes.append(
                    f"no flag sets a model size, so this run uses --flagfile={SMALL} "
                    f"with your flags{but}"
                )
            if asked.init_from is not None:
                trained = warm_start.basis(asked.init_from, run)
                base, weights = (
                    warm_start.with_trained_settings(base, trained, asked.init_vocabulary),
                    trained.config,
                )
            sized = {"train.batch_size", "train.segment_len"} & self.places.keys()
            if (
                not sized
                and asked.data.corpus is CorpusName.TEXT
                and base.train == ExperimentConfig().train
            ):
                usual = f"{base.train.batch_size} x {base.train.segment_len} tokens per step"
                notes.append(
                    f"settings without a flag are the paper's ({usual}). "
                    f"--flagfile={SMALL} suits one machine."
                )
        config = distributed.run_on_all(
            lambda: _config(
                base, self.places, is_recorded=recorded is not None, weights=weights, notes=notes
            )
        )
        for note in notes:
            if run is None:
                output.say(f"note      {note}")
            else:
                run.notes.append(note)
        return config

    def config_of_flagfile(self, name: str) -> ExperimentConfig:
        """Returns the config of another flagfile, for its corpus.

        The settings on this command line are applied to it.
        """
        typed = [
            f"--{leaf}={config_tree.format_value(value)}"
            for leaf, value in flag_tree.given().items()
        ]
        return config_of_words(
            self.defaults, ["flagfile", f"--flagfile={name}", *typed], by_corpus=True
        )

    def config_of(self, trained: Run | TrainedModel) -> ExperimentConfig:
        """Returns the flags applied to a trained model's settings.

        Raises `UserError` if model or tokens change.
        """

        def over_trained() -> ExperimentConfig:
            config = _config(trained.config, self.places, is_recorded=True)
            refused = [
                config_tree.describe_change(leaf, old, new)
                for leaf, old, new in config_tree.differences(trained.config, config)
                if (leaf.name.startswith("model.") and not leaf.setting.free_on_resume)
                or leaf.setting.shapes_tokens
            ]
            other = f"the run in {trained.path} was trained with another model or other tokens"
            require(not refused, f"{other}: {', '.join(refused)}. Omit these flags.")
            return config

        return distributed.run_on_all(over_trained)

    def trained(
        self, check: Callable[[ExperimentConfig], Any] = lambda config: None
    ) -> tuple[ExperimentConfig, Corpus, Run]:
        """Reads the run of a `TrainedRun` plan.

        Returns its settings with the flags applied, its text, and the run itself.

        `check` is called with the settings, before the text is read.
        """
        run = Run.read(self.plan.workdir, member=self.plan.ensemble_member)
        config = self.config_of(run)
        check(config)
        return config, self.corpus(config, run), run

    def corpus(
        self, config: ExperimentConfig, run: Run | None = None, vocabulary: Vocabulary | None = None
    ) -> Corpus:
        """Reads the text of a config, for a trained run with its vocabulary.

        A trained run may be a stranger's. So what is prepared in the directory that its record
        names is only read, and what is missing there is prepared in the command's own directories.
        """
        folders = self.plan.data_dir, self.plan.cache_dir
        if run is not None and run.is_open and config.init_from is not None:
            return warm_start.read_corpus(config, run, *folders)
        recorded = None
        if run is not None and not run.is_open:
            vocabulary = run.text.vocabulary
            if "data_dir" not in self.places:
                recorded = run.text.cache_dir
        return distributed.run_on_all(
            lambda: read_corpus(
                config.data, *folders, vocabulary=vocabulary, read_only_cache=recorded
            )
        )


def config_of_words(
    defaults: ExperimentConfig,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    by_corpus: bool = False,
    recorded: ExperimentConfig | None = None,
) -> ExperimentConfig:
    """Returns the config that a command makes of its command line. Raises `UserError` as it does.

    `without` names flags that are not settings. `recorded` is the config of the run in the workdir,
    if any.
    """
    values = flags.FlagValues()
    flag_tree.define(defaults, values)
    for name in without:
        flags.DEFINE_string(name, None, "", flag_values=values)
    _, places, _ = flag_tree.parse(words, values)
    base = recorded or (_defaults_of_corpus(defaults, values) if by_corpus else defaults)
    base = preset(SMALL) if _names_no_sizes(base, places) else base
    return _config(base, places, values, is_recorded=recorded is not None)


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Raises `UserError` if the flags select the corpus of another command."""
    own, asked = defaults.data.corpus, config.data.corpus
    require(
        program_of(asked) == program_of(own),
        f"data.corpus must be {own} for this command, got {asked}. "
        f"Run python -m experiments.{program_of(asked)}, or use a flagfile for {own}.",
    )


def _with_recorded_folders(plan: Any, places: Mapping[str, str]) -> Any:
    """Returns a plan that trains, with the directories of the run in its workdir as defaults.

    This applies if the directories are on this machine.

    Training goes on in these directories. Plans that only use a run may read a stranger's, and
    write to none that it names (`Job.corpus`).
    """
    workdir = getattr(plan, "workdir", None)
    if not workdir or not isinstance(plan, TextPlan) or not plan.trains or "data_dir" in places:
        return plan
    return dataclasses.replace(
        plan, **{k: v for k, v in recorded_folders(workdir).items() if k not in places}
    )


def _defaults_of_corpus(
    defaults: ExperimentConfig, flag_values: flags.FlagValues
) -> ExperimentConfig:
    return dataclasses.replace(
        defaults, data=default_data(CorpusName(str(flag_values["data.corpus"].value)))
    )


def _names_no_sizes(defaults: ExperimentConfig, places: Mapping[str, str]) -> bool:
    """Returns whether flags for your own text leave the model at the paper's defaults.

    A flagfile's have a place.
    """
    named = (place or name.startswith("model.") for name, place in places.items())
    return defaults == ExperimentConfig(data=default_data(CorpusName.TEXT)) and not any(named)


def _config(
    base: ExperimentConfig,
    places: Mapping[str, str],
    flag_values: flags.FlagValues = FLAGS,
    *,
    is_recorded: bool = False,
    weights: ExperimentConfig | None = None,
    notes: list[str] | None = None,
) -> ExperimentConfig:
    """Returns the flags applied to a config. Raises `UserError` if settings are incompatible.

    Settings that were not typed yield, with a line in `notes`: sizes to the sizes of the `weights`
    that a run starts from, and a warm-up to the recorded one or, if it would not end before
    training does, to a tenth of the steps.
    """
    config = flag_tree.build(base, flag_values)
    typed = {name for name, place in places.items() if not place}

    def use(values: Mapping[str, Any], what: str) -> ExperimentConfig:
        changed = config_tree.replace(config, values)
        # Nobody typed the values that yield: they are a flagfile's or the command's.
        lines = [
            f"{leaf.name} is {config_tree.format_value(new)} instead of "
            f"{config_tree.format_value(old)}"
            for leaf, old, new in config_tree.differences(config, changed)
        ]
        if values and notes is not None:
            notes.append(f"{what}: {', '.join(lines)}")
        return changed

    if weights is not None or (is_recorded and config.init_from is not None):
        sizes = warm_start.other_sizes(config, weights or base)
        keep = typed | {
            name for name in sizes if name.startswith("model.compat.") and "compat" in typed
        }
        theirs = {name: value for name, value in sizes.items() if name not in keep}
        config = use(theirs, "sizes come from the weights")
    end, warmup = config.optimizer.decay_steps or config.train.steps, config.optimizer.warmup_steps
    if is_recorded and warmup != base.optimizer.warmup_steps and _WARMUP not in typed:
        config = use({_WARMUP: base.optimizer.warmup_steps}, "the recorded run's warm-up is kept")
    elif warmup >= end and _WARMUP not in typed:
        config = use({_WARMUP: end // 10}, "the warm-up is a tenth of the steps")
    usual = "the weights or the defaults" if weights is not None else "the defaults"
    with flag_tree.naming_places(places, "the run's record" if is_recorded else usual):
        config.validate()
    check_file(config.data)
    if weights is not None:
        warm_start.check_model(config, weights)
    return config


def _use_trained(plan: TrainPlan, job: Job) -> int | None:
    """Scores or samples with a trained run."""
    if (workdir := plan.workdir) is None:
        raise UserError(
            "--workdir is required: the directory of checkpoints and logs. Pass --workdir=PATH."
        )
    if plan.input is not None:
        return _read_input(plan, job, workdir)
    model = dataclasses.replace(open_weights(workdir, member=plan.ensemble_member), out=plan.out)
    run = model.source if isinstance(model.source, Run) else None
    if run is None and plan.mode is not Mode.GENERATE:
        model = _with_text(model, job.defaults.data)
    config, own = job.config_of(model), job.defaults.data.corpus
    _note_unread(plan, job, config, model.config)
    if (
        run is not None
        and program_of(config.data.corpus) != program_of(own)
        and "data.corpus" not in job.places
    ):
        print(f"corpus    {config.data.corpus}, as in training (this command's own is {own})")
    if plan.mode is Mode.GENERATE:
        with job.stop:
            generate_text(config, model, stop_requested=lambda: job.stop)
        return None
    corpus = job.corpus(config, run, model.vocabulary)
    score_splits = score.evaluate_splits if plan.mode is Mode.EVAL else score.score_tokens
    with job.stop:
        score_splits(config, corpus, model, stop_requested=lambda: job.stop)
    return None


def _with_text(model: TrainedModel, data: DataConfig) -> TrainedModel:
    """Returns a portable model with the command's text, in the model's tokens.

    The portable model itself names no text.
    """
    own = {"data.reset_at": model.config.data.reset_at} | warm_start.tokenizer_settings(
        model.vocabulary
    )
    return dataclasses.replace(
        model, config=config_tree.replace(dataclasses.replace(model.config, data=data), own)
    )


def _read_input(plan: TrainPlan, job: Job, workdir: str) -> int | None:
    """Scores or continues the documents of a file. Only records go to standard output."""
    assert plan.input is not None
    has_records = plan.mode in (Mode.SCORE, Mode.GENERATE)
    require(has_records, f"--mode must be score or generate with --input, got {plan.mode}")
    redirect = "Records go to standard output, which you can redirect with > FILE"
    require(plan.out is None, f"--out must not be set with --input, got {plan.out}. {redirect}.")
    require(
        not distributed.is_multiprocess(),
        "--input requires a single process. Start the command once.",
    )
    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), job.stop:

        def write(lines: str) -> None:
            records.write(lines)
            records.flush()
            if error := output.loss(records):
                raise error
            if job.stop:
                raise Interrupted(plan.input)

        weights = open_weights(workdir, member=plan.ensemble_member)
        config = job.config_of(weights)
        _note_unread(plan, job, config, weights.config)
        weights = dataclasses.replace(weights, config=config)
        try:
            with score.open_input(plan.input) as file:
                field, as_bytes = (
                    config.data.json_field,
                    isinstance(weights.vocabulary, ByteVocabulary),
                )
                texts = score.documents(file, plan.input_format, as_bytes=as_bytes)
                if field is not None:
                    texts = (
                        (line, text.encode())
                        for line, text in json_texts(file, field, name=plan.input)
                    )
                if plan.mode is Mode.GENERATE:
                    continue_prompts(weights, texts, name=plan.input, write=write)
                else:
                    score.score_documents(
                        weights, texts, name=plan.input, per_token=plan.per_token, write=write
                    )
        except Interrupted:
            print(f"stopped   on request in {plan.input}, the records written are complete")
        except BrokenPipeError:  # The reader of the records has enough, as in `| head`.
            return output.READER_GONE
    return None


def _note_unread(
    plan: TrainPlan, job: Job, config: ExperimentConfig, trained: ExperimentConfig
) -> None:
    """Prints a note about typed flags without effect in this mode, unless they match the record."""
    unread = ["input_format", "per_token"] if plan.input is None else ["data.", "generate.prompt"]
    if plan.mode is not Mode.TRAIN:
        unread += [*_OF_TRAINING, "data." if plan.mode is Mode.GENERATE else "generate."]
    new = {leaf.name for leaf, *_ in config_tree.differences(trained, config)} | flag_tree.given(
        cls=TrainPlan
    ).keys()
    typed = [
        name
        for name, place in job.places.items()
        if not place and name in new - {"data.json_field"}
    ]
    if found := ", ".join(f"--{name}" for name in typed if name.startswith(tuple(unread))):
        print(f"note      no effect with --mode={plan.mode}: {found}", flush=True)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turns an error that the user can fix into a message and an exit code.

    Others keep their traceback.
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
            traceback.print_exc()
        # A loss is a sum over all processes, so that one that is not finite ends them all.
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
            if distributed.is_primary():  # The process that failed prints it too.
                fail(error)
        case UserError():
            fail(error)
        case OSError():
            fail(describe_system_error(error))
        case RuntimeError() | AssertionError() if "xla_bridge" in str(
            traceback.extract_tb(error.__traceback__)[-1:]
        ):
            found = (
                f"{first_line(error)}, JAX_PLATFORMS is "
                f"{jax.config.values['jax_platforms'] or 'not set'}"
            )
            fail(
                f"jax cannot use the devices ({found}). Check JAX_PLATFORMS, and whether another "
                "process holds them."
            )
        case _:
            return None
    return 1


def fail(error: BaseException | str) -> None:
    """Prints an error message to standard error, in one line, whatever names are in it."""
    text = str(error)
    for alias, name in _aliases.items():
        text = re.sub(rf"--{re.escape(name)}\b(?!\.)", f"--{alias}", text)
    print(f"{other_hosts.prefix()}error: {one_line(text)}", file=sys.stderr, flush=True)
