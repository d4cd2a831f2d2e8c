r"""Trains an ensemble: multiple runs that differ in seed, learning rate or dropout, in one process.

    python -m experiments.ensemble --flagfile=ptb --data_dir=data --workdir=runs/ptb \
        --ensemble_member="seed=1" --ensemble_member="seed=2" --ensemble_member="seed=3"
    python -m experiments.ensemble --flagfile=ptb_small --train.steps=200 --data_dir=data \
        --workdir=runs/rates \
        --ensemble_member="optimizer.learning_rate=5e-4" \
        --ensemble_member="optimizer.learning_rate=1e-3 model.dropout.rate=0.1"
    python -m experiments.ensemble --mode=split --workdir=runs/ptb --ensemble_member="seed=2" \
        --to=runs/ptb-seed2

A small model leaves most of an accelerator idle, so training several together takes little longer
than training one. All members share one workdir and one checkpoint. To resume, rerun the same
command, or pass only --workdir. results.json contains the scores of all members, and `python -m
experiments.report WORKDIR` prints them as a table.

Other commands use one member with --workdir and --ensemble_member=NAME, where NAME is as above
without "model." and "optimizer.": "seed=2", "learning_rate=0.001+dropout.rate=0.1". --mode=split
copies a member to a separate workdir, where its corpus's command can continue training.
"""

import dataclasses
import enum

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig
from txl_jax.errors import UserError
from txl_jax.runs import ensemble
from txl_jax.runs.run import Run
from txl_jax.runs.trainer import train_run


class EnsembleMode(enum.StrEnum):
    """Task of this command."""

    TRAIN = "train"
    SPLIT = "split"


@dataclasses.dataclass(frozen=True)
class Plan(cli.WatchPlan, cli.TextPlan):
    """The directory and the ensemble members."""

    mode: EnsembleMode = setting(
        EnsembleMode.TRAIN, "Train all ensemble members, or split one off."
    )
    workdir: str = setting(
        "",
        "Directory for the ensemble's checkpoints, logs and results. Created if missing.",
        path=True,
        required=True,
    )
    ensemble_member: tuple[str, ...] = setting(
        (),
        'Settings of a member, one flag each, such as "seed=2 model.dropout.rate=0.3". '
        "For --mode=split, its name.",
        repeated=True,
    )
    to: str | None = setting(None, "For --mode=split: new workdir for the member.", path=True)

    @property
    def trains(self) -> bool:
        """Whether the ensemble in the workdir is trained."""
        return self.mode is EnsembleMode.TRAIN


def run(plan: Plan, job: cli.Job) -> int | None:
    """Trains the members, or splits one off."""
    if plan.mode is EnsembleMode.SPLIT:
        if len(plan.ensemble_member) != 1 or plan.to is None:
            raise UserError(
                "--mode=split requires one --ensemble_member and --to=PATH, got "
                f"{len(plan.ensemble_member)} members and --to={plan.to or ''}"
            )
        ensemble.split_off(plan.workdir, plan.ensemble_member[0], plan.to)
        return 0

    with Run.open(plan.workdir) as opened:
        # Every corpus can be the ensemble's. Without this check a book would be read as a part of
        # the default, enwik8.
        if opened.is_new and "data.file" in job.places and "data.corpus" not in job.places:
            raise UserError(
                "--data.corpus is required with --data.file. Pass --data.corpus=text for your own "
                "text, or the corpus that the file is a part of."
            )
        members = [_parse_member(text) for text in plan.ensemble_member]
        if not members:
            # A resumed ensemble keeps the members that it started with.
            members = [dict(member) for member in opened.members]
        watch_options = plan.watch(opened)
        config = job.config(opened)
        # Checked before a text is read, which may take minutes.
        ensemble.member_configs(config, members)
        opened.compare(config, [ensemble.in_order(member) for member in members])
        corpus = job.corpus(config, opened)
        with job.stop:
            outcome = train_run(
                config,
                corpus,
                opened,
                members=members,
                stop_requested=lambda: job.stop,
                **watch_options,
            )
    return 0 if outcome.finished else None


def _parse_member(text: str) -> dict[str, float]:
    """Parses one --ensemble_member.

    Raises `UserError` if it is not a list of names with numbers.
    """
    member: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.removeprefix("--").partition("=")
        try:
            member[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            raise UserError(
                "--ensemble_member must be names with numbers, such as "
                f'"seed=2 optimizer.learning_rate=0.001", got {text!r}'
            ) from None
    return member


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=None)
