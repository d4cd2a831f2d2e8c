"""A corpus's command (`train_main`): trains a run, or scores or samples with a trained one."""

import contextlib
import dataclasses
import enum
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NoReturn, TextIO

from txl_jax.cli import flag_tree
from txl_jax.cli.app import main
from txl_jax.cli.job import Job
from txl_jax.cli.plans import TextPlan, TimedPlan, WatchPlan
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, config_tree
from txl_jax.config.config_tree import setting
from txl_jax.config.experiment import evaluation_preset_names
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import refuse_packed
from txl_jax.data.published import program_of
from txl_jax.data.text import json_texts
from txl_jax.errors import UserError
from txl_jax.runs import score_input, score_splits, warm_start
from txl_jax.runs.generate import check_can_generate, continue_prompts, generate_text
from txl_jax.runs.run import Run
from txl_jax.runs.score_input import InputFormat
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runs.trainer import train_run
from txl_jax.runtime import distributed, output
from txl_jax.runtime.stop import StopRequest


class Mode(enum.StrEnum):
    """Task of a corpus's command."""

    TRAIN = "train"
    EVAL = "eval"
    SCORE = "score"
    GENERATE = "generate"


# Prefixes of the names of settings that only training reads.
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

# Prefixes of the names of settings that only scoring with dynamic evaluation reads.
_OF_LEARNING = "eval.dynamic."


@dataclasses.dataclass(frozen=True)
class TrainPlan(WatchPlan, TimedPlan, TextPlan):
    """Settings of a corpus's command.

    Each `setting` declares a flag of the same name, with its default and its help.
    """

    mode: Mode = setting(Mode.TRAIN, "Task of this command.")
    workdir: str | None = setting(
        None,
        "Directory for the run's checkpoints, logs and results. Created if missing. "
        "The default for training is runs/NAME, named after the flagfile, or the corpus if none.",
        path=True,
    )
    ensemble_member: str | None = setting(
        None, "Name of the ensemble member to use. Not for training."
    )
    out: str | None = setting(
        None, "Output directory for modes other than train. none means the workdir.", path=True
    )
    input: str | None = setting(
        None, "File of documents to score (--mode=score) or to continue (--mode=generate)."
    )
    input_format: InputFormat = setting(InputFormat.LINES, "Format of the documents in --input.")
    per_token: bool = setting(
        False, "With --mode=score --input, write one record per token, instead of per document."
    )

    stopped: ClassVar[str] = "no scores were written"

    @property
    def trains(self) -> bool:
        """Whether the run in the workdir is trained."""
        return self.mode is Mode.TRAIN and self.input is None


def train_main(defaults: ExperimentConfig, *, aliases: Mapping[str, str] | None = None) -> NoReturn:
    """Runs a corpus's command, with the arguments of `main`, and exits."""
    main(_train, TrainPlan, config=defaults, groups=None, hosts="join", aliases=aliases)


