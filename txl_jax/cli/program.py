"""`main`, the whole of a program, and `train_main`, the whole of a corpus's program. CONTRIBUTING.md has an example.

Exit codes: 0, 1 (error), 2 (a command line that cannot be parsed), 75 (another process is gone), 128 + signal.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import platform
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import jax
from absl import flags

from txl_jax.cli import flag_tree, help, other_hosts
from txl_jax.config import CacheDType, CorpusName, DataConfig, ExperimentConfig, Tokenizer, WeightDType, config_tree
from txl_jax.config.config_tree import Config, require, setting
from txl_jax.config.experiment import preset
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import Corpus, read_corpus, refuse_packed
from txl_jax.data.published import check_file, default_data, program_of
from txl_jax.data.subwords import SubwordVocabulary
from txl_jax.data.text import json_texts
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import NonFiniteError, RemoteProcessError, UserError, first_line
from txl_jax.runs import score, warm_start
from txl_jax.runs.generate import check_can_generate, continue_prompts, generate_text
from txl_jax.runs.run import Run, recorded_folders
from txl_jax.runs.score import InputFormat, Interrupted
from txl_jax.runs.train import train_run
from txl_jax.runs.weights import Weights, open_weights
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import quiet_orbax
from txl_jax.runtime.sinks import Sink, WeightsAndBiases
from txl_jax.runtime.stop import StopRequest, act_on_notices
from txl_jax.runtime.storage import is_remote, shorten_storage_logs

FLAGS = flags.FLAGS

_SAVES_MEMORY = "try a smaller --train.batch_size or --eval.batch_size, --model.remat=full or --model.attention=tiled"
_TRAINED = "Settings that are not given are those of the trained run, instead of the defaults shown."
_WARMUP = "optimizer.warmup_steps"
SMALL = "small"  # The preset of own text where no sizes are given: the paper's would take months on a CPU.
# JAX compiles dozens of programs for a run; those that take less would gain little.
_MIN_COMPILE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Plan(Config):
    """What a program is asked to do: a dataclass of `setting` fields, each of them a flag without prefix.

    Help, absolute paths, and the comparison between hosts follow from the fields.
    """

    compilation_cache: str | None = setting(
        None,
        "Folder of compiled programs, which a second start reads; default: compilation in the cache_dir, if there is "
        "one and one process; off: none.",
    )

    stopped: ClassVar[str] = "the same command resumes from there"  # What becomes of the files if a signal ends it.


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


@dataclasses.dataclass(frozen=True)
class WatchPlan(Plan):
    """A closer view of a training run."""

    profile_steps: tuple[int, ...] = setting(
        (), "First and last update of a profile for TensorBoard, in the workdir: 10,15."
    )
    wandb_project: str | None = setting(None, "Project of Weights & Biases that gets the records too.")
    verbose: bool = setting(False, "Prints more about attention and memory; log.txt always has it.")

    def watch(self, run: Run) -> dict[str, Any]:
        """Returns these arguments of training: sinks, profile_steps, verbose; raises `UserError` for wrong ones."""
        given = config_tree.format_value(self.profile_steps)
        advice = "give the first and the last update, as 10,15"
        require(len(self.profile_steps) in (0, 2), f"--profile_steps is {given}; {advice}")
        sinks: list[Sink] = [WeightsAndBiases(self.wandb_project, run.path)] if self.wandb_project else []
        return {"sinks": sinks, "profile_steps": self.profile_steps or None, "verbose": self.verbose}


class Mode(enum.StrEnum):
    """The job of a corpus's program."""

    TRAIN = "train"
    EVAL = "eval"
    SCORE = "score"
    GENERATE = "generate"


# Groups of settings that only training reads.
_OF_TRAINING = ("seed", "init_", "optimizer.", "train.", "regularization.", "average.", "profile_", "wandb_")


