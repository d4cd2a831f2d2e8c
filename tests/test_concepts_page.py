"""Tests of docs/concepts.md: its Python code, its pictures, and the numbers in its tables."""

import csv
import re
import runpy

import pytest

import txl_jax
from support import ROOT
from support.pages import execute, python_blocks

PAGE = (ROOT / "docs" / "concepts.md").read_text()
FIGURES = ROOT / "docs" / "figures" / "concepts.py"


def rows_of(file_name):
    """Returns the rows of a CSV file in benchmarks as dicts."""
    with (ROOT / "benchmarks" / file_name).open(newline="") as file:
        return list(csv.DictReader(file))


def table_rows(first_cell):
    """Yields the cells of the page's table rows whose first cell matches."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(first_cell, cells[0]):
            yield cells


@pytest.mark.full
def test_the_page_runs_in_one_piece():
    """Its blocks assert what they show."""
    blocks = python_blocks("docs/concepts.md")
    assert len(blocks) == 3
    execute(blocks)


def test_the_pictures_are_the_ones_that_the_script_draws(monkeypatch, tmp_path):
    """And the page shows all of them, in both themes."""
    monkeypatch.syspath_prepend(FIGURES.parent)  # As for a script that is started.
    runpy.run_path(str(FIGURES))["draw"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == 12
    assert sorted(re.findall(r'"(concepts-[\w-]+\.svg)"', PAGE)) == drawn
    for name in drawn:
        assert (ROOT / "docs" / name).read_text() == (tmp_path / name).read_text(), name


def test_published_lengths_are_the_flagfiles():
    rows = list(table_rows(r"`(enwik8|wt103|lm1b)_\w+`"))
    assert len(rows) == 5
    for name, training, evaluation, clamp_len in rows:
        config = txl_jax.preset(name.strip("`"))
        assert training == str(config.train.segment_len) == str(config.train.mem_len)
        assert evaluation == f"{config.eval.segment_len}, {config.eval.mem_len:,}"
        expected = config.eval.clamp_len
        assert clamp_len == ("none" if expected is None else f"{expected:,}")
        assert config.eval.same_length
        assert not config.train.same_length


def test_the_converted_perplexity_is_the_measured_one():
    [row] = [row for row in rows_of("training.csv") if "ptb_small" in row["command"]]
    assert f"math.log({row['test'].removesuffix(' ppl')})" in PAGE


def test_times_of_the_softmax_are_the_measured_ones():
    """The page rounds to two digits after the point."""
    times = {}
    for row in rows_of("cutoffs.csv"):
        name = (row["V"], row["part"], row["cutoffs"].replace(" ", ","), row["div_val"])
        times[name] = float(row["us per token"])
    vocab_size = full = ""
    rows = list(table_rows(r"(\d[\d,]*)?"))
    assert len(rows) == 7
    for size, multiple, cutoffs, plain, smaller in rows:
        if size:
            vocab_size = size.replace(",", "")
            full = times[vocab_size, "softmax", "", "1"]
            assert multiple == f"{full / times[vocab_size, 'layers', '', '1']:.2f}"
        for div_val, fraction in (("1", plain), ("4", smaller)):
            measured = times[vocab_size, "softmax", cutoffs.strip("`"), div_val] / full
            assert fraction == f"{measured:.2f}"
