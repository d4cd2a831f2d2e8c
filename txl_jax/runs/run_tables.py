"""Reads runs as rows of a table.

The table has scores, speed, the settings in which runs differ, and means over seeds.

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

# Of the test text; the second one where tokens are words.
PER_BYTE = ("bits_per_byte", "approximate_bits_per_byte")
MEASURED = ("best_valid", "test", "measure", *PER_BYTE, "steps", "seconds")
SEED = "seed"
_SCORES = ("best_valid", "test")


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """One run, or one member of an ensemble, as its directory describes it."""

    # Of the directory and of the member, or the path where two directories have the same name.
    name: str
    # The workdir.
    path: str
    member: str | None
    config: ExperimentConfig
    # In which its losses are reported.
    measure: Measure
    # In metrics.jsonl.
    records: Sequence[Mapping[str, Any]]
    # In results.json, or None before training has ended.
    results: Mapping[str, Any] | None

    def curve(self, kind: str, field: str) -> list[Point]:
        """Returns the finite values of a field in the records of a kind, by step.

        The kinds are "train", "valid" and "test".
        """
        found = ((each["step"], each.get(field)) for each in self.records if each["kind"] == kind)
        return [
            (step, value)
            for step, value in found
            if isinstance(value, int | float) and abs(value) < 1e300
        ]

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
        return statistics.median(rates) if rates else None

    @property
    def training_seconds(self) -> float:
        """Time of all training steps in seconds, by their recorded rates.

        Startup, evaluation and checkpoints are not included.
        """
        rates = [
            (step, rate) for step, rate in self.curve("train", "tokens_per_second") if rate > 0
        ]
        tokens_per_step = self.config.train.batch_size * self.config.train.new_tokens
        before = [0, *(step for step, _ in rates)]
        return sum(
            (step - since) * tokens_per_step / rate
            for since, (step, rate) in zip(before, rates, strict=False)
        )

    def row(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the run as a row with these settings.

        Until training ends, the best score is the recorded one.
        """
        row: dict[str, Any] = {"run": self.name}
        row |= {
            name: config_tree.format_value(config_tree.get(self.config, name)) for name in names
        }
        if seconds := self.training_seconds:
            row["seconds"] = round(seconds, 1)
        if self.results is not None:
            for name, totals in _totals(self.results).items():
                row[name] = math.inf if totals.diverged else totals.value(self.measure)
            test = (self.results.get("test") or {}).items()
            row |= {
                name: value for name, value in test if name in PER_BYTE and isinstance(value, float)
            }
            row |= {
                "measure": str(self.measure),
                "steps": self.results.get("steps", self.last_step),
            }
            return row | {"state": state_of(self.results)}
        row["state"] = f"{self.last_step:,} of {self.config.train.steps:,} training steps"
        if valid := self.scores("valid"):
            row |= {"best_valid": min(score for _, score in valid), "measure": str(self.measure)}
        return row


def _totals(results: Mapping[str, Any]) -> dict[str, Totals]:
    return {name: Totals(float(results[name]["loss"]), 1) for name in _SCORES if results.get(name)}


def state_of(results: Mapping[str, Any]) -> str:
    """Returns the state of a run with these results: "finished", or "diverged"."""
    return (
        "diverged" if any(totals.diverged for totals in _totals(results).values()) else "finished"
    )


def read_runs(paths: Sequence[str]) -> list[RunRecords]:
    """Reads workdirs, or directories of workdirs such as a sweep's --out.

    Raises `UserError` if it cannot.
    """
    folders = list(dict.fromkeys(folder for path in paths for folder in _workdirs(path)))
    last = [Path(folder).name for folder in folders]
    short = {
        folder: name if last.count(name) == 1 else folder
        for folder, name in zip(folders, last, strict=True)
    }
    return [
        run
        for folder in folders
        for run in _read(folder, "" if len(folders) == 1 else short[folder])
    ]


def _workdirs(path: str) -> list[str]:
    """Returns the workdir itself, or the workdirs directly below a directory, by name."""
    folder = as_path(path)
    if holds_run(folder):
        return [folder]
    below = [os.path.join(folder, name) for name in names(folder)] if is_dir(folder) else []
    if not (found := [each for each in below if holds_run(each)]):
        what = (
            "a directory without runs (no config.json in it or right below)"
            if is_dir(folder)
            else "not a directory"
        )
        raise UserError(f"{path} is {what}. Pass a run's --workdir, or a sweep's --out.")
    return found