@dataclasses.dataclass(frozen=True)
class TrainPlan(WatchPlan, TextPlan):
    """The plan of a corpus's program."""

    mode: Mode = setting(Mode.TRAIN, "Job.")
    workdir: str | None = setting(
        None,
        "Folder of the run: checkpoints, logs, results. Created if missing. Default for training: runs/NAME, of the "
        "flagfile or else of the corpus.",
        path=True,
    )
    ensemble_member: str | None = setting(None, "Member of an ensemble that is read, by name; not for training.")
    out: str | None = setting(None, "Folder for the files of other modes than train; default: the workdir.", path=True)
    input: str | None = setting(None, "File whose documents --mode=score scores or --mode=generate continues.")
    input_format: InputFormat = setting(InputFormat.LINES, "What a document of the input is.")
    per_token: bool = setting(False, "With --mode=score --input: writes a record per token, not one per document.")

    stopped: ClassVar[str] = "its scores were not written"


def train_main(defaults: ExperimentConfig, *, aliases: Mapping[str, str] | None = None) -> NoReturn:
    """Runs a corpus's program, with the arguments of `main`, and exits."""
    main(_train, TrainPlan, config=defaults, groups=None, hosts="join", aliases=aliases)


def _train(plan: TrainPlan, job: "Job") -> int | None:
    """Trains a run to the end, or until a signal; other modes read a trained one."""
    if plan.mode is not Mode.TRAIN or plan.input is not None:
        return _use_trained(plan, job)
    require(plan.out is None, f"--out is {plan.out} and --mode=train writes to the workdir; leave --out out")
    require(
        plan.ensemble_member is None,
        f"--ensemble_member is {plan.ensemble_member!r} and --mode=train would train it alone; make it a run of its "
        "own with python -m experiments.ensemble --mode=split",
    )
    if (workdir := plan.workdir) is None:
        corpus = flag_tree.given().get("data.corpus", job.defaults.data.corpus)
        workdir = os.path.abspath(os.path.join("runs", job.flagfile or str(corpus)))
        print(f"workdir   {workdir}; --workdir=PATH gives another", flush=True)
    with Run.open(workdir) as run:
        watched = plan.watch(run)
        config = job.config(run)
        _note_unread(plan, job, config, config)
        check_program(job.defaults, config)
        run.compare(config)  # Before a text is read, which may take minutes.
        corpus = job.corpus(config, run)
        if run.is_new and not {"tokenizer", "data.tokenizer.kind"} & job.places.keys():
            distributed.run_on_all(lambda: refuse_packed(corpus))
        with job.stop:  # From here on: while a text is read a signal ends the process at once.
            outcome = train_run(config, corpus, run, stop_requested=lambda: job.stop, **watched)
    if outcome.finished:
        _print_next(config, workdir)
    return 0 if outcome.finished else None


