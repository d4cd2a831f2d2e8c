"""A corpus's command (`train_main`): trains a run, or scores or samples with a trained one."""

import contextlib
import dataclasses
import enum
import os
import shlex
import sys
from collections.abc import Mapping
from typing import ClassVar, NoReturn

from txl_jax.cli import flag_tree
from txl_jax.cli.app import main
from txl_jax.cli.job import Job
from txl_jax.cli.plans import TextPlan, TimedPlan, WatchPlan
from txl_jax.config import (
    DataConfig,
    ExperimentConfig,
    config_tree,
)
from txl_jax.config.config_tree import require, setting
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import refuse_packed
from txl_jax.data.published import program_of
from txl_jax.data.text import json_texts
from txl_jax.errors import (
    UserError,
)
from txl_jax.runs import score, warm_start
from txl_jax.runs.generate import check_can_generate, continue_prompts, generate_text
from txl_jax.runs.run import Run
from txl_jax.runs.score import InputFormat, Interrupted
from txl_jax.runs.train import train_run
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import distributed, output


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


def _train(plan: TrainPlan, job: Job) -> int | None:
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


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Raises `UserError` if the flags select the corpus of another command."""
    own, asked = defaults.data.corpus, config.data.corpus
    require(
        program_of(asked) == program_of(own),
        f"data.corpus must be {own} for this command, got {asked}. "
        f"Run python -m experiments.{program_of(asked)}, or use a flagfile for {own}.",
    )


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
