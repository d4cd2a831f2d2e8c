"""Compares runs: a table of settings, scores and speed, and a figure with their learning curves.

    python -m experiments.report runs/mine runs/other
    python -m experiments.report runs/sweep --out=report  # report/report.md, .csv and .png

Each argument is the workdir of a run (for an ensemble, all members count as runs), or a directory
of workdirs such as a sweep's --out. Runs may still be training. If runs differ only in their seed,
a second table shows means ± standard deviations over the seeds, and the figure shows one line with
a band for them.
"""

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax import cli, plots
from txl_jax.cli import setting
from txl_jax.errors import UserError
from txl_jax.metrics import Measure
from txl_jax.runs import run_tables
from txl_jax.runs.run import short_name
from txl_jax.runs.run_tables import RunRecords
from txl_jax.runtime import storage

# A figure with more lines shows only the best ones.
MOST_LINES = 8

# A line of the figure: by step, the scores of its runs.
Line = dict[int, list[float]]


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the report."""

    out: str | None = setting(
        None,
        "Directory for report.md, report.csv and report.png. none only prints the tables.",
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
    rows = [_row(run, names) for run in runs]
    lines = list(run_tables.markdown(names, rows))
    print("\n".join(lines))
    if plan.out is None:
        return

    print()
    storage.make_folder(plan.out)
    columns = ["run", *names, *run_tables.MEASURED, "tokens_per_second", "state"]
    storage.write(os.path.join(plan.out, "report.csv"), run_tables.csv_file(columns, rows))
    measures = {run.measure for run in runs}
    figure = os.path.join(plan.out, "report.png")
    if len(measures) > 1:
        different = " and others ".join(sorted(measures))
        print(
            f"no figure: some runs have {different}, which one axis cannot show. "
            "Compare their bits per byte."
        )
    elif _draw(learning_curves(names, runs), runs[0].measure, figure):
        lines += ["", "![Learning curves](report.png)"]
        print(f"figure    {figure}")
    path = os.path.join(plan.out, "report.md")
    text = "\n".join(lines) + "\n"
    storage.write(path, text.encode())
    plural = "s" if len(runs) > 1 else ""
    print(f"report    {path}: {len(runs)} run{plural}")


def _row(run: RunRecords, names: Sequence[str]) -> dict[str, Any]:
    """Returns a run's row with these settings, and its speed once it is known."""
    row = run.row(names)
    rate = run.tokens_per_second
    if rate:
        row["tokens_per_second"] = rate
    return row


def learning_curves(names: Sequence[str], runs: Sequence[RunRecords]) -> dict[str, Line]:
    """Returns the lines of the figure by name: the scores of a line's runs at each step.

    Each run is a line of validation scores. Runs that differ only in their seed share one line,
    over the steps at which all of them were scored. If there is only one run, its training scores
    are a line too.
    """
    lines: dict[str, Line] = {}
    if len(runs) == 1:
        for kind in ("train", "valid"):
            points = runs[0].scores(kind)
            if points:
                lines[kind] = {step: [score] for step, score in points}
        return lines

    by_name = {run.name: run for run in runs}
    for group in run_tables.seed_groups(names, [run.row(names) for run in runs]):
        # Runs without a score are omitted from the line.
        curves: dict[str, dict[int, float]] = {}
        for row in group:
            points = by_name[row["run"]].scores("valid")
            if points:
                curves[row["run"]] = dict(points)
        if not curves:
            continue
        shared_steps = sorted(set.intersection(*map(set, curves.values())))
        if not shared_steps:
            continue

        if len(curves) > 1:
            parts = [
                f"{short_name(name)} {group[0][name]}" for name in names if name != run_tables.SEED
            ]
            line_name = ", ".join([*parts, f"mean of {len(curves)} seeds"])
        else:
            [line_name] = curves
        lines[line_name] = {
            step: [curve[step] for curve in curves.values()] for step in shared_steps
        }
    return lines


def _draw(lines: Mapping[str, Line], measure: Measure, path: str) -> bool:
    """Draws the lines, with bands of one standard deviation around means.

    Returns whether there is a figure. If not, a printed line gives the reason.
    """
    if not lines:
        print("no figure: no scores have been recorded yet")
        return False
    if not plots.can_draw():
        return False

    means: dict[str, dict[int, float]] = {}
    deviations: dict[str, dict[int, float]] = {}
    for name, line in lines.items():
        means[name] = {step: statistics.fmean(scores) for step, scores in line.items()}
        if all(len(scores) > 1 for scores in line.values()):
            deviations[name] = {step: statistics.stdev(scores) for step, scores in line.items()}

    best = sorted(means, key=lambda name: min(means[name].values()))[:MOST_LINES]
    title = "Learning curves"
    if len(best) < len(lines):
        title += f", the best {len(best)} of {len(lines)}"
    # Only the figure of a single run has training scores too.
    ylabel = plots.UNITS[measure]
    if "train" not in lines:
        ylabel = f"validation, {ylabel}"
    plots.curves(
        {name: points for name, points in means.items() if name in best},
        path,
        title=title,
        xlabel="training steps",
        ylabel=ylabel,
        deviations=deviations,
        log=measure is Measure.PPL,
    )
    return True


if __name__ == "__main__":
    cli.main(run, Plan, takes_words=True)