def _print_next(config: ExperimentConfig, workdir: str) -> None:
    """Names the files of a finished run and the commands to try next."""
    place = shlex.quote(workdir)
    commands = [f"python -m experiments.report {place}"]
    with contextlib.suppress(UserError):
        check_can_generate(config)
        commands.insert(0, f"python -m experiments.{program_of(config.data.corpus)} --mode=generate --workdir={place}")
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
    """Runs a program, the whole of `python -m experiments.NAME`, and exits.

    Args:
      run: `run(plan, job)` returns the exit code. None means 0, or 128 + the number of the signal that stopped it, as
        `Interrupted` does.
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
    for alias, name in (aliases or {}).items():
        flags.DEFINE_alias(alias, name)
    parsed = _parse(plan, groups, takes_words)
    with guarded():
        several = None if hosts == "each" else other_hosts.announced(other_hosts.environment())
        if several:  # One process by itself skips this.
            found = f"{several.num_processes} processes were announced by {several.source}"
            advice = "start it once, outside of them"
            require(hosts == "join", f"this program works on one host by itself, and {found}; {advice}")
            other_hosts.join(several)
        act_on_notices()  # Of machines on Google Cloud, else nothing.
        made = distributed.run_on_all(lambda: flag_tree.build_plan(plan))  # With one process `build_plan(plan)`.
        if several:
            other_hosts.check_same(made)
        made.validate()
        made = _with_recorded_folders(made, parsed[1])
        keep_compiled(getattr(made, "data_dir", None), getattr(made, "cache_dir", None), given=made.compilation_cache)
        defaults = config or ExperimentConfig()
        job = Job(made, _defaults_of_corpus(defaults, FLAGS) if by_corpus else defaults, *parsed)
        try:
            code = run(made, job)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}; {made.stopped}")
            code = None
        if code is None:
            code = 128 + job.stop.signal_number if job.stop else 0  # As shells count.
        other_hosts.leave(code, together=True)  # With one process only the output is flushed.
    sys.exit(code)


def _parse(plan: type[Plan], groups: Collection[str] | None, takes_words: bool) -> flag_tree.Parsed:
    """Parses the command line; on an error prints one sentence and exits with 2, on --help exits with 0."""
    if asked := {"--help", "-h", "-help", "--helpfull"} & set(sys.argv[1:]):
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly.
        own = [name for name in FLAGS if "txl_jax.cli" in str(FLAGS.find_module_defining_flag(name))]
        required = [flag_tree.flag_name(leaf) for leaf in config_tree.leaves(plan) if leaf.setting.required]
        note, groups = _TRAINED if issubclass(plan, TrainedRun) else "", None if "--helpfull" in asked else groups
        print(sys.modules["__main__"].__doc__ or "", help.help_text(own, groups, FLAGS, note, required), sep="\n")
        sys.exit(0)
    try:
        return flag_tree.parse(sys.argv, takes_words=takes_words)
    except UserError as error:
        fail(error)
        sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a command line says, and what follows from it."""

    plan: Any
    defaults: ExperimentConfig  # The config that the flags change.
    words: list[str]  # The words that are not flags.
    places: Mapping[str, str]  # Where each flag was set: "" for the command line, else "FILE, line N: ".
    flagfile: str | None  # The name of the last flagfile, without directory and suffix, if any.
    # A request to stop, by a signal or a notice. `with job.stop:` begins to wait for it.
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)

    def config(self, run: Run | None = None) -> ExperimentConfig:
        """Returns the flags over the defaults, or over what a run to train has recorded; all processes call it.

        For a new run with `init_from`, settings of the model there replace the same defaults. Notes of the run say
        which settings of a flagfile yield (`_config`). Raises `UserError` if settings cannot go together, or describe
        another model than the weights.
        """
        recorded = None if run is None or run.is_new else run.config
        base, weights, notes = recorded or self.defaults, None, list[str]()
        if run is not None and run.is_new:
            asked = distributed.run_on_all(lambda: flag_tree.build(base))
            if _names_no_sizes(base, self.places):
                base = preset(SMALL)
                but = ", and the sizes of the weights" if asked.init_from else ""
                notes.append(f"no flag gives a size of the model: this is --flagfile={SMALL} with the flags given{but}")
            if asked.init_from is not None:
                trained = warm_start.basis(asked.init_from, run)
                base, weights = warm_start.with_trained_settings(base, trained, asked.init_vocabulary), trained.config
            sized = {"train.batch_size", "train.segment_len"} & self.places.keys()
            if not sized and asked.data.corpus is CorpusName.TEXT and base.train == ExperimentConfig().train:
                usual = f"{base.train.batch_size} x {base.train.segment_len} tokens a step"
                notes.append(f"what no flag gives is the paper's, as {usual}; --flagfile={SMALL} fits one machine")
        config = distributed.run_on_all(
            lambda: _config(base, self.places, is_recorded=recorded is not None, weights=weights, notes=notes)
        )
        tell = functools.partial(print, "note     ") if run is None else run.notes.append
        for note in notes:
            tell(note)
        return config

    def config_of_flagfile(self, name: str) -> ExperimentConfig:
        """Returns the config of another flagfile, of its corpus, changed by the settings on this command line."""
        typed = [f"--{leaf}={config_tree.format_value(value)}" for leaf, value in flag_tree.given().items()]
        return config_of_words(self.defaults, ["flagfile", f"--flagfile={name}", *typed], by_corpus=True)

    def config_of(self, trained: Run | Weights) -> ExperimentConfig:
        """Returns the flags over a trained model's settings; raises `UserError` if they change model or tokens."""

        def over_trained() -> ExperimentConfig:
            config = _config(trained.config, self.places, is_recorded=True)
            refused = [
                config_tree.describe_change(leaf, old, new)
                for leaf, old, new in config_tree.differences(trained.config, config)
                if (leaf.name.startswith("model.") and not leaf.setting.free_on_resume) or leaf.setting.shapes_tokens
            ]
            other = f"the run in {trained.path} was trained with another model or other tokens"
            require(not refused, f"{other}: {'; '.join(refused)}; leave these flags out")
            return config

        return distributed.run_on_all(over_trained)

    def trained(
        self, check: Callable[[ExperimentConfig], Any] = lambda config: None
    ) -> tuple[ExperimentConfig, Corpus, Run]:
        """Reads the run of a `TrainedRun` plan: its settings with the flags over them, its text, and the run itself.

        `check` is called with the settings, before the text is read.
        """
        run = Run.read(self.plan.workdir, member=self.plan.ensemble_member)
        config = self.config_of(run)
        check(config)
        return config, self.corpus(config, run), run

    def corpus(self, config: ExperimentConfig, run: Run | None = None, vocabulary: Vocabulary | None = None) -> Corpus:
        """Reads the text of a config: for a trained run in its vocabulary and by default from its folders."""
        folders = self.plan.data_dir, self.plan.cache_dir
        if run is not None and run.is_open and config.init_from is not None:
            return warm_start.read_corpus(config, run, *folders)
        if run is not None and not run.is_open:
            vocabulary = run.text.vocabulary
            if "data_dir" not in self.places:  # As the run was started, unless this is another machine.
                folders = (run.text.data_dir, self.plan.cache_dir or run.text.cache_dir)
        return distributed.run_on_all(lambda: read_corpus(config.data, *folders, vocabulary=vocabulary))


