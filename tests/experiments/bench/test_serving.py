"""Tests the benchmark of serving on a tiny model."""

import pytest

from experiments.bench.serving import DEFAULTS, Plan, benchmark
from txl_jax.config import settings as config_tree


@pytest.mark.full
def test_rows_and_one_row_are_timed(capsys):
    small = {"model.n_layer": 1, "model.d_model": 8, "model.n_head": 2, "model.d_head": 4, "model.d_inner": 8}
    config = config_tree.replace(DEFAULTS, small | {"eval.mem_len": 9, "model.cutoffs": (5, 9)})
    speedup = benchmark(config, Plan(rows=3, calls=2, vocab_size=13))
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in table] == ["rows", "3", "1"]
    assert lines[-1].endswith("one request at a time") and f"{speedup:.2f} times" in lines[-1]
