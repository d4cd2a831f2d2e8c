"""Writes one HTML page about one or several runs: learning curves, results, settings, time, samples.

    python -m experiments.report runs/mine --out=report.html
    python -m experiments.report runs/mine runs/other --out=report.html
    python -m experiments.report runs/sweep --out=report.html

Each word is the workdir of a run (of an ensemble: with all of its members), or a folder of workdirs as a sweep's. A run
may still be training. The page is one file that loads nothing, for light and dark screens of any width.
"""

import dataclasses
import os
import shlex

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.errors import UserError
from txl_jax.run_report.page import make_page
from txl_jax.run_report.run_records import read_runs
from txl_jax.runtime import storage


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The page."""

    out: str = setting("report.html", "File of the page.", path=True)


def run(plan: Plan, job: cli.Job) -> None:
    """Writes the page."""
    if not job.words:
        raise UserError("no run was given; name workdirs, as python -m experiments.report runs/mine --out=report.html")
    runs = read_runs(job.words)
    storage.make_folder(os.path.dirname(plan.out))
    command = shlex.join(["python", "-m", "experiments.report", *job.words, f"--out={plan.out}"])
    storage.write(plan.out, make_page(runs, command=command).encode())
    print(f"report    {plan.out}: {len(runs)} run{'s' if len(runs) > 1 else ''}")


if __name__ == "__main__":
    cli.main(run, Plan, takes_words=True)
