r"""Trains an ensemble: several runs that differ in seed, learning rate or dropout, as one program.

    python -m experiments.ensemble --flagfile=ptb --data_dir=data --workdir=runs/ptb \
        --ensemble_member="seed=1" --ensemble_member="seed=2" --ensemble_member="seed=3"
    python -m experiments.ensemble --flagfile=ptb_small --train.steps=200 --data_dir=data --workdir=runs/rates \
        --ensemble_member="optimizer.learning_rate=5e-4" \
        --ensemble_member="optimizer.learning_rate=1e-3 model.dropout.rate=0.1"
    python -m experiments.ensemble --mode=split --workdir=runs/ptb --ensemble_member="seed=2" --to=runs/ptb-seed2

A small model leaves most of an accelerator idle; several together take little longer than one. All members are in one
workdir, with one checkpoint. Stopped, the same command resumes, and so does --workdir alone. results.json and
members.md have the scores of all.

The other programs take one member with --workdir and --ensemble_member=NAME, where a name is as above without "model."
and "optimizer.": "seed=2", "learning_rate=0.001+dropout.rate=0.1". --mode=split makes a member a workdir of its own,
in which the program of its corpus trains on.
"""

import dataclasses
import enum

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig
from txl_jax.errors import UserError
from txl_jax.runs import ensemble
from txl_jax.runs.run import Run
from txl_jax.runs.train import train_run


class Mode(enum.StrEnum):
    """The job of this program."""

    TRAIN = "train"
    SPLIT = "split"


@dataclasses.dataclass(frozen=True)
class Plan(cli.WatchPlan, cli.TextPlan):
    """The folder and the members."""

    mode: Mode = setting(Mode.TRAIN, "Train all members, or split one off.")
    workdir: str = setting(
        "", "Folder of the ensemble: checkpoints, logs, results. Created if missing.", path=True, required=True
    )
    ensemble_member: tuple[str, ...] = setting(
        (),
        'One flag per member: its settings, such as "seed=2 model.dropout.rate=0.3". For --mode=split its name.',
        repeated=True,
    )
    to: str | None = setting(None, "For --mode=split: the workdir of the member.", path=True)


def run(plan: Plan, job: cli.Job) -> int | None:
    """Trains the members, or splits one off."""
    if plan.mode is Mode.SPLIT:
        if len(plan.ensemble_member) != 1 or plan.to is None:
            found = f"{len(plan.ensemble_member)} of them and --to={plan.to or ''}"
            raise UserError(f"--mode=split needs one --ensemble_member and --to=PATH, got {found}")
        ensemble.split_off(plan.workdir, plan.ensemble_member[0], plan.to)
        return 0
    with Run.open(plan.workdir) as run:
        members = [_parse_member(text) for text in plan.ensemble_member] or [dict(each) for each in run.members]
        watched = plan.watch(run)
        config = job.config(run)
        ensemble.member_configs(config, members)  # Before a text is read.
        corpus = job.corpus(config, run)
        with job.stop:
            outcome = train_run(config, corpus, run, members=members, stop_requested=lambda: job.stop, **watched)
    return 0 if outcome.finished else None


def _parse_member(text: str) -> dict[str, float]:
    """Parses one --ensemble_member; raises `UserError` if it is not a list of names with numbers."""
    found: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.removeprefix("--").partition("=")
        try:
            found[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            advice = 'give names with numbers, as "seed=2 optimizer.learning_rate=0.001"'
            raise UserError(f"--ensemble_member is {text!r}; {advice}") from None
    return found


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=None)
