"""The program of a corpus: training, and with --mode the scores and texts of a trained run.

The module of a corpus has its defaults and one call:

    DEFAULTS = ExperimentConfig(data=default_data(CorpusName.ENWIK8))

    if __name__ == "__main__":
        cli.train_main(DEFAULTS)
"""

import contextlib
import dataclasses
import enum
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from txl_jax.cli.program import Job, Plan, TextPlan, main
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import setting
from txl_jax.data.published import program_of
from txl_jax.errors import UserError
from txl_jax.runs import score, train
from txl_jax.runs.run import Run
from txl_jax.runs.score import InputFormat, Interrupted, documents, open_input
from txl_jax.runs.weights import open_weights
from txl_jax.runtime import distributed
from txl_jax.runtime.sinks import Sink, WeightsAndBiases


class Mode(enum.StrEnum):
    """The job of a corpus's program."""

    TRAIN = "train"
    EVAL = "eval"
    SCORE = "score"
    GENERATE = "generate"


@dataclasses.dataclass(frozen=True)
class WatchPlan(Plan):
    """A closer view of a training run."""

    profile_steps: tuple[int, ...] = setting(
        (), "First and last update of a profile for TensorBoard, in the workdir: 10,15."
    )
    wandb_project: str | None = setting(None, "Project of Weights & Biases that gets the records too.")

    def watch(self, run: Run) -> dict[str, Any]:
        """Returns the arguments of a training job that these settings give: `sinks` and `profile_steps`.

        Raises:
          UserError: If profile_steps is not a pair of numbers, or wandb is not installed.
        """
        if len(self.profile_steps) not in (0, 2):
            raise UserError(
                f"--profile_steps is {','.join(map(str, self.profile_steps))}; give the first and the last update, as "
                "10,15"
            )
        sinks: list[Sink] = [WeightsAndBiases(self.wandb_project, run.path)] if self.wandb_project else []
        return {"sinks": sinks, "profile_steps": self.profile_steps or None}


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
    input: str | None = setting(None, "With --mode=score: file whose documents are scored.")
    input_format: InputFormat = setting(InputFormat.LINES, "What a document of the input is.")
    per_token: bool = setting(False, "With --input: writes a record per token instead of one per document.")

    stopped: ClassVar[str] = "its scores were not written"


def train_main(defaults: ExperimentConfig, *, aliases: Mapping[str, str] = types.MappingProxyType({})) -> NoReturn:
    """Runs a corpus's program, the whole of `python -m experiments.NAME`, and exits.

    Args:
      defaults: The config that the flags change.
      aliases: Short names of flags, and their full names.
    """
    main(_run, TrainPlan, config=defaults, groups=None, hosts="join", aliases=aliases)


def _run(plan: TrainPlan, job: Job) -> int | None:
    if plan.mode is not Mode.TRAIN or plan.input is not None:
        return _use_trained(plan, job)
    if plan.ensemble_member is not None:
        raise UserError(
            f"--ensemble_member is {plan.ensemble_member!r} and --mode=train would train it alone; make it a run of "
            "its own with python -m experiments.ensemble --mode=split"
        )
    with Run.open(plan.workdir or _default_workdir(job)) as run:
        watched = plan.watch(run)
        config = job.config(run)
        check_program(job.defaults, config)
        run.compare(config)  # Before a text is read, which may take minutes.
        corpus = job.corpus(config, run)
        with job.stop:  # From here on: while a text is read a signal ends the process at once.
            outcome = train.train_run(config, corpus, run, stop_requested=lambda: job.stop, **watched)
    return 0 if outcome.finished else None


def _use_trained(plan: TrainPlan, job: Job) -> int | None:
    """Scores or samples with a trained run."""
    from txl_jax.interop.portable import is_portable
    from txl_jax.runs.generate import generate_text

    if (workdir := plan.workdir) is None:
        raise UserError("no workdir was given; set --workdir=PATH, the folder of checkpoints and logs")
    if plan.input is not None:
        return _score_input(plan, job, workdir)
    if distributed.broadcast_from_primary(lambda: is_portable(workdir)):
        raise UserError(
            f"{workdir} is a portable folder and --mode={plan.mode} reads a run; give --mode=score with --input, "
            "begin a run with --init_from, or use experiments.serve or txl_jax.load"
        )
    run = Run.read(workdir, member=plan.ensemble_member)
    config, own = job.config_of(run), job.defaults.data.corpus
    if program_of(config.data.corpus) != program_of(own) and "data.corpus" not in job.places:
        print(f"corpus    {config.data.corpus}, as in training; this is the program of {own}")
    if plan.mode is Mode.GENERATE:
        with job.stop:
            generate_text(config, run, stop_requested=lambda: job.stop)
        return None
    corpus = job.corpus(config, run)
    score_splits = score.evaluate_splits if plan.mode is Mode.EVAL else score.score_tokens
    with job.stop:
        score_splits(config, corpus, run, stop_requested=lambda: job.stop)
    return None


def _default_workdir(job: Job) -> str:
    """Returns the folder of a run that nobody named, and prints it."""
    workdir = os.path.abspath(os.path.join("runs", job.flagfile or str(job.config().data.corpus)))
    print(f"workdir   {workdir}; --workdir=PATH gives another", flush=True)
    return workdir


def check_program(defaults: ExperimentConfig, config: ExperimentConfig) -> None:
    """Raises `UserError` if the flags ask for the corpus of another program."""
    own, asked = defaults.data.corpus, config.data.corpus
    if program_of(asked) != program_of(own):
        raise UserError(
            f"data.corpus is {asked} and this is the program of {own}; run python -m experiments.{program_of(asked)}, "
            f"or take a flagfile of {own}"
        )


def _score_input(plan: TrainPlan, job: Job, workdir: str) -> int | None:
    """Scores the documents of a file; only records go to standard output."""
    assert plan.input is not None
    if plan.mode is not Mode.SCORE:
        raise UserError(f"--input is given and --mode is {plan.mode}; only --mode=score reads an input")
    if distributed.is_multiprocess():
        raise UserError("--input is given and there are several processes; score an input with one")
    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), job.stop:

        def write(lines: str) -> None:
            records.write(lines)
            records.flush()
            if job.stop:
                raise Interrupted(plan.input)

        weights = open_weights(workdir, member=plan.ensemble_member)
        weights = dataclasses.replace(weights, config=job.config_of(weights))
        try:
            with open_input(plan.input) as file:
                texts = documents(file, plan.input_format)
                score.score_documents(weights, texts, name=plan.input, per_token=plan.per_token, write=write)
        except Interrupted:
            print(f"stopped   on request in {plan.input}; the records written are complete")
        except BrokenPipeError:  # Whoever reads the records has enough, as in `| head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
            return 128 + signal.SIGPIPE
    return None
