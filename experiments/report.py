"""Compares runs: a table of settings, scores and speed, and a figure with their learning curves.

    python -m experiments.report runs/mine runs/other
    python -m experiments.report runs/sweep --out=report  # report/report.md, .csv and .png

Each word is the workdir of a run (for an ensemble, all members count as runs), or a directory of
workdirs such as a sweep's --out. Runs may still be training. Where runs differ only in their seed,
a second table has means ± standard deviations over the seeds, and the figure has a line with a band
for them.
"""

import dataclasses
import os
import statistics
from collections.abc import Sequence

from txl_jax import cli, plots
from txl_jax.cli import setting
from txl_jax.errors import UserError
from txl_jax.metrics import Measure
from txl_jax.runs import run_tables
from txl_jax.runs.run import short_name
from txl_jax.runs.run_tables import RunRecords
from txl_jax.runtime import storage

MOST_LINES = 8  # Of the figure, the best ones.


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The report."""

    out: str | None = setting(
        None,
        "Directory for report.md, report.csv and report.png. If none, the tables are only printed.",
        path=True,
    )


def run(plan: Plan, job: cli.Job) -> None:
    """Prints the tables and writes the files."""
    if not job.words:
        raise UserError(
            "no run was passed. Pass workdirs: python -m experiments.report runs/mine --out=report."
        )
    runs = run_tables.read_runs(job.words)
    names = run_tables.swept_settings(runs)
    # A row has the last step even while the run is training, and the speed once it is known.
    rows = [{"steps": run.last_step, **run.row(names)} for run in runs]
    for row, each in zip(rows, runs, strict=True):
        if rate := each.tokens_per_second:
            row["tokens_per_second"] = rate
    lines = list(run_tables.markdown(names, rows))
    print("\n".join(lines))
    if plan.out is None:
        return
    print()
    storage.make_folder(plan.out)
    columns = ["run", *names, *run_tables.MEASURED, "tokens_per_second", "state"]
    storage.write(os.path.join(plan.out, "report.csv"), run_tables.csv_file(columns, rows))
    if len(measures := {run.measure for run in runs}) > 1:
        different = " and others ".join(sorted(measures))
        print(
            f"no figure: some runs have {different}, which one axis cannot show. "
            "Compare their bits per byte."
        )
    elif _draw(learning_curves(names, runs), runs[0].measure, os.path.join(plan.out, "report.png")):
        lines += ["", "![Learning curves](report.png)"]
    storage.write(os.path.join(plan.out, "report.md"), "\n".join([*lines, ""]).encode())
    print(
        f"report    {os.path.join(plan.out, 'report.md')}: {len(runs)} "
        f"run{'s' if len(runs) > 1 else ''}"
    )


def learning_curves(
    names: Sequence[str], runs: Sequence[RunRecords]
) -> dict[str, dict[int, list[float]]]:
    """Returns the lines of the figure by name: the scores of a line's runs at each step.

    Each run is a line of validation scores, and runs that differ only in their seed are one line
    together, over the steps at which all of them were scored. A single run has a line of training
    scores too.
    """
    if len(runs) == 1:
        kinds = {kind: runs[0].scores(kind) for kind in ("train", "valid")}
        return {
            kind: {step: [score] for step, score in points}
            for kind, points in kinds.items()
            if points
        }
    by_name, lines = {run.name: run for run in runs}, {}
    for group in run_tables.seed_groups(names, [run.row(names) for run in runs]):
        curves = {
            row["run"]: points
            for row in group
            if (points := dict(by_name[row["run"]].scores("valid")))
        }
        if steps := sorted(set.intersection(*map(set, curves.values()))) if curves else []:
            settings = [
                f"{short_name(name)} {group[0][name]}" for name in names if name != run_tables.SEED
            ]
            name = (
                ", ".join([*settings, f"mean of {len(curves)} seeds"])
                if len(curves) > 1
                else next(iter(curves))
            )
            lines[name] = {step: [points[step] for points in curves.values()] for step in steps}
    return lines


def _draw(lines: dict[str, dict[int, list[float]]], measure: Measure, path: str) -> bool:
    """Draws the lines, with bands of one standard deviation around means.

    Returns whether there is a figure.
    """
    if not lines:
        print("no figure: no scores have been recorded yet")
    if not lines or not plots.can_draw():
        return False
    means = {
        name: {step: statistics.fmean(found) for step, found in line.items()}
        for name, line in lines.items()
    }
    best = sorted(means, key=lambda name: min(means[name].values()))[:MOST_LINES]
    plots.curves(
        {name: points for name, points in means.items() if name in best},
        path,
        title="Learning curves"
        + (f", the best {len(best)} of {len(lines)}" if len(best) < len(lines) else ""),
        xlabel="training steps",
        ylabel=plots.UNITS[measure],
        deviations={
            name: {step: statistics.stdev(found) for step, found in line.items()}
            for name, line in lines.items()
            if all(len(found) > 1 for found in line.values())
        },
        log=measure is Measure.PPL,
    )
    return True


if __name__ == "__main__":
    cli.main(run, Plan, takes_words=True)
