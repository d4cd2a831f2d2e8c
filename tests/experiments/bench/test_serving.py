"""Tests the benchmark of serving on a tiny model."""

import types

import pytest

from experiments.bench import serving
from experiments.bench.serving import DEFAULTS, Plan
from txl_jax.config import config_tree


@pytest.mark.full
def test_rows_and_one_row_are_timed(capsys):
    small = {"model.n_layer": 1, "model.d_model": 8, "model.n_head": 2, "model.d_head": 4, "model.d_inner": 8}
    config = config_tree.replace(DEFAULTS, small | {"eval.mem_len": 9, "model.cutoffs": (5, 9)})
    serving.run(Plan(rows=3, calls=2), types.SimpleNamespace(config=lambda: config))
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    assert [line[1] for line in table] == ["rows", "3", "1"]
    assert all(float(cell.replace(",", "")) > 0 for line in table[1:] for cell in line[2:5])
    assert lines[-1].startswith("3 rows: ") and lines[-1].endswith("one request at a time")