def config_of_words(
    defaults: ExperimentConfig,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    by_corpus: bool = False,
    recorded: ExperimentConfig | None = None,
) -> ExperimentConfig:
    """Returns the config that a program would make of a command line; raises `UserError` as it would.

    `without` names flags that are not settings. `recorded` is the config of the run in the workdir, if there is one.
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
    """Raises `UserError` if the flags ask for the corpus of another program."""
    own, asked = defaults.data.corpus, config.data.corpus
    advice = f"run python -m experiments.{program_of(asked)}, or take a flagfile of {own}"
    found = f"data.corpus is {asked} and this is the program of {own}"
    require(program_of(asked) == program_of(own), f"{found}; {advice}")


def _with_recorded_folders(plan: Any, places: Mapping[str, str]) -> Any:
    """Returns a plan with the directories of the run in its workdir as defaults, where they exist on this machine."""
    workdir = getattr(plan, "workdir", None)
    if not workdir or not isinstance(plan, TextPlan) or "data_dir" in places:
        return plan
    return dataclasses.replace(plan, **{k: v for k, v in recorded_folders(workdir).items() if k not in places})


def _defaults_of_corpus(defaults: ExperimentConfig, flag_values: flags.FlagValues) -> ExperimentConfig:
    return dataclasses.replace(defaults, data=default_data(CorpusName(str(flag_values["data.corpus"].value))))


def _names_no_sizes(defaults: ExperimentConfig, places: Mapping[str, str]) -> bool:
    """Returns whether flags for own text leave the model to the defaults, the paper's; a flagfile's have a place."""
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
    """Returns the flags over a config; raises `UserError` for settings that do not go together.

    What was not typed yields, with a line in `notes`: sizes to those of the `weights` that a run begins with, and a
    warm-up to the recorded one or, if it would not end before training does, to a tenth of the steps.
    """
    config = flag_tree.build(base, flag_values)
    typed = {name for name, place in places.items() if not place}

    def use(values: Mapping[str, Any], what: str) -> ExperimentConfig:
        changed = config_tree.replace(config, values)
        lines = itertools.starmap(config_tree.describe_change, config_tree.differences(config, changed))
        if values and notes is not None:
            notes.append(f"{what}: {'; '.join(lines)}")
        return changed

    if weights is not None or (is_recorded and config.init_from is not None):
        sizes = warm_start.other_sizes(config, weights or base)
        keep = typed | {name for name in sizes if name.startswith("model.compat.") and "compat" in typed}
        theirs = {name: value for name, value in sizes.items() if name not in keep}
        config = use(theirs, "the sizes are those of the weights")
    end, warmup = config.optimizer.decay_steps or config.train.steps, config.optimizer.warmup_steps
    if is_recorded and warmup != base.optimizer.warmup_steps and _WARMUP not in typed:
        config = use({_WARMUP: base.optimizer.warmup_steps}, "the warm-up is the recorded one")
    elif warmup >= end and _WARMUP not in typed:
        config = use({_WARMUP: end // 10}, "the warm-up is a tenth of the steps")
    config.validate()
    check_file(config.data)
    if weights is not None:
        warm_start.check_model(config, weights)
    return config


def _use_trained(plan: TrainPlan, job: Job) -> int | None:
    """Scores or samples with a trained run."""
    if (workdir := plan.workdir) is None:
        raise UserError("no workdir was given; set --workdir=PATH, the folder of checkpoints and logs")
    if plan.input is not None:
        return _read_input(plan, job, workdir)
    model = dataclasses.replace(open_weights(workdir, member=plan.ensemble_member), out=plan.out)
    run = model.source if isinstance(model.source, Run) else None
    if run is None and plan.mode is not Mode.GENERATE:
        model = _with_text(model, job.defaults.data)
    config, own = job.config_of(model), job.defaults.data.corpus
    _note_unread(plan, job, config, model.config)
    if run is not None and program_of(config.data.corpus) != program_of(own) and "data.corpus" not in job.places:
        print(f"corpus    {config.data.corpus}, as in training; this is the program of {own}")
    if plan.mode is Mode.GENERATE:
        with job.stop:
            generate_text(config, model, stop_requested=lambda: job.stop)
        return None
    corpus = job.corpus(config, run, model.vocabulary)
    score_splits = score.evaluate_splits if plan.mode is Mode.EVAL else score.score_tokens
    with job.stop:
        score_splits(config, corpus, model, stop_requested=lambda: job.stop)
    return None


def _with_text(model: Weights, data: DataConfig) -> Weights:
    """Returns a portable model, which names no text, with the program's, as tokens of the model."""
    kind = Tokenizer.SUBWORD if isinstance(model.vocabulary, SubwordVocabulary) else Tokenizer(model.vocabulary.kind)
    own = {"reset_at": model.config.data.reset_at, "tokenizer.kind": kind}
    own |= {"tokenizer.line_mark": model.vocabulary.line_mark} if kind is Tokenizer.WORD else {}
    text = config_tree.replace(data, own)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, data=text))


