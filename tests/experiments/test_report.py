"""Tests the program that writes a report, as a user starts it."""

import pytest

from support import programs, recorded_run

pytestmark = pytest.mark.full


def test_it_writes_one_file_and_prints_its_path(tmp_path):
    for seed in (1, 2):
        recorded_run.make(tmp_path / "sweep" / f"seed={seed}", seed=seed)
    out = tmp_path / "new" / "page.html"
    code, printed, errors = programs.run("experiments.report", tmp_path / "sweep", f"--out={out}")
    assert (code, errors) == (0, "") and str(out) in printed and "2 runs" in printed
    assert out.read_text().startswith("<!doctype html>")
