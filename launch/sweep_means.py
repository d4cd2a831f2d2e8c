"""Means over seeds of a sweep's results, with standard deviations."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from txl_jax.run_report.seed_groups import SEED

_SCORES = ("best_valid", "test")


def means(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each combination of the settings but the seed; none if no two rows differ in the seed alone.

    Each has the settings, "seeds" (the runs that have finished), and mean and sample standard deviation of the scores
    as "best_valid", "best_valid_deviation", "test" and "test_deviation", where they are known.

    Args:
      names: of the settings in which runs differ.
      rows: of the runs, as results.csv has them.
    """
    others = [name for name in names if name != SEED]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(repr([row.get(name, "") for name in others]), []).append(row)
    if all(len(group) == 1 for group in groups.values()):
        return []
    return [_mean(others, group) for group in groups.values()]


def _mean(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ended = [row for row in rows if row["state"] == "finished"]
    found = {name: rows[0].get(name, "") for name in names} | {"seeds": len(ended)}
    if ended:
        found["measure"] = ended[0]["measure"]
    for name in _SCORES:
        values = [row[name] for row in ended if math.isfinite(row.get(name, math.nan))]  # Not of runs that diverged.
        if values:
            found[name] = statistics.fmean(values)
        if len(values) > 1:
            found[f"{name}_deviation"] = statistics.stdev(values)
    return found


def columns(names: Sequence[str]) -> list[str]:
    """Returns the columns of means.csv."""
    scores = [column for name in _SCORES for column in (name, f"{name}_deviation")]
    return [*(name for name in names if name != SEED), *scores, "measure", "seeds"]


def markdown(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Returns the lines of the means as a Markdown table."""
    others = [name for name in names if name != SEED]
    return markdown_table(
        [*others, "best valid", "test", "seeds"],
        [[*(row[name] for name in others), *(score(row, name) for name in _SCORES), row["seeds"]] for row in rows],
    )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def score(row: Mapping[str, Any], name: str) -> str:
    """Returns a score of a row as text, with its deviation if the row has one; empty if it has no such score."""
    if name not in row:
        return ""
    digits = 2 if row["measure"] == "ppl" else 4
    deviation = row.get(f"{name}_deviation")
    text = f"{row['measure']} {row[name]:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"
