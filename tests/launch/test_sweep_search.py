"""Tests random search, successive halving, and tables over seeds and over runs of other machines."""

import csv
import dataclasses
import json
import math
import re
import signal
import sys

import numpy as np
import pytest

from launch import sweep, sweep_draws, sweep_file, sweep_halving, sweep_means
from support import recorded_run
from txl_jax.config import tree as config_tree
from txl_jax.data.tokens.byte_vocabulary import ByteVocabulary
from txl_jax.jobs.workdir import TextInfo
from txl_jax.run_report.run_records import read_runs


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


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[random]\nsamples = 3\n", r"no range"),
        ("[random]\nsamples = 0\nmodel.dropout.rate = { uniform = [0, 0.5] }\n", r"samples = 0"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { normal = [0, 0.5] }\n", r"rate\.normal"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { uniform = [0.5, 0] }\n", r"\[0\.5, 0\].*lower"),
        ("[random]\nsamples = 2\nmodel.dropout.rate = { log = [0, 0.5] }\n", r"above 0"),
        (
            "[random]\nsamples = 2\nmodel.n_layer = { uniform = [1, 9] }\n[grid]\nmodel.n_layer = [2]\n",
            r"n_layer.*grid.*random",
        ),
        ("[grid]\nseed = [1]\n[halving]\nfirst = 150\n", r"first = 150.*eval_every.*\b100\b"),
        ("[grid]\ntrain.steps = [1200, 600]\n[halving]\nfirst = 300\n", r"600, 1200"),
        ("[grid]\nseed = [1]\n[halving]\nfirst = 300\nfactor = 1\n", r"factor = 1"),
        ("[grid]\ntrain.patience = [2]\n[halving]\nfirst = 300\n", r"train\.patience is 2"),
    ],
)
def test_mistakes_are_named(write, capsys, text, pattern):
    path = write(text)
    assert sweep.main(["sweep", str(path), f"--out={path.parent / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and re.search(pattern, err), err
    assert not (path.parent / "out").exists()


# Successive halving

HALVING = """
[grid]
optimizer.learning_rate = [0.001, 0.002, 0.003, 0.004]
seed = [1, 2]
[halving]
first = 100
factor = 2
"""
# A run's loss at each rung: 0.003 is the best at first, 0.002 later; its second seed is bad at first.
LOSSES = {0.001: (3.0, 3.0, 3.0), 0.002: (2.0, 1.0, 1.0), 0.003: (1.0, 2.0, 2.0), 0.004: (4.0, 4.0, 4.0)}
SCRIPT = """
import json, os, pathlib, re, signal, sys
folder = pathlib.Path(sys.argv[1])
rung = int(sys.argv[2].removeprefix("--stop_after=")) if len(sys.argv) > 2 else 1200
with open(folder.parent / "calls.txt", "a") as calls:
    calls.write(f"{folder.name} {rung}\\n")
if len((folder.parent / "calls.txt").read_text().splitlines()) == STOP_AT:
    os.kill(os.getppid(), signal.SIGTERM)
    sys.exit(143)
if folder.name == FAILS:
    sys.exit("error: it diverged")
rate, seed = re.fullmatch(r"learning_rate=([.0-9]+)[+]seed=(\\d)", folder.name).groups()
loss = LOSSES[float(rate)][{100: 0, 200: 1}.get(rung, 2)] + 0.1 * int(seed)
with open(folder / "metrics.jsonl", "a") as metrics:
    metrics.write(json.dumps({"kind": "valid", "step": rung, "loss": loss, "bpc": loss, "perplexity": 9.0}) + "\\n")
if rung == 1200:
    score = {"step": rung, "loss": loss}
    results = {"steps": 1200, "eval": json.loads(EVAL), "best_valid": score, "test": score}
    (folder / "results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def halving(write):
    """A sweep whose runs only write records: `halving(stop_at=5)` stops it in its fifth process."""
    path = write(HALVING)
    found = read(path)
    for run in found.runs:
        text = TextInfo("text", "own text", "d" * 64, ByteVocabulary(bytes(range(256))))
        run.workdir.create().record(run.config, text)

    def make(*, stop_at=0, fails=""):
        evaluation = json.dumps(config_tree.to_dict(found.runs[0].config.eval))
        script = f"LOSSES, STOP_AT, FAILS, EVAL = {LOSSES}, {stop_at}, {fails!r}, {evaluation!r}\n{SCRIPT}"
        commands = [(sys.executable, "-c", script, str(run.folder)) for run in found.runs]
        runs = [dataclasses.replace(run, command=words) for run, words in zip(found.runs, commands, strict=True)]
        return dataclasses.replace(found, runs=tuple(runs))

    return make


def trained(found):
    return (found.runs[0].folder.parent / "calls.txt").read_text().splitlines()


def named(*rates):
    return [f"learning_rate={rate}+seed={seed}" for rate in rates for seed in (1, 2)]


# At 100 the better half of four goes on, at 200 the better one of two, which goes on to the end.
ALL = [
    *(f"{name} 100" for name in named(0.001, 0.002, 0.003, 0.004)),
    *(f"{name} 200" for name in named(0.002, 0.003)),
    *(f"{name} 1200" for name in named(0.002)),
]


@pytest.mark.full
def test_the_best_go_on_and_are_trained_to_the_end(halving, capsys):
    found = halving()
    assert found.rungs == (100, 200, 400, 800)
    pool = sweep._Pool(found, slots=[None])
    pool.run()
    assert trained(found) == ALL and not pool.signal_number
    stage = sweep_halving.stage(found)
    assert stage.rung is None and not stage.waiting and [run.name for run in stage.runs] == named(0.002)
    assert stage.dropped == dict.fromkeys(named(0.001, 0.004), 100) | dict.fromkeys(named(0.003), 200)
    out = found.runs[0].folder.parent
    assert sweep.sweep_table.write(found, out) == 0
    with open(out / "results.csv", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert rows[named(0.003)[0]]["state"] == "dropped after step 200"
    assert float(rows[named(0.003)[0]]["best_valid"]) == pytest.approx(1.1)
    assert rows[named(0.002)[0]]["state"] == "finished"
    with open(out / "means.csv", newline="") as file:
        means = {row["optimizer.learning_rate"]: row for row in csv.DictReader(file)}
    assert float(means["0.002"]["test"]) == pytest.approx(1.15 / math.log(2)) and means["0.002"]["seeds"] == "2"
    assert float(means["0.002"]["test_deviation"]) == pytest.approx(0.1 / math.sqrt(2) / math.log(2))
    assert "±" in capsys.readouterr().out


@pytest.mark.full
def test_a_sweep_that_is_stopped_comes_to_the_same_rungs_and_decisions(halving):
    stop_at = 8
    found = halving(stop_at=stop_at)
    pool = sweep._Pool(found, slots=[None])
    pool.run()
    assert pool.signal_number == signal.SIGTERM and len(trained(found)) == stop_at
    sweep._Pool(halving(), slots=[None]).run()
    assert trained(found) == ALL[:stop_at] + ALL[stop_at - 1 :]
    assert not sweep_halving.stage(found).waiting


@pytest.mark.full
def test_runs_at_a_time_change_no_decision(halving):
    found = halving()
    sweep._Pool(found, slots=[None, None, None]).run()
    assert sorted(trained(found)) == sorted(ALL)


@pytest.mark.full
def test_a_failed_run_counts_as_the_worst(halving, capsys):
    found = halving(fails=named(0.003)[1])
    sweep._Pool(found, slots=[None]).run()
    dropped = sweep_halving.stage(found, failed=[named(0.003)[1]]).dropped
    assert dropped == dict.fromkeys(named(0.003, 0.004), 100) | dict.fromkeys(named(0.001), 200)
    assert trained(found).count(f"{named(0.003)[1]} 100") == 1
    assert sweep.sweep_table.write(found, found.runs[0].folder.parent) == 1
    out = capsys.readouterr().out
    assert out.count("| failed: error: it diverged |") == 1 and out.count("| dropped after step 100 |") == 3


# Tables


def test_means_leave_out_what_has_not_finished_or_diverged():
    rows = [
        {"lr": 1, "seed": 1, "state": "finished", "measure": "ppl", "best_valid": 10.0, "test": 12.0},
        {"lr": 1, "seed": 2, "state": "finished", "measure": "ppl", "best_valid": 14.0, "test": 13.0},
        {"lr": 2, "seed": 1, "state": "stopped after step 3", "measure": "ppl", "best_valid": 1.0},
        {"lr": 2, "seed": 2, "state": "finished", "measure": "ppl", "best_valid": 5.0, "test": 6.0},
        {"lr": 2, "seed": 3, "state": "finished", "measure": "ppl", "best_valid": math.inf, "test": math.nan},
    ]
    first, second = sweep_means.means(["lr", "seed"], rows)
    assert (first["best_valid"], first["test"], first["seeds"]) == (12.0, 12.5, 2)
    assert first["best_valid_deviation"] == pytest.approx(math.sqrt(8))
    assert (second["best_valid"], second["test"]) == (5.0, 6.0) and "best_valid_deviation" not in second
    assert list(sweep_means.markdown(["lr", "seed"], [first]))[-1] == "| 1 | ppl 12.00 ± 2.83 | ppl 12.50 ± 0.71 | 2 |"
    assert sweep_means.means(["lr", "seed"], rows[1:3]) == []


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
