"""Reads runs as rows of a table.

The table shows scores, speed, the settings in which runs differ, and means over seeds.

A row is a dict by column name: "run", the settings that differ, "best_valid", "test", "measure",
"steps", "seconds", "state". Columns whose values are not known yet are missing.
"""

import csv
import dataclasses
import io
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.metrics import Measure, Totals, format_score
from txl_jax.runs.run import Run, by_name, holds_run, read_results
from txl_jax.runtime.environment import duration, table
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.storage import as_path, is_dir, names

Row = Mapping[str, Any]
Point = tuple[int, float]  # A training step, and the value recorded there.

# Losses per byte of the test split. The second one is for word tokens.
PER_BYTE = ("bits_per_byte", "approximate_bits_per_byte")
MEASURED = ("best_valid", "test", "measure", *PER_BYTE, "steps", "seconds")
SEED = "seed"
# States of a run with results.
FINISHED = "finished"
DIVERGED = "diverged"
END_STATES = (FINISHED, DIVERGED)
_SCORES = ("best_valid", "test")
# Headings of columns whose heading differs from their name.
_HEADINGS = {
    "best_valid": "best valid",
    "tokens_per_second": "tokens/s",
    "seconds": "time",
    "bits_per_byte": "bits per byte",
    "approximate_bits_per_byte": "approximate bits per byte",
}
# Larger values count as not finite. `math.isfinite` raises for integers above the largest float.
_LARGEST = 1e300


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """One run, or one member of an ensemble, with the records in its directory."""

    # Names of the directory and the member, or the path if two directories have the same name.
    name: str
    # The workdir.
    path: str
    member: str | None
    config: ExperimentConfig
    # The measure in which its losses are reported.
    measure: Measure
    # The lines of metrics.jsonl.
    records: Sequence[Mapping[str, Any]]
    # The content of results.json, or None before training has ended.
    results: Mapping[str, Any] | None

    def curve(self, kind: str, field: str) -> list[Point]:
        """Returns the finite values of a field in the records of a kind, by step.

        The kinds are "train", "valid" and "test".
        """
        points = []
        for record in self.records:
            if record["kind"] != kind:
                continue
            value = record.get(field)
            if isinstance(value, int | float) and abs(value) < _LARGEST:
                points.append((record["step"], value))
        return points

    def scores(self, kind: str) -> list[Point]:
        """Returns the curve of the measure in the records of a kind."""
        return self.curve(kind, "bpc" if self.measure.is_bits else "perplexity")

    @property
    def last_step(self) -> int:
        """The last recorded training step."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the recorded rates, or None if there are no records."""
        rates = [rate for _, rate in self.curve("train", "tokens_per_second")]
        if not rates:
            return None
        return statistics.median(rates)

    @property
    def training_seconds(self) -> float:
        """Time of all training steps in seconds, from their recorded rates.

        Startup, evaluation and checkpoints are not included.
        """
        tokens_per_step = self.config.train.batch_size * self.config.train.new_tokens
        # A rate is recorded at the end of the steps that it was measured over.
        seconds = []
        previous_step = 0
        for step, rate in self.curve("train", "tokens_per_second"):
            if rate > 0:
                seconds.append((step - previous_step) * tokens_per_step / rate)
                previous_step = step
        return sum(seconds)

    def row(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the run as a row with these settings.

        Until training ends, the best score is the recorded one.
        """
        row: dict[str, Any] = {"run": self.name}
        for name in names:
            row[name] = config_tree.format_value(config_tree.get(self.config, name))
        seconds = self.training_seconds
        if seconds:
            row["seconds"] = round(seconds, 1)
        if self.results is None:
            return row | self._columns_so_far()
        return row | self._columns_of_results(self.results)

    def _columns_so_far(self) -> dict[str, Any]:
        """Returns the columns of a run that is still training, from its records."""
        steps = self.config.train.steps
        columns: dict[str, Any] = {
            "measure": str(self.measure),
            "steps": self.last_step,
            "state": f"{self.last_step:,} of {steps:,} training steps",
        }
        valid = self.scores("valid")
        if valid:
            columns["best_valid"] = min(score for _, score in valid)
        return columns

    def _columns_of_results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of a run that has ended."""
        columns: dict[str, Any] = {}
        for name, totals in _totals(results).items():
            columns[name] = math.inf if totals.diverged else totals.value(self.measure)
        test = results.get("test") or {}
        columns |= {name: test[name] for name in PER_BYTE if isinstance(test.get(name), float)}
        columns["measure"] = str(self.measure)
        columns["steps"] = results.get("steps", self.last_step)
        columns["state"] = state_of(results)
        return columns


def _totals(results: Mapping[str, Any]) -> dict[str, Totals]:
    """Returns the scores in results.json as totals of one token, with the mean loss."""
    return {name: Totals(float(results[name]["loss"]), 1) for name in _SCORES if results.get(name)}


def state_of(results: Mapping[str, Any]) -> str:
    """Returns the state of a run with these results, one of `END_STATES`."""
    has_diverged = any(totals.diverged for totals in _totals(results).values())
    return DIVERGED if has_diverged else FINISHED


def read_runs(paths: Sequence[str]) -> list[RunRecords]:
    """Reads workdirs, or directories of workdirs such as a sweep's --out.

    Raises `UserError` if a path cannot be read or contains no run.
    """
    # A directory that is passed twice is read once.
    folders: dict[str, None] = {}
    for path in paths:
        folders |= dict.fromkeys(_workdirs(path))

    last_parts = [Path(folder).name for folder in folders]
    runs: list[RunRecords] = []
    for folder, last_part in zip(folders, last_parts, strict=True):
        if len(folders) == 1:
            runs += _read(folder, "")
        elif last_parts.count(last_part) == 1:
            runs += _read(folder, last_part)
        else:
            runs += _read(folder, folder)
    return runs


def _workdirs(path: str) -> list[str]:
    """Returns the workdir itself, or the workdirs directly below a directory, by name."""
    folder = as_path(path)
    if holds_run(folder):
        return [folder]
    if not is_dir(folder):
        raise UserError(f"{path} is not a directory. Pass a run's --workdir, or a sweep's --out.")

    workdirs = []
    for name in names(folder):
        subfolder = os.path.join(folder, name)
        if holds_run(subfolder):
            workdirs.append(subfolder)
    if not workdirs:
        raise UserError(
            f"{path} is a directory without runs (no config.json in it or right below). "
            "Pass a run's --workdir, or a sweep's --out."
        )
    return workdirs


def _read(folder: str, name: str) -> Iterator[RunRecords]:
    """Yields a run, or each member of an ensemble.

    `name` is the directory's part of their names. It may be empty, because a member's name is
    enough if no other directory is read.
    """
    run = Run.read_all(folder)
    records = read_metrics(folder)
    # A single run is read like an ensemble of one member without a name.
    members: Mapping[Any, Mapping[str, float]] = by_name(run.members) or {None: {}}
    for member, differences in members.items():
        results = read_results(folder, member)
        # If train.steps was raised, the results of the earlier end remain until the run ends again.
        # With patience a run may end early.
        train = run.config.train
        final_results: dict[str, Any] | None = None
        if results and (
            results.get("steps", train.steps) == train.steps or train.patience is not None
        ):
            final_results = results
        yield RunRecords(
            name=": ".join(filter(None, [name, member])) or Path(folder).name,
            path=folder,
            member=member,
            config=config_tree.replace(run.config, differences),
            measure=run.text.vocabulary.measure,
            records=[record for record in records if record.get("member") == member],
            results=final_results,
        )


def swept_settings(runs: Sequence[RunRecords]) -> list[str]:
    """Returns the settings in which runs differ, in the order of the config.

    Only settings that change numbers beyond rounding are included.
    """
    differing = set()
    for run in runs[1:]:
        for leaf, _, _ in config_tree.differences(runs[0].config, run.config):
            if not leaf.setting.free_on_resume:
                differing.add(leaf.name)
    return [leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.name in differing]


def seed_groups(names: Sequence[str], rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows that differ only in their seed among the settings `names`.

    The groups are in the order of their first rows.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        values = [row.get(name, "") for name in _without_seed(names)]
        groups.setdefault(repr(values), []).append(row)
    return list(groups.values())


def _without_seed(names: Sequence[str]) -> list[str]:
    """Returns the settings that distinguish groups of seeds."""
    return [name for name in names if name != SEED]


def means(names: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row for each group of seeds, or no rows if no two runs differ only in their seed.

    A row has the settings, "seeds" (the number of finished runs), and means and standard deviations
    of the scores.
    """
    groups = seed_groups(names, rows)
    if len(groups) == len(rows):
        return []

    mean_rows = []
    for group in groups:
        finished = [row for row in group if row["state"] == FINISHED]
        mean: dict[str, Any] = {name: group[0].get(name, "") for name in _without_seed(names)}
        mean["seeds"] = len(finished)
        measures = [row["measure"] for row in group if "measure" in row]
        if measures:
            mean["measure"] = measures[0]
        for name in _SCORES:
            # A score that is missing, or infinite after a divergence, does not count.
            scores = [row[name] for row in finished if math.isfinite(row.get(name, math.nan))]
            if scores:
                mean[name] = statistics.fmean(scores)
            if len(scores) > 1:
                mean[f"{name}_deviation"] = statistics.stdev(scores)
        mean_rows.append(mean)
    return mean_rows


def mean_columns(names: Sequence[str]) -> list[str]:
    """Returns the columns of `means`."""
    columns = _without_seed(names)
    for name in _SCORES:
        columns += [name, f"{name}_deviation"]
    return [*columns, "measure", "seeds"]


def csv_file(columns: Sequence[str], rows: Sequence[Row]) -> bytes:
    """Returns rows as a CSV file with all digits. Missing values are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def markdown(names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a Markdown table of rows.

    A second table with the means over seeds follows, if there are any.
    """
    columns = ["run", *names, *_SCORES]
    for name in PER_BYTE:
        # If bpc is the same number for every run, the column would only repeat it.
        if any(name in row and row[name] != row["test"] for row in rows):
            columns.append(name)
    columns.append("steps")
    if any("tokens_per_second" in row for row in rows):
        columns.append("tokens_per_second")
    yield from _table([*columns, "seconds", "state"], rows)

    mean_rows = means(names, rows)
    if mean_rows:
        yield ""
        yield from _table([*_without_seed(names), *_SCORES, "seeds"], mean_rows)


def _table(columns: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    # A measure that all rows share is in the headings of the scores, else in their cells.
    measures = {row["measure"] for row in rows if "measure" in row}
    shared_measure = measures.pop() if len(measures) == 1 else None
    headings = []
    for column in columns:
        heading = _HEADINGS.get(column, column)
        if column in _SCORES and shared_measure is not None:
            heading += f" ({shared_measure})"
        headings.append(heading)

    cells = []
    for row in rows:
        cells.append([_cell(row, column, shared_measure is None) for column in columns])
    return table(headings, cells)


def _cell(row: Row, column: str, names_measure: bool) -> str:
    """Formats the value of a column, which is empty if it is missing.

    `names_measure` is whether a score has the name of its measure before it.
    """
    if column not in row:
        return ""
    value = row[column]
    if column == "seconds":
        return duration(value)
    if column == "tokens_per_second":
        return f"{value:,.0f}"
    if column in PER_BYTE:
        return f"{value:.4f}"
    if column not in _SCORES:
        return str(value).replace("|", "\\|")

    measure = Measure(row["measure"])
    score = format_score(value, measure)
    if not names_measure:
        score = score.removeprefix(f"{measure} ")
    deviation = row.get(f"{column}_deviation")
    if deviation is None:
        return score
    return f"{score} ± {format_score(deviation, measure).removeprefix(f'{measure} ')}"