def _read_input(plan: TrainPlan, job: Job, workdir: str) -> int | None:
    """Scores or continues the documents of a file; only records go to standard output."""
    assert plan.input is not None
    wrong_mode = f"--input is given and --mode is {plan.mode}; only --mode=score and generate read an input"
    require(plan.mode in (Mode.SCORE, Mode.GENERATE), wrong_mode)
    alone = "--input is given and there are several processes; read an input with one"
    redirect = "its records go to standard output; redirect that with > FILE"
    require(plan.out is None, f"--out is {plan.out} and --input is given; {redirect}")
    require(not distributed.is_multiprocess(), alone)
    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), job.stop:

        def write(lines: str) -> None:
            records.write(lines)
            records.flush()
            if job.stop:
                raise Interrupted(plan.input)

        weights = open_weights(workdir, member=plan.ensemble_member)
        config = job.config_of(weights)
        _note_unread(plan, job, config, weights.config)
        weights = dataclasses.replace(weights, config=config)
        try:
            with score.open_input(plan.input) as file:
                field, as_bytes = config.data.json_field, isinstance(weights.vocabulary, ByteVocabulary)
                texts = score.documents(file, plan.input_format, as_bytes=as_bytes)
                if field is not None:
                    texts = ((line, text.encode()) for line, text in json_texts(file, field, name=plan.input))
                if plan.mode is Mode.GENERATE:
                    continue_prompts(weights, texts, name=plan.input, write=write)
                else:
                    score.score_documents(weights, texts, name=plan.input, per_token=plan.per_token, write=write)
        except Interrupted:
            print(f"stopped   on request in {plan.input}; the records written are complete")
        except BrokenPipeError:  # Whoever reads the records has enough, as in `| head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
            return 128 + signal.SIGPIPE
    return None