def _train(plan: TrainPlan, job: Job) -> int | None:
    """Trains a run to the end, or until a signal. Other modes use a trained run.

    Returns:
      The exit code, or None if it follows from the signal or the output.
    """
    if not plan.trains:
        return _use_trained(plan, job)
    if plan.out is not None:
        raise UserError(
            f"--out must not be set with --mode=train, which writes to the workdir, got {plan.out}"
        )
    if job.flagfile in evaluation_preset_names():
        raise UserError(
            f"--mode must be eval or score with --flagfile={job.flagfile}, which has settings of "
            f"evaluation only, got {plan.mode}. Pass --mode=eval and the --workdir of a trained "
            "run."
        )
    if plan.ensemble_member is not None:
        raise UserError(
            f"--ensemble_member must not be set with --mode=train, got {plan.ensemble_member!r}. "
            "To train it by itself, first run python -m experiments.ensemble --mode=split."
        )

    workdir = plan.workdir
    if workdir is None:
        corpus = flag_tree.passed_settings().get("data.corpus", job.defaults.data.corpus)
        workdir = os.path.abspath(os.path.join("runs", job.flagfile or str(corpus)))
        print(f"workdir   {workdir} (change with --workdir=PATH)", flush=True)

    with Run.open(workdir) as run:
        watch_options = plan.watch(run)
        config = job.config(run)
        # Training reads the whole config except `eval.dynamic`, so this notes only such flags, and
        # flags of the command itself.
        _note_unread(plan, job, config, config)
        check_program(job.defaults, config)
        # With --minutes, a run that has started keeps its steps. A new run gets as many as fit into
        # that time. They are set below (`fit_steps`), after its text is read.
        config = plan.keep_steps(config, job, run)
        # Settings that must not change are compared with the run's record, before the text is read,
        # which may take minutes.
        run.compare(config)

        corpus = job.corpus(config, run)
        # A compressed file is an error, unless --data.tokenizer.kind says how to read it. The
        # keys of `job.places` are the flags that were set, by the names that were typed, and some
        # commands call this one --tokenizer.
        sets_tokenizer = {"tokenizer", "data.tokenizer.kind"} & job.places.keys()
        if run.is_new and not sets_tokenizer:
            distributed.run_on_all(lambda: refuse_packed(corpus))
        config, timed_step = plan.fit_steps(config, corpus, job, run)

        # Within this block a signal requests a stop: it makes `job.stop` true. While a text is
        # read, a signal ends the process immediately.
        with job.stop:
            outcome = train_run(
                config,
                corpus,
                run,
                compiled_step=timed_step,
                stop_requested=lambda: job.stop,
                **watch_options,
            )

    if not outcome.finished:
        return None
    _print_next(config, workdir)
    return 0


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Checks that the flags select a corpus of this command.

    Args:
      defaults: The defaults of the command.
      config: The config with the flags applied.

    Raises:
      UserError: If another command trains on the corpus of `config`.
    """
    corpus = config.data.corpus
    corpus_here = defaults.data.corpus
    program = program_of(corpus)
    if program != program_of(corpus_here):
        raise UserError(
            f"data.corpus must be {corpus_here} for this command, got {corpus}. "
            f"Run python -m experiments.{program}, or use a flagfile for {corpus_here}."
        )


def _print_next(config: ExperimentConfig, workdir: str) -> None:
    """Prints the files of a finished run and the commands to try next."""
    quoted = shlex.quote(workdir)
    commands = []
    with contextlib.suppress(UserError):
        check_can_generate(config)
        program = program_of(config.data.corpus)
        commands.append(f"python -m experiments.{program} --mode=generate --workdir={quoted}")
    commands.append(f"python -m experiments.report {quoted}")
    print(f"files     log.txt, metrics.jsonl and checkpoints are in {workdir}")
    print("next      " + "\n          ".join(commands), flush=True)


def _use_trained(plan: TrainPlan, job: Job) -> int | None:
    """Scores or samples with a trained run, or another trained model.

    Returns:
      The exit code, or None if it follows from the signal or the output.
    """
    workdir = plan.workdir
    if workdir is None:
        raise UserError(
            "--workdir is required: the directory of checkpoints and logs. Pass --workdir=PATH."
        )
    if plan.input is not None:
        return _read_input(plan, job, workdir)

    model = open_weights(workdir, member=plan.ensemble_member)
    model = dataclasses.replace(model, out=plan.out)
    # The weights come from a run or a portable checkpoint. Only a run records the text that it was
    # trained on.
    run = model.source if isinstance(model.source, Run) else None
    if run is None and plan.mode is not Mode.GENERATE:
        model = _with_text(model, job.defaults.data)
    config = job.config_of(model)
    _note_unread(plan, job, config, model.config)

    if run is not None and "data.corpus" not in job.places:
        _note_other_corpus(config.data.corpus, job.defaults.data.corpus)

    if plan.mode is Mode.GENERATE:
        with job.stop:
            generate_text(config, model, stop_requested=lambda: job.stop)
        return None
    corpus = job.corpus(config, run, model.vocabulary)
    with job.stop:
        if plan.mode is Mode.EVAL:
            score_splits.evaluate_splits(config, corpus, model, stop_requested=lambda: job.stop)
        else:
            score_splits.score_tokens(config, corpus, model, stop_requested=lambda: job.stop)
    return None


def _note_other_corpus(corpus: CorpusName, corpus_here: CorpusName) -> None:
    """Prints a note if the run was trained on the corpus of another command."""
    if program_of(corpus) != program_of(corpus_here):
        print(f"corpus    {corpus}, as in training (this command's own is {corpus_here})")


def _with_text(model: TrainedModel, data: DataConfig) -> TrainedModel:
    """Returns a portable model with the command's text, in the model's tokens.

    The portable model itself does not name a text.
    """
    settings = warm_start.tokenizer_settings(model.vocabulary)
    settings["data.reset_at"] = model.config.data.reset_at
    config = dataclasses.replace(model.config, data=data)
    return dataclasses.replace(model, config=config_tree.replace(config, settings))


def _read_input(plan: TrainPlan, job: Job, workdir: str) -> int | None:
    """Scores or continues the documents of a file. Only records go to standard output.

    Returns:
      The exit code, or None if it follows from the signal or the output.
    """
    assert plan.input is not None
    if plan.mode not in (Mode.SCORE, Mode.GENERATE):
        raise UserError(f"--mode must be score or generate with --input, got {plan.mode}")
    if plan.out is not None:
        raise UserError(
            f"--out must not be set with --input, got {plan.out}. Records go to standard output, "
            "which you can redirect with > FILE."
        )
    if distributed.is_multiprocess():
        raise UserError("--input requires a single process. Start the command once.")

    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), job.stop:
        model = open_weights(workdir, member=plan.ensemble_member)
        config = job.config_of(model)
        _note_unread(plan, job, config, model.config)
        model = dataclasses.replace(model, config=config)
        write = functools.partial(_write_records, records, job.stop, plan.input)
        try:
            _use_documents(plan, model, plan.input, write)
        except Interrupted:
            print(f"stopped   on request in {plan.input}, the records written are complete")
        except BrokenPipeError:
            # The reader of the records has stopped reading, as in `| head`.
            return output.READER_GONE
    return None


def _use_documents(
    plan: TrainPlan, model: TrainedModel, name: str, write: Callable[[str], None]
) -> None:
    """Scores or continues the documents of the file `name`, and writes their records."""
    with score_input.open_input(name) as file:
        # Pairs of the number of a document's first line and its text in UTF-8, or its bytes.
        documents: Iterator[tuple[int, bytes]]
        field = model.config.data.json_field
        if field is None:
            as_bytes = isinstance(model.vocabulary, ByteVocabulary)
            documents = score_input.documents(file, plan.input_format, as_bytes=as_bytes)
        else:
            lines = json_texts(file, field, name=name)
            documents = ((number, text.encode()) for number, text in lines)

        if plan.mode is Mode.GENERATE:
            continue_prompts(model, documents, name=name, write=write)
        else:
            score_input.score_documents(
                model, documents, name=name, per_token=plan.per_token, write=write
            )


def _write_records(records: TextIO, stop: StopRequest, name: str, lines: str) -> None:
    """Writes lines of records immediately, so that they are complete when the command stops.

    Args:
      records: Standard output.
      stop: A request to stop.
      name: The file whose documents the records are about.
      lines: One record or more, each with its newline.

    Raises:
      OSError: If `records` is no longer read, or the disk is full.
      Interrupted: If a stop is requested.
    """
    records.write(lines)
    records.flush()
    error = output.loss(records)
    if error is not None:
        raise error
    if stop:
        raise Interrupted(name)


def _note_unread(
    plan: TrainPlan, job: Job, config: ExperimentConfig, trained: ExperimentConfig
) -> None:
    """Prints a note about typed flags that have no effect in this mode and differ from the record.

    Args:
      plan: The command's plan.
      job: Its command line.
      config: The config with the flags applied.
      trained: The config of the trained model, or `config` itself when training.
    """
    # Prefixes of the names of settings that this mode does not read.
    unread: list[str] = []
    if plan.input is None:
        unread += ["input_format", "per_token", "eval.dynamic.shared"]
    else:
        unread += ["data.", "generate.prompt"]
        if plan.mode is Mode.SCORE and config.eval.dynamic.rule is not None:
            # With dynamic evaluation, documents are read one after the other.
            unread.append("eval.batch_size")
    if plan.mode is not Mode.TRAIN:
        unread += _OF_TRAINING
        unread.append("data." if plan.mode is Mode.GENERATE else "generate.")
    learns = plan.mode in (Mode.EVAL, Mode.SCORE) and config.eval.dynamic.rule is not None
    if not learns:
        unread.append(_OF_LEARNING)

    changed = {leaf.name for leaf, _, _ in config_tree.differences(trained, config)}
    if not learns:
        # A rate that was typed without a rule may equal the default, and is then not a difference.
        changed |= {name for name in job.places if name.startswith(_OF_LEARNING)}
    if plan.mode in (Mode.EVAL, Mode.SCORE):
        # In these modes the rule itself is read, even if it is none.
        changed.discard(f"{_OF_LEARNING}rule")
    changed |= flag_tree.passed_settings(cls=TrainPlan).keys()
    # With --input, data.json_field is the only setting of `data` that has an effect.
    changed.discard("data.json_field")
    flags_without_effect = []
    for name, place in job.places.items():
        is_typed = place == ""
        if is_typed and name in changed and name.startswith(tuple(unread)):
            flags_without_effect.append(f"--{name}")
    if flags_without_effect:
        print(
            f"note      no effect with --mode={plan.mode}: {', '.join(flags_without_effect)}",
            flush=True,
        )