def _read(folder: str, name: str) -> Iterator[RunRecords]:
    """Yields a run, or each member of an ensemble, whose own name is enough if `name` is empty."""
    record, records = Run.read_all(folder), read_metrics(folder)
    members = by_name(record.members)
    for member in members or [None]:
        results, train = read_results(folder, member), record.config.train
        # Those of an earlier end stay until a run that got more steps ends. With patience a run may
        # end before.
        ended = results.get("steps", train.steps) == train.steps or train.patience is not None
        yield RunRecords(
            name=": ".join(filter(None, [name, member])) or Path(folder).name,
            path=folder,
            member=member,
            config=config_tree.replace(record.config, dict(members[member]))
            if member
            else record.config,
            measure=record.text.vocabulary.measure,
            records=[each for each in records if each.get("member") == member],
            results=results if results and ended else None,
        )


def swept_settings(runs: Sequence[RunRecords]) -> list[str]:
    """Returns the settings in which runs differ, in the order of the config.

    Only settings that change numbers beyond rounding are included.
    """
    first, *others = [run.config for run in runs]
    found = {leaf.name for other in others for leaf, _, _ in config_tree.differences(first, other)}
    leaves = config_tree.leaves(ExperimentConfig)
    return [leaf.name for leaf in leaves if leaf.name in found and not leaf.setting.free_on_resume]


def seed_groups(names: Sequence[str], rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows that differ only in their seed among the settings `names`.

    The groups are in the order of their first rows.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr([row.get(name, "") for name in names if name != SEED]), []).append(
            row
        )
    return list(groups.values())


def means(names: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row for each group of seeds, or no rows if no two runs differ only in their seed.

    A row has the settings, "seeds" (the number of finished runs), and means and standard deviations
    of the scores.
    """
    groups, found = seed_groups(names, rows), []
    for group in groups:
        ended = [row for row in group if row["state"] == "finished"]
        mean = {name: group[0].get(name, "") for name in names if name != SEED} | {
            "seeds": len(ended)
        }
        if ended:
            mean["measure"] = ended[0]["measure"]
        for name in _SCORES:
            # Not of runs that diverged.
            known = [row[name] for row in ended if math.isfinite(row.get(name, math.nan))]
            if known:
                mean[name] = statistics.fmean(known)
            if len(known) > 1:
                mean[f"{name}_deviation"] = statistics.stdev(known)
        found.append(mean)
    return found if len(groups) < len(rows) else []


def mean_columns(names: Sequence[str]) -> list[str]:
    """Returns the columns of `means`."""
    scores = [column for name in _SCORES for column in (name, f"{name}_deviation")]
    return [*(name for name in names if name != SEED), *scores, "measure", "seeds"]


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
    speed = ["tokens_per_second"] * any("tokens_per_second" in row for row in rows)
    # Not where it is every run's bpc.
    per_byte = [
        name for name in PER_BYTE if any(name in row and row[name] != row["test"] for row in rows)
    ]
    yield from _table(
        ["run", *names, *_SCORES, *per_byte, "steps", *speed, "seconds", "state"], rows
    )
    if averaged := means(names, rows):
        yield ""
        yield from _table([*(name for name in names if name != SEED), *_SCORES, "seeds"], averaged)


def _table(columns: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    headings = {"best_valid": "best valid", "tokens_per_second": "tokens/s", "seconds": "time"}
    headings |= {name: name.replace("_", " ") for name in PER_BYTE}
    cells = ([_cell(row, column) for column in columns] for row in rows)
    return table([headings.get(column, column) for column in columns], cells)


def _cell(row: Row, column: str) -> str:
    if column not in row:
        return ""
    if column == "seconds":
        return duration(row[column])
    if column == "tokens_per_second":
        return f"{row[column]:,.0f}"
    if column in PER_BYTE:
        return f"{row[column]:.4f}"
    if column in _SCORES:
        measure, deviation = Measure(row["measure"]), row.get(f"{column}_deviation")
        spread = "" if deviation is None else f" ± {format_score(deviation, measure).split()[-1]}"
        return format_score(row[column], measure) + spread
    return str(row[column]).replace("|", "\\|")
