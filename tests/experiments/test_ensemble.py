"""Tests of the program of ensembles: a resume needs only the workdir."""

import json

import pytest

from support import programs

MEMBERS = ("--ensemble_member=optimizer.learning_rate=0.01 seed=2", "--ensemble_member=seed=1")


@pytest.mark.full
def test_a_resume_takes_the_members_from_the_record(tmp_path):
    text, workdir = tmp_path / "text.txt", f"--workdir={tmp_path / 'run'}"
    text.write_bytes(b"abracadabra\n" * 100)
    task = ["--data.corpus=text", f"--data.file={text}", *programs.TINY, *programs.steps(2, every=2)]
    first = programs.run("experiments.ensemble", workdir, *task, *MEMBERS)
    again = programs.run("experiments.ensemble", workdir)
    results = json.loads((tmp_path / "run" / "results.json").read_bytes())
    assert (first[0], again[0]) == (0, 0), (first, again)
    assert results["members"].keys() == {"seed=2+learning_rate=0.01", "seed=1"}
