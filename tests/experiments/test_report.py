"""Tests the program that compares runs, as a user starts it: its tables, its files and the lines of
its figure.
"""

import csv
import json
import os
import statistics
import sys

import pytest

from experiments import report
from support import programs, recorded_run
from txl_jax import plots
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.metrics import Measure
from txl_jax.runs.run_tables import read_runs, swept_settings
from txl_jax.runtime.log import read_metrics


@pytest.mark.full
def test_the_numbers_of_a_run_are_those_of_its_files(tmp_path):
    folder = recorded_run.make(tmp_path / "mine")
    code, printed, errors = programs.run(
        "experiments.report", folder, f"--out={tmp_path / 'new' / 'out'}"
    )
    assert (code, errors) == (
        0,
        "",
    ) and f"{tmp_path / 'new' / 'out' / 'report.md'}: 1 run\n" in printed
    results = json.loads((folder / "results.json").read_text())
    valid, test = (results[name]["perplexity"] for name in ("best_valid", "test"))
    rate = statistics.median(
        each["tokens_per_second"] for each in read_metrics(folder) if each["kind"] == "train"
    )
    text = (tmp_path / "new" / "out" / "report.md").read_text()
    assert (
        f"| mine | ppl {valid:.2f} | ppl {test:.2f} | 1000 | {rate:,.0f} | 0:" in text
        and text[:100] in printed
    )
    assert "![Learning curves](report.png)" in text
    with open(tmp_path / "new" / "out" / "report.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert float(row["test"]) == pytest.approx(test) and float(row["tokens_per_second"]) == rate
    lines = report.learning_curves([], read_runs([str(folder)]))
    for kind in ("train", "valid"):
        expected = {
            each["step"]: [each["perplexity"]]
            for each in read_metrics(folder)
            if each["kind"] == kind
        }
        assert lines[kind] == expected


@pytest.mark.full
def test_runs_of_several_seeds_are_one_line_over_the_steps_that_all_have(tmp_path):
    for seed, rate, done in ((1, 0.001, None), (2, 0.001, 700), (3, 0.001, 0), (1, 0.002, None)):
        recorded_run.make(
            tmp_path / f"{rate}+{seed}", seed=seed, optimizer__learning_rate=rate, done=done
        )
    runs = read_runs([str(tmp_path)])
    lines = report.learning_curves(swept_settings(runs), runs)
    assert list(lines) == ["learning_rate 0.001, mean of 2 seeds", "0.002+1"]
    expected = {
        step: [dict(run.scores("valid"))[step] for run in runs[:2]] for step in (200, 400, 600)
    }
    assert lines["learning_rate 0.001, mean of 2 seeds"] == expected
    code, printed, _ = programs.run("experiments.report", tmp_path)
    assert (
        code == 0
        and "| 0.001+2 | 2 | 0.001 | ppl" in printed
        and "| 700 of 1,000 training steps |" in printed
    )
    assert "| 0.001+3 | 3 | 0.001 |  |  | 0 |  |  | 0 of 1,000 training steps |" in printed


def test_the_figure_has_the_means_of_the_best_lines_and_their_deviations(monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "can_draw", lambda: True)
    monkeypatch.setattr(
        plots, "curves", lambda values, path, **rest: drawn.update(rest, values=values)
    )
    lines = {"worst": {1: [99.0]}, "mean": {1: [3.0, 5.0]}} | {
        f"{i}": {1: [9.0], 2: [i]} for i in range(7)
    }
    assert report._draw(lines, Measure.PPL, "report.png")
    assert drawn["values"] == {"mean": {1: 4.0}} | {f"{i}": {1: 9.0, 2: i} for i in range(7)}
    assert drawn["deviations"] == {"mean": {1: pytest.approx(2**0.5)}} and drawn["log"]
    assert drawn["title"].endswith("the best 8 of 9")


@pytest.mark.full
@pytest.mark.parametrize(("done", "reason"), [(None, "matplotlib"), (0, "no scores")])
def test_without_a_figure_the_tables_are_written(tmp_path, monkeypatch, done, reason):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = recorded_run.make(tmp_path / "a", done=done)
    code, printed, _ = programs.run("experiments.report", folder, f"--out={tmp_path}")
    assert (
        code == 0 and f"no figure: {reason}" in printed and not (tmp_path / "report.png").exists()
    )
    assert "png" not in (tmp_path / "report.md").read_text()


@pytest.mark.full
def test_runs_of_two_measures_are_compared_by_bytes(tmp_path, monkeypatch):
    measures, lengths = recorded_run._measures, {"approximate_bits_per_byte": 5.0}
    monkeypatch.setattr(recorded_run, "_measures", lambda rng: measures(rng) | lengths)
    words = recorded_run.make(tmp_path / "words")
    monkeypatch.setattr(recorded_run, "VOCABULARY", ByteVocabulary(bytes(range(256))))
    lengths = {"bits_per_byte": 2.0}
    paths = [words, recorded_run.make(tmp_path / "bytes")]
    code, printed, _ = programs.run("experiments.report", *paths, f"--out={tmp_path / 'out'}")
    heading, _, *rows = [line.split(" | ") for line in printed.splitlines()[:4]]
    found = [dict(zip(heading, row, strict=True)) for row in rows]
    columns = ("approximate bits per byte", "bits per byte")
    assert code == 0 and [[row[name] for name in columns] for row in found] == [
        ["5.0000", ""],
        ["", "2.0000"],
    ]
    assert "no figure" in printed and sorted(os.listdir(tmp_path / "out")) == [
        "report.csv",
        "report.md",
    ]
