"""A chart for each setting that a sweep varies: the best validation score at its values."""

from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.config import tree as config_tree
from txl_jax.run_report.axis import Axis, axis_over, is_spread
from txl_jax.run_report.chart import NEUTRAL, Chart, Series
from txl_jax.run_report.curves import UNITS, best_valid_score
from txl_jax.run_report.seed_groups import Mean, SeedGroup
from txl_jax.runs.run import short_name

_MOST_LINES = 6  # Combinations of the other settings that are joined by lines of their own.


def setting_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """Draws the best validation score against each setting in which groups differ."""
    scored = [group for group in groups if group.mean(best_valid_score)]
    names = [name for name in (scored[0].values if scored else ()) if _texts(scored, name) > 1]
    return [_chart(scored, name) for name in names]


def _texts(groups: Sequence[SeedGroup], name: str) -> int:
    return len({config_tree.format_value(group.values[name]) for group in groups})


def _chart(groups: Sequence[SeedGroup], name: str) -> Chart:
    places, axis = _placed([group.values[name] for group in groups])
    points = [
        (place, score, len(group.runs))
        for place, group in zip(places, groups, strict=True)
        for run in group.runs
        if (score := best_valid_score(run)) is not None
    ]
    single = Series("", sorted((x, y) for x, y, _ in points), NEUTRAL, "dots")
    measure = groups[0].runs[0].measure
    lines = _lines(groups, places, name)
    scores = [y for _, y, _ in points]
    return Chart(
        f"{short_name(name)}: best validation, {UNITS[measure]}",
        name,
        axis,
        axis_over(scores, log=min(scores) > 0 and is_spread(scores), margin=0.12),
        [single, *lines],
        "metrics.jsonl, lowest of kind valid; dots are runs"
        + (", joined where all other settings are equal" if lines else "")
        + ("; bars ± one standard deviation over seeds" if any(len(group.runs) > 1 for group in groups) else ""),
        bars=True,
        small=True,
    )


def _placed(values: Sequence[Any]) -> tuple[list[float], Axis]:
    """Places of values on an axis: numbers by size, logarithmic where they are far apart, others by their names."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        return numbers, axis_over(numbers, log=is_spread(numbers), margin=0.08)
    names = list(dict.fromkeys(config_tree.format_value(value) for value in values))
    axis = Axis(-0.5, len(names) - 0.5, labels=tuple(names))
    return [float(names.index(config_tree.format_value(value))) for value in values], axis


def _lines(groups: Sequence[SeedGroup], places: Sequence[float], name: str) -> list[Series]:
    """The means of groups that agree in all other settings, joined; none where the values were drawn at random."""
    found: dict[str, list[tuple[float, Mean]]] = {}
    for group, place in zip(groups, places, strict=True):
        if mean := group.mean(best_valid_score):
            found.setdefault(_others(group.values, name), []).append((place, mean))
    if len(found) > _MOST_LINES or max(map(len, found.values())) < 2:
        return []
    lines = []
    for color, (others, points) in enumerate(found.items()):
        points.sort(key=lambda point: point[0])
        xy = [(place, mean.mean) for place, mean in points]
        lines.append(Series(others or "mean", xy, color, "marked", [mean.deviation for _, mean in points]))
    return lines


def _others(values: Mapping[str, Any], name: str) -> str:
    rest = {other: value for other, value in values.items() if other != name}
    return ", ".join(f"{short_name(other)} {config_tree.format_value(value)}" for other, value in rest.items())
