"""Tests the program that compares runs, as a user starts it: its tables, its files and the lines of
its figure.
"""

import csv
import json
import os
import re
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


def records_of(folder, kind):
    """Returns the records of a run's metrics of one kind."""
    return [record for record in read_metrics(folder) if record["kind"] == kind]


def perplexities(folder, kind):
    """Returns the perplexity of each record, in a list, by step."""
    return {record["step"]: [record["perplexity"]] for record in records_of(folder, kind)}


@pytest.mark.full
def test_the_numbers_of_a_run_are_those_of_its_files(tmp_path):
    """A finished run of 1,000 steps. Its throughput is the median of its records."""
    folder = recorded_run.make(tmp_path / "mine")
    out = tmp_path / "new" / "out"

    code, printed, errors = programs.run("experiments.report", folder, f"--out={out}")

    assert (code, errors) == (0, "")
    assert f"{out / 'report.md'}: 1 run\n" in printed
    results = json.loads((folder / "results.json").read_text())
    valid = results["best_valid"]["perplexity"]
    test = results["test"]["perplexity"]
    rates = [record["tokens_per_second"] for record in records_of(folder, "train")]
    rate = statistics.median(rates)
    text = (out / "report.md").read_text()
    assert f"| mine | {valid:.2f} | {test:.2f} | 1000 | {rate:,.0f} | 0:" in text
    assert text[:100] in printed, "the page is printed too"
    assert "![Learning curves](report.png)" in text
    assert re.search(rf"(?m)^figure +{re.escape(str(out / 'report.png'))}$", printed)

    with open(out / "report.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert float(row["test"]) == pytest.approx(test)
    assert float(row["tokens_per_second"]) == rate

    lines = report.learning_curves([], read_runs([str(folder)]))
    assert lines["train"] == perplexities(folder, "train")
    assert lines["valid"] == perplexities(folder, "valid")


@pytest.mark.full
def test_runs_of_several_seeds_are_one_line_over_the_steps_that_all_have(tmp_path):
    # None stands for a finished run. Only one learning rate has several seeds.
    for seed, rate, done in ((1, 0.001, None), (2, 0.001, 700), (3, 0.001, 0), (1, 0.002, None)):
        recorded_run.make(
            tmp_path / f"{rate}+{seed}", seed=seed, optimizer__learning_rate=rate, done=done
        )
    runs = read_runs([str(tmp_path)])

    lines = report.learning_curves(swept_settings(runs), runs)

    assert list(lines) == ["learning_rate 0.001, mean of 2 seeds", "0.002+1"]
    # The second run has done 700 steps, with an evaluation every 200. The third has no scores, so
    # it does not count.
    first = dict(runs[0].scores("valid"))
    second = dict(runs[1].scores("valid"))
    assert lines["learning_rate 0.001, mean of 2 seeds"] == {
        200: [first[200], second[200]],
        400: [first[400], second[400]],
        600: [first[600], second[600]],
    }

    code, printed, err = programs.run("experiments.report", tmp_path)
    assert code == 0, err
    assert "| 0.001+2 | 2 | 0.001 | " in printed
    assert "| 700 of 1,000 training steps |" in printed
    assert "| 0.001+3 | 3 | 0.001 |  |  | 0 |  |  | 0 of 1,000 training steps |" in printed


def test_the_figure_has_the_means_of_the_best_lines_and_their_deviations(monkeypatch):
    drawn = {}

    def curves(values, path, **options):
        drawn.update(options, values=values)

    monkeypatch.setattr(plots, "can_draw", lambda: True)
    monkeypatch.setattr(plots, "curves", curves)
    # Perplexities by step, of nine lines. One has two seeds, and one is too much for the figure.
    lines = {"worst": {1: [99.0]}, "mean": {1: [3.0, 5.0]}}
    means = {"mean": {1: 4.0}}
    for number in range(7):
        lines[f"{number}"] = {1: [9.0], 2: [number]}
        means[f"{number}"] = {1: 9.0, 2: number}

    assert report._draw(lines, Measure.PPL, "report.png")

    assert drawn["values"] == means
    assert drawn["deviations"] == {"mean": {1: pytest.approx(2**0.5)}}
    assert drawn["log"]
    assert drawn["ylabel"].split(", ") == ["validation", "perplexity"]
    assert drawn["title"].endswith("the best 8 of 9")

    # The figure of a single run has training scores too.
    assert report._draw({"train": {1: [2.0]}, "valid": {1: [3.0]}}, Measure.PPL, "report.png")
    assert drawn["ylabel"] == "perplexity"


@pytest.mark.full
@pytest.mark.parametrize(("done", "reason"), [(None, "matplotlib"), (0, "no scores")])
def test_without_a_figure_the_tables_are_written(tmp_path, monkeypatch, done, reason):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = recorded_run.make(tmp_path / "a", done=done)

    code, printed, err = programs.run("experiments.report", folder, f"--out={tmp_path}")

    assert code == 0, err
    assert f"no figure: {reason}" in printed
    assert not (tmp_path / "report.png").exists()
    assert "png" not in (tmp_path / "report.md").read_text()


@pytest.mark.full
def test_runs_of_two_measures_are_compared_by_bytes(tmp_path, monkeypatch):
    def make(name, bits):
        """Makes a run whose records also have these measures."""
        with monkeypatch.context() as patch:
            patch.setattr(recorded_run, "_measures", lambda rng: measures(rng) | bits)
            return recorded_run.make(tmp_path / name)

    measures = recorded_run._measures
    words = make("words", {"approximate_bits_per_byte": 5.0})
    # The second run's tokens are bytes, so its bits per byte are exact.
    monkeypatch.setattr(recorded_run, "VOCABULARY", ByteVocabulary(bytes(range(256))))
    of_bytes = make("bytes", {"bits_per_byte": 2.0})

    code, printed, err = programs.run(
        "experiments.report", words, of_bytes, f"--out={tmp_path / 'out'}"
    )

    assert code == 0, err
    heading, _, first, second = (line.split(" | ") for line in printed.splitlines()[:4])
    approximate = heading.index("approximate bits per byte")
    exact = heading.index("bits per byte")
    assert (first[approximate], first[exact]) == ("5.0000", "")
    assert (second[approximate], second[exact]) == ("", "2.0000")
    assert "no figure" in printed
    assert sorted(os.listdir(tmp_path / "out")) == ["report.csv", "report.md"]
