"""Tests the program that writes a report, as a user starts it."""

import re
import subprocess

import pytest

from support import ROOT, programs, recorded_run


def report(*words, cwd=ROOT):
    return subprocess.run(
        programs.command("experiments.report", *words), cwd=cwd, text=True, capture_output=True, check=False
    )


def test_it_writes_one_file_and_prints_its_path(tmp_path):
    for seed in (1, 2):
        recorded_run.make(tmp_path / "sweep" / f"seed={seed}", seed=seed)
    out = tmp_path / "new" / "page.html"
    done = report(tmp_path / "sweep", f"--out={out}")
    assert (done.returncode, done.stderr) == (0, "") and str(out) in done.stdout and "2 runs" in done.stdout
    assert out.read_text().startswith("<!doctype html>")
    without_tags = re.sub(r"</?span>", "", out.read_text())
    assert f"python -m experiments.report {tmp_path / 'sweep'} --out={out}" in without_tags


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ([], 1, "python -m experiments.report"),
        (["nowhere"], 1, "nowhere"),
        (["--ot=a.html", "nowhere"], 2, "did you mean out?"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, words, code, expected):
    done = report(*words)
    assert done.returncode == code and done.stderr.startswith("error: ") and expected in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