def _note_unread(plan: TrainPlan, job: Job, config: ExperimentConfig, trained: ExperimentConfig) -> None:
    """Prints a note on typed flags that change nothing in this mode, unless they say what the record says too."""
    unread = ["input_format", "per_token"] if plan.input is None else ["data.", "generate.prompt"]
    if plan.mode is not Mode.TRAIN:
        unread += [*_OF_TRAINING, "data." if plan.mode is Mode.GENERATE else "generate."]
    new = {leaf.name for leaf, *_ in config_tree.differences(trained, config)} | flag_tree.given(cls=TrainPlan).keys()
    typed = [name for name, place in job.places.items() if not place and name in new - {"data.json_field"}]
    if found := ", ".join(f"--{name}" for name in typed if name.startswith(tuple(unread))):
        print(f"note      changes nothing with --mode={plan.mode}: {found}", flush=True)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turns an error that the user can mend into one sentence and an exit code; others keep their traceback."""
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
    """Prints an error that the user can mend and returns its exit code; prints nothing and returns None for a bug."""
    match error:
        case KeyboardInterrupt():
            fail("interrupted; what was saved before stays, and the same command resumes from there")
            return 128 + signal.SIGINT
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            fail(f"the device has too little memory ({first_line(error)}); {_SAVES_MEMORY}")
        case Exception() if other_hosts.lost_another(error):
            time.sleep(other_hosts.SECONDS_TO_NAME)  # This process ends meanwhile if it is known which one.
            fail(f"another process of this run is gone ({first_line(error)}); {other_hosts.RESUME}")
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

    `given` is the directory, or "off". None means `compilation` in the directory of prepared text, unless the
    environment names one (JAX_COMPILATION_CACHE_DIR) or there are several processes: only process 0 writes there, and
    on GPUs the others would wait forever for its part of the autotuning. A cache that cannot be used never ends a run.
    """
    folder = given
    if given is None and jax.config.values["jax_compilation_cache_dir"] is None and not distributed.is_multiprocess():
        prepared = cache_dir or (data_dir and os.path.join(data_dir, "prepared"))
        # Object storage is paid by the request.
        folder = None if is_remote(prepared or "") else prepared and os.path.join(prepared, "compilation")
    if folder in (None, "", "off", "none"):
        return
    if not is_remote(folder):
        folder = nearest = os.path.abspath(os.path.expanduser(folder))
        while not os.path.exists(nearest):  # False too where a folder above may not be entered.
            nearest = os.path.dirname(nearest)
        if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
            reason = f"{folder} cannot be made, as {nearest} is a file or cannot be written to"
            advice = "give --compilation_cache=PATH, or off"
            print(f"note      compiled programs are not kept: {reason}; {advice}", flush=True)
            return
    # XLA compiles for the processor that it finds, and JAX's keys do not name it: on a disk that machines share, one
    # would read programs with instructions that it lacks.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    processor = f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
    jax.config.update("jax_compilation_cache_dir", os.path.join(folder, processor))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
