"""The learning curves of a report, and the small charts beside them."""

import dataclasses
from collections.abc import Sequence

from txl_jax.metrics import Measure
from txl_jax.run_report.axis import Axis, axis_over
from txl_jax.run_report.chart import COLORS, NEUTRAL, Chart, Points, Series
from txl_jax.run_report.run_records import Point, RunRecords
from txl_jax.run_report.seed_groups import SeedGroup

UNITS = {Measure.BPC: "bits per character", Measure.PPL: "perplexity"}
_COLORED = 5  # Of more groups than there are colors, the best.
_MOST_NAMED = 8  # Lines of a small chart whose values are shown at the pointer.
_BEGINNING = 0.05  # The part of a training in which losses are far above all that follows, and are cut off.
_SMALL = (
    ("learning_rate", "Learning rate"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second"),
)


@dataclasses.dataclass(frozen=True)
class Palette:
    """The color of each group: its own, or neutral where there are more groups than colors."""

    groups: Sequence[SeedGroup]

    def color(self, group: SeedGroup) -> int:
        """Returns the color of a group."""
        return self._numbers().get(id(group), NEUTRAL)

    def named(self, group: SeedGroup, name: str) -> str:
        """Returns the name in the legend; empty for a group without a color."""
        return "" if self.color(group) == NEUTRAL else name

    def _numbers(self) -> dict[int, int]:
        chosen = list(self.groups)
        if len(chosen) > COLORS:
            scored = [(mean.mean, i) for i, group in enumerate(chosen) if (mean := group.mean(best_valid_score))]
            chosen = [self.groups[i] for _, i in sorted(scored)[:_COLORED]]
        return {id(group): number for number, group in enumerate(chosen)}


def best_valid_score(run: RunRecords) -> float | None:
    """Returns the lowest validation score."""
    return run.best_valid[1] if run.best_valid else None


def learning_curves(groups: Sequence[SeedGroup]) -> Chart:
    """Draws the validation scores: of one run with the training scores, of several as means with their deviations."""
    runs = [run for group in groups for run in group.runs]
    palette = Palette(groups)
    if len(runs) == 1:
        series = [
            Series("train", runs[0].scores("train"), NEUTRAL, "thin"),
            Series("valid", runs[0].scores("valid"), 0, "marked"),
        ]
        title, source = "", "kinds train and valid"
    else:
        series = [line for group in groups for line in _group_series(group, palette)]
        title, source = "Validation, ", "kind valid"
    repeated = any(len(group.runs) > 1 for group in groups)
    note = "; thick lines are means over seeds, bands ± one standard deviation" if repeated else ""
    measure = runs[0].measure
    return Chart(
        f"{title}{UNITS[measure]}".capitalize(),
        "updates",
        _steps(runs),
        _scores_axis([line.points for line in series], _last(runs), measure),
        [line for line in series if line.points],
        f"metrics.jsonl, {source}{note}",
    )


def small_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """Draws the records of training: the scores of several runs, learning rate, gradient norm, speed."""
    runs = [run for group in groups for run in group.runs]
    measure, charts = runs[0].measure, []
    if len(runs) > 1:
        series = _per_run(groups, [run.scores("train") for run in runs])
        axis = _scores_axis([line.points for line in series], _last(runs), measure)
        charts.append(_small(f"Training, {UNITS[measure]}", runs, axis, series))
    for field, title in _SMALL:
        series = _per_run(groups, [run.curve("train", field) for run in runs])
        values = [y for line in series for x, y in line.points if x > _BEGINNING * _last(runs)]
        if not values:
            continue
        axis = Axis(0.0, max(values) * 1.08 or 1.0)
        charts.append(_small(title, runs, axis, series))
    return [chart for chart in charts if chart.series]


def _small(title: str, runs: Sequence[RunRecords], axis: Axis, series: Sequence[Series]) -> Chart:
    drawn = [line for line in series if line.points]
    return Chart(title, "updates", _steps(runs), axis, drawn, "metrics.jsonl, kind train", small=True, legend=False)


def _per_run(groups: Sequence[SeedGroup], curves: Sequence[Sequence[Point]]) -> list[Series]:
    """One thin line for each run, in the color of its group."""
    palette, by_run = Palette(groups), iter(curves)
    named = len(curves) <= _MOST_NAMED
    return [
        Series(run.name if named else "", next(by_run), palette.color(group), "thin")
        for group in groups
        for run in group.runs
    ]


def _group_series(group: SeedGroup, palette: Palette) -> list[Series]:
    """The mean over seeds with a band, and each run thin; one run by itself as a line."""
    color = palette.color(group)
    if len(group.runs) == 1:
        [run] = group.runs
        style = "thin" if color == NEUTRAL else "marked"
        return [Series(palette.named(group, run.name), run.scores("valid"), color, style)]
    means = group.validation()
    name = f"{group.name}, mean of {len(group.runs)} seeds".removeprefix(", ")
    mean = Series(
        palette.named(group, name),
        [(step, mean.mean) for step, mean in means],
        color,
        "marked",
        [mean.deviation for _, mean in means],
    )
    each = [Series("", run.scores("valid"), color, "thin") for run in group.runs]
    return [*each, mean]


def _steps(runs: Sequence[RunRecords]) -> Axis:
    return Axis(0, max(_last(runs), 1))


def _last(runs: Sequence[RunRecords]) -> int:
    return max(run.last_step for run in runs)


def _scores_axis(curves: Sequence[Points], last: int, measure: Measure) -> Axis:
    """The range of scores after the beginning; perplexities on a logarithmic axis."""
    later = [y for points in curves for x, y in points if x > _BEGINNING * last]
    values = later or [y for points in curves for _, y in points] or [1.0, 2.0]
    return axis_over(values, log=measure is Measure.PPL)
