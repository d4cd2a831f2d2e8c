"""Finds each number of a table in README and the guides in the file of `benchmarks/` with its
command.

`numbers.toml` says which columns of a table are which columns of a CSV file, and why the numbers of
other columns and tables are not measurements.
"""

import collections
import csv
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from support import ON_PATH, ROOT
from support.pages import PAGES

# A number that is not part of a name such as enwik8, 2.1M or 20/20. A unit may follow at once.
UNIT = r"(?:ns|us|µs|ms|s|min|h|x|[kKMGT]i?B)?"
NUMBER = re.compile(
    r"(?<![\w.,/-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?" + rf"(?={UNIT}(?![\w/]|[.,]\d))"
)
# In a CSV file a unit may follow at once, and a plus or minus is a sign.
NUMBER_IN_CSV = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
CODE_OR_ADDRESS = re.compile(r"`[^`]*`|\]\([^)]*\)|\*\*")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page."""

    page: str
    line: int  # Of its header.
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """The header and the first row on one line."""
        return " | ".join([*self.header, *self.rows[0]])

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings, or "column 2" if a heading is missing or not unique."""
        names = []
        for number, heading in enumerate(self.header, start=1):
            if heading and self.header.count(heading) == 1:
                names.append(heading)
            else:
                names.append(f"column {number}")
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """Numbers of a cell that are not measurements of this project."""

    row: str  # How the row begins.
    column: str
    numbers: dict[str, str]  # The reasons, by number.


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the numbers of a table come from. The head of numbers.toml explains the fields."""

    page: str
    begins: str = ""
    not_measured: str = ""
    csv: str = ""
    one_row: tuple[dict[str, str | list[str]], ...] = ()
    any_row: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    own: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    means_by: tuple[str, ...] = ()
    quotients: dict[str, Any] = dataclasses.field(default_factory=dict)
    output: str = ""
    in_output: tuple[str, ...] = ()
    stated: dict[str, str] = dataclasses.field(default_factory=dict)
    exceptions: tuple[Exceptions, ...] = ()

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> "Source":
        """Returns an entry of numbers.toml."""
        exceptions = tuple(Exceptions(**cell) for cell in entry.get("exceptions", ()))
        return cls(**(entry | {"exceptions": exceptions}))

    def is_of(self, table: Table) -> bool:
        """Returns whether the table is on this source's page and begins with its words."""
        return table.page == self.page and table.name.startswith(self.begins)


ENTRIES = tomllib.loads(Path(__file__).with_name("numbers.toml").read_text())["table"]
SOURCES = [Source.from_entry(entry) for entry in ENTRIES]


def cells(line):
    """Returns the cells of a line of a table."""
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def tables(page):
    """Returns the tables of a page."""
    lines = (ROOT / page).read_text().splitlines()
    all_tables = []
    for number, line in enumerate(lines):
        if line.startswith("|") and not lines[number - 1].startswith("|"):
            below = itertools.takewhile(lambda line: line.startswith("|"), lines[number + 2 :])
            rows = tuple(cells(line) for line in below)
            all_tables.append(Table(page, number + 1, cells(line), rows))
    return all_tables


PAGE_TABLES = [table for page in PAGES for table in tables(page)]


def numbers(text):
    """Returns the numbers of a cell as they are written, in links' texts too.

    Numbers in code and in the addresses of links are omitted.
    """
    return NUMBER.findall(CODE_OR_ADDRESS.sub(" ", text))


def value_of(number):
    """Returns the value of a number as it is written."""
    return float(number.replace(",", ""))


def interval(number):
    """Returns the lowest and the highest value that rounds to a number as it is written."""
    value = Decimal(number.replace(",", ""))
    half = Decimal(1).scaleb(value.as_tuple().exponent) / 2
    return float(value - half), float(value + half)


def do_agree(number, low, high):
    """Returns whether a number that is shown is one between these values, rounded."""
    shown_low, shown_high = interval(number)
    slack = 1e-9 * max(abs(low), abs(high))
    return shown_low - slack <= high and low <= shown_high + slack


