"""Tests random search, and tables over seeds and over runs of other machines."""

import csv
import re

import numpy as np
import pytest

from launch import sweep, sweep_draws, sweep_file
from support import recorded_run
from txl_jax.runs.records import read_runs


def read(path):
    return sweep_file.read(path, path.parent / "out")


# Random search


def draw(samples=400, seed=0, **ranges):
    return sweep_draws.drawn({"samples": samples, "seed": seed} | ranges, sweep_file._flat)


def test_values_are_drawn_from_their_ranges():
    points = draw(
        optimizer={"learning_rate": {"log": [1e-4, 1e-2]}, "warmup_steps": {"log": [10, 1000]}},
        model={"dropout": {"rate": {"uniform": [0, 0.3]}}, "n_layer": {"uniform": [2, 5]}},
    )
    values = {name: np.array([point[name] for point in points]) for name in points[0]}
    rate = values["optimizer.learning_rate"]
    assert 1e-4 <= rate.min() < 1.2e-4 and 0.8e-2 < rate.max() <= 1e-2
    np.testing.assert_allclose(np.quantile(rate, [0.25, 0.5, 0.75]), [10**-3.5, 1e-3, 10**-2.5], rtol=0.25)
    dropout = values["model.dropout.rate"]
    np.testing.assert_allclose(np.quantile(dropout, [0.25, 0.5, 0.75]), [0.075, 0.15, 0.225], atol=0.02)
    assert np.bincount(values["model.n_layer"])[2:].min() > 70 and set(values["model.n_layer"]) == {2, 3, 4, 5}
    assert values["optimizer.warmup_steps"].dtype == int and 70 < np.median(values["optimizer.warmup_steps"]) < 140
    assert abs(np.corrcoef(np.log(rate), dropout)[0, 1]) < 0.15
    assert all(len(re.sub(r"e.*|^0\.0*|\.", "", repr(value))) <= 4 for value in rate.tolist())


def test_draws_depend_on_their_seed_number_and_setting_alone():
    one = {"optimizer": {"learning_rate": {"log": [1e-4, 1e-2]}}}
    two = one | {"model": {"dropout": {"rate": {"uniform": [0, 0.3]}}}}
    rates = [point["optimizer.learning_rate"] for point in draw(5, **one)]
    assert [point["optimizer.learning_rate"] for point in draw(9, **two)][:5] == rates
    assert [point["optimizer.learning_rate"] for point in draw(5, seed=1, **one)] != rates


def test_equal_draws_are_one_run_and_each_goes_with_the_grid(write):
    path = write("[random]\nsamples = 30\nmodel.n_layer = { uniform = [1, 3] }\n[grid]\nseed = [1, 2]\n")
    runs = read(path).runs
    assert sorted(run.name for run in runs) == [f"n_layer={n}+seed={seed}" for n in (1, 2, 3) for seed in (1, 2)]
    assert {run.config.model.n_layer for run in runs} == {1, 2, 3}


# Tables


def test_a_table_of_any_runs(tmp_path, capsys):
    for seed in (1, 2):
        recorded_run.make(tmp_path / "slurm" / f"job-{seed}", seed=seed)
    recorded_run.make(tmp_path / "half", seed=3, done=500)
    words = ["sweep", "--table", str(tmp_path / "slurm"), str(tmp_path / "half"), f"--out={tmp_path / 'tables'}"]
    assert sweep.main(words) == 0
    runs = {run.name: run for run in read_runs([str(tmp_path / "slurm"), str(tmp_path / "half")])}
    with open(tmp_path / "tables" / "results.csv", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["job-1", "job-2", "half"] and rows["half"]["state"] == "500 of 1,000 updates"
    for name in ("job-1", "job-2"):
        assert float(rows[name]["test"]) == pytest.approx(runs[name].test)
    assert "± " in capsys.readouterr().out and (tmp_path / "tables" / "means.csv").exists()
    assert sweep.main(["sweep", "--table", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
