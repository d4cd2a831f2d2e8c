"""Tests that runs are read as rows: ensemble members, names, damage, and means over seeds."""

import dataclasses
import json
import math

import pytest

from support import recorded_run
from txl_jax.metrics import Measure
from txl_jax.runs.records import markdown, means, read_runs


@pytest.mark.full
def test_members_of_an_ensemble_are_runs(tmp_path):
    members = [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.001}]
    folder = recorded_run.make(tmp_path / "both", member_settings=members)
    runs = read_runs([str(folder)])
    assert [run.name for run in runs] == ["seed=1", "seed=2+learning_rate=0.001"]
    assert [run.config.seed for run in runs] == [1, 2]
    results = json.loads((folder / "results.json").read_text())
    for run in runs:
        assert run.row([])["test"] == pytest.approx(results["members"][run.name]["test"]["perplexity"])
        assert {record["member"] for record in run.records} == {run.name}
    runs = read_runs([str(folder), str(recorded_run.make(tmp_path / "own"))])
    assert [run.name for run in runs] == ["both: seed=1", "both: seed=2+learning_rate=0.001", "own"]


@pytest.mark.full
def test_a_folder_of_runs_and_folders_of_the_same_name(tmp_path):
    for name in ("b", "a"):
        recorded_run.make(tmp_path / "sweep" / name, seed=ord(name))
    (tmp_path / "sweep" / "results.csv").write_text("")
    assert [run.name for run in read_runs([str(tmp_path / "sweep"), str(tmp_path / "sweep" / "a")])] == ["a", "b"]
    paths = [str(tmp_path / "sweep" / "a"), str(recorded_run.make(tmp_path / "other" / "a"))]
    assert [run.name for run in read_runs(paths)] == paths


def test_a_run_that_diverged_says_so_and_its_scores_are_infinite(tmp_path):
    folder = recorded_run.make(tmp_path / "wild")
    results = json.loads((folder / "results.json").read_text())
    for split, loss in (("best_valid", 20.8), ("test", 2154.0)):  # exp(20.8) is 1.1e9, and exp(2154) no number.
        results[split]["loss"] = loss
    (folder / "results.json").write_text(json.dumps(results))
    [run] = read_runs([str(folder)])
    row = run.row([])
    assert (row["state"], row["best_valid"], row["test"]) == ("diverged", math.inf, math.inf)
    assert "| ppl >1e9 | ppl >1e9 |" in list(markdown([], [row]))[2]
    assert dataclasses.replace(run, measure=Measure.BPC).row([])["best_valid"] == math.inf


def test_means_leave_out_what_has_not_finished_or_diverged():
    rows = [
        {"lr": 1, "seed": 1, "state": "finished", "measure": "ppl", "best_valid": 10.0, "test": 12.0},
        {"lr": 1, "seed": 2, "state": "finished", "measure": "ppl", "best_valid": 14.0, "test": 13.0},
        {"lr": 2, "seed": 1, "state": "stopped after step 3", "measure": "ppl", "best_valid": 1.0},
        {"lr": 2, "seed": 2, "state": "finished", "measure": "ppl", "best_valid": 5.0, "test": 6.0},
        {"lr": 2, "seed": 3, "state": "finished", "measure": "ppl", "best_valid": math.inf, "test": math.nan},
    ]
    first, second = means(["lr", "seed"], rows)
    assert (first["lr"], first["best_valid"], first["test"], first["seeds"]) == (1, 12.0, 12.5, 2)
    assert first["best_valid_deviation"] == pytest.approx(math.sqrt(8))
    assert (second["best_valid"], second["test"]) == (5.0, 6.0) and "best_valid_deviation" not in second
    lines = list(markdown(["lr", "seed"], [{"run": f"r|{i}"} | row for i, row in enumerate(rows)]))
    assert lines[2] == "| r\\|0 | 1 | 1 | ppl 10.00 | ppl 12.00 |  |  | finished |"
    assert lines[-2] == "| 1 | ppl 12.00 ± 2.83 | ppl 12.50 ± 0.71 | 2 |"
    assert means(["lr", "seed"], rows[1:3]) == []