def values(expression, row):
    """Returns what an expression says about a row, as lowest and highest values.

    Args:
      expression: A column, of which each number counts, or a calculation with the first numbers of
        columns, such as "100 * (1 - {dynamic} / {static})".
      row: The cells of a row by column.
    """
    if "{" not in expression:
        found = NUMBER_IN_CSV.findall(row[expression])
        return [(value_of(number), value_of(number)) for number in found]

    # What the columns show is rounded, so the calculation is one with intervals. It is monotone in
    # each operand: its extremes are at the ends of the intervals.
    names = re.findall(r"{(.*?)}", expression)
    operands = []
    for name in names:
        found = NUMBER_IN_CSV.findall(row[name])
        if not found:
            return []
        operands.append(interval(found[0]))
    formula = re.sub(r"{.*?}", "{!r}", expression)
    results = []
    for corner in itertools.product(*operands):
        results.append(eval(formula.format(*corner), {"exp": math.exp, "log": math.log}))
    return [(min(results), max(results))]


def is_among(number, expressions, row):
    """Returns whether a number is what one of the expressions says about a row."""
    if isinstance(expressions, str):
        expressions = [expressions]
    for expression in expressions:
        for low, high in values(expression, row):
            if do_agree(number, low, high):
                return True
    return False


@functools.cache
def read_csv(name):
    """Returns the rows of a file of `benchmarks/`."""
    with (ROOT / "benchmarks" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def groups(rows, columns):
    """Returns the lists of rows of a CSV file that are equal in these columns."""
    by_values = collections.defaultdict(list)
    for row in rows:
        by_values[tuple(row[column] for column in columns)].append(row)
    return by_values.values()


def quotients(rows, column, by):
    """Returns a row of quotients for the rows of a CSV file that are equal in the columns `by`."""
    rows_of_quotients = []
    for group in groups(rows, by):
        pairs = itertools.permutations([float(row[column]) for row in group], 2)
        row = {name: group[0][name] for name in by}
        row["quotients"] = " ".join(str(dividend / divisor) for dividend, divisor in pairs)
        rows_of_quotients.append(row)
    return rows_of_quotients


def means(rows, columns):
    """Returns a row of means for the rows of a CSV file that are equal in these columns."""
    rows_of_means = []
    for group in groups(rows, columns):
        rows_of_means.append({column: mean([row[column] for row in group]) for column in group[0]})
    return rows_of_means


def mean(cells_of_column):
    """Returns the mean of cells of a CSV file, as a cell.

    If one of them is not a number, the result is their common content, or empty if they differ.
    """
    try:
        return str(statistics.fmean(float(cell) for cell in cells_of_column))
    except ValueError:
        are_equal = len(set(cells_of_column)) == 1
        return cells_of_column[0] if are_equal else ""


@functools.cache
def output_of(command):
    """Returns what a script of `benchmarks/` prints from its files."""
    words = [sys.executable, *command.split()[1:]]
    environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_with_all(cell_of, group, csv_rows):
    """Returns the rows of a CSV file that have all numbers of a group of cells."""
    rows = []
    for csv_row in csv_rows:
        if all(
            is_among(number, expressions, csv_row)
            for column, expressions in group.items()
            for number in numbers(cell_of[column])
        ):
            rows.append(csv_row)
    return rows


def excused(source, cells_of_row):
    """Returns the numbers of a table's row that are exceptions, as pairs (column, number)."""
    line = " | ".join(cells_of_row)
    pairs = set()
    for exceptions in source.exceptions:
        if line.startswith(exceptions.row):
            pairs.update((exceptions.column, number) for number in exceptions.numbers)
    return pairs


def not_found(table, source):
    """Yields the row, the column and the number of each number without a source."""
    csv_rows = read_csv(source.csv) if source.csv else []
    if source.means_by:
        csv_rows = means(csv_rows, source.means_by)
    if source.quotients:
        csv_rows = quotients(csv_rows, **source.quotients)
    for cells_of_row in table.rows:
        cell_of = dict(zip(table.columns, cells_of_row, strict=True))
        exceptions = excused(source, cells_of_row)
        in_groups = set()
        for group in source.one_row:
            if rows_with_all(cell_of, group, csv_rows):
                in_groups.update(group)
        for column, cell in cell_of.items():
            if column in source.stated or column in in_groups:
                continue
            for number in numbers(cell):
                is_known = (column, number) in exceptions
                if column in source.any_row:
                    expressions = source.any_row[column]
                    is_known |= any(is_among(number, expressions, row) for row in csv_rows)
                if column in source.own:
                    is_known |= is_among(number, source.own[column], cell_of)
                if column in source.in_output:
                    printed = NUMBER_IN_CSV.findall(output_of(source.output))
                    is_known |= value_of(number) in map(value_of, printed)
                if not is_known:
                    yield cells_of_row[0], column, number


def sources_of(table):
    """Returns the entries of numbers.toml for a table."""
    return [source for source in SOURCES if source.is_of(table)]


@pytest.mark.parametrize("table", PAGE_TABLES, ids=lambda table: f"{table.page}:{table.line}")
def test_each_number_of_a_table_has_a_source(table):
    has_numbers = any(numbers(cell) for row in table.rows for cell in row)
    sources = sources_of(table)
    if not has_numbers and not sources:
        return
    assert len(sources) == 1, f"numbers.toml must have one entry for {table.name!r}, got {sources}"
    [source] = sources
    if source.not_measured:
        return

    if source.csv:
        assert source.csv in (ROOT / table.page).read_text(), "the page must name its file"
    missing = list(not_found(table, source))
    for first_cell, column, number in missing:
        print(f"{table.page}:{table.line}: {number} in {column!r} of {first_cell!r}")
    assert not missing


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.page}: {source.begins}")
def test_an_entry_is_about_one_table(source):
    matching = [table for table in PAGE_TABLES if source.is_of(table)]
    if not source.begins:
        assert matching and source.not_measured
        return
    assert len(matching) == 1, matching
    [table] = matching
    named = [*source.stated, *source.any_row, *source.own, *source.in_output]
    for group in source.one_row:
        named.extend(group)
    assert set(named) <= set(table.columns)
    for exceptions in source.exceptions:
        [row] = [row for row in table.rows if " | ".join(row).startswith(exceptions.row)]
        cell = row[table.columns.index(exceptions.column)]
        assert exceptions.numbers.keys() <= set(numbers(cell))
    if not source.not_measured:
        assert source.csv or source.output


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.csv")), ids=lambda p: p.name)
def test_each_measurement_has_its_command(path):
    rows = read_csv(path.name)
    assert rows
    for row in rows:
        assert row["machine"] and row["versions"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"])
        assert row["command"]


def test_an_exception_is_about_one_cell():
    table = Table("page.md", 1, ("run", "a", "b"), (("first", "7", "7"), ("second", "7", "")))
    exceptions = (Exceptions(row="first | 7", column="a", numbers={"7": "a size"}),)
    source = Source("page.md", exceptions=exceptions)
    assert list(not_found(table, source)) == [("first", "b", "7"), ("second", "a", "7")]


def test_a_blank_cell_has_no_mean():
    rows = [
        {"name": "a", "host": "x", "bpc": "1.0", "seconds": "3"},
        {"name": "a", "host": "x", "bpc": "", "seconds": "5"},
    ]
    assert means(rows, ["name"]) == [{"name": "a", "host": "x", "bpc": "", "seconds": "4.0"}]


def test_a_number_agrees_with_what_it_is_rounded_from():
    assert do_agree("1.06", 1.0649, 1.0649)
    assert not do_agree("1.06", 1.0651, 1.0651)
    assert do_agree("4,682", 4682.0, 4682.0)
    assert not do_agree("4,682", 4683.0, 4683.0)
    row = {"static": "1.908", "dynamic": "1.311", "size": "206 MB"}
    assert is_among("31.3", "100 * (1 - {dynamic} / {static})", row)
    assert not is_among("31.4", "100 * (1 - {dynamic} / {static})", row)
    assert is_among("206", ["static", "size"], row)
    assert numbers("`--x=3` 2.1M, enwik8, 20 of 4,682 (0.5), -1.2 [9](a/8.md)") == [
        *("20", "4,682", "0.5", "-1.2", "9")
    ]
    assert numbers("31ms, 1.3x, 206MB, 2.5 s, 12L, 1.3xl") == ["31", "1.3", "206", "2.5"]
