"""Groups of runs that differ in nothing but the seed, and means over them."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from txl_jax.config import tree as config_tree
from txl_jax.metrics import Measure
from txl_jax.run_report.run_records import RunRecords, swept_settings
from txl_jax.runs.run import short_name

SEED = "seed"


class Mean(NamedTuple):
    """A mean with its sample standard deviation (0 for one value) and the number of values."""

    mean: float
    deviation: float
    size: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Returns the mean of at least one value."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def format(self, measure: Measure, *, count: bool = True) -> str:
        """Formats the mean, and the deviation and number if there are several values.

        >>> Mean.of([1.0, 2.0, 3.0]).format(Measure.BPC)
        '2.0000 ± 1.0000 (n = 3)'
        """
        text = format_score(self.mean, measure)
        if self.size == 1:
            return text
        return f"{text} ± {format_score(self.deviation, measure)}" + (f" (n = {self.size})" if count else "")


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs with the same settings but for the seed.

    Attributes:
      name: what differs from the other groups; empty if there is no other.
      values: the settings in which groups differ.
      runs: at least one.
    """

    name: str
    values: Mapping[str, Any]
    runs: tuple[RunRecords, ...]

    def mean(self, score: Callable[[RunRecords], float | None]) -> Mean | None:
        """Returns the mean of a score over the runs that have it; None if none has."""
        found = [value for run in self.runs if (value := score(run)) is not None]
        return Mean.of(found) if found else None

    def validation(self) -> list[tuple[int, Mean]]:
        """Returns the mean validation score at the updates at which all of the runs were scored."""
        curves = [dict(run.scores("valid")) for run in self.runs]
        steps = sorted(set.intersection(*map(set, curves)))
        return [(step, Mean.of([curve[step] for curve in curves])) for step in steps]


def seed_groups(runs: Sequence[RunRecords]) -> list[SeedGroup]:
    """Puts runs that differ in nothing but the seed together, in the order of the first of each."""
    names = [name for name in swept_settings(runs) if name != SEED]
    groups: dict[tuple[str, ...], list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(_values(run, names), []).append(run)
    return [
        SeedGroup(
            ", ".join(f"{short_name(name)} {value}" for name, value in zip(names, key, strict=True)),
            {name: config_tree.get(found[0].config, name) for name in names},
            tuple(found),
        )
        for key, found in groups.items()
    ]


def format_score(value: float, measure: Measure) -> str:
    """Formats a score: two digits of a perplexity, four of bits per character."""
    return f"{value:,.2f}" if measure is Measure.PPL else f"{value:.4f}"


def _values(run: RunRecords, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(config_tree.format_value(config_tree.get(run.config, name)) for name in names)
