"""Tests two runs in one workdir: one of them trains, and the other is refused in one sentence and touches nothing."""

import pytest

from support.faults import assert_equal_runs, assert_one_sentence, finished


def contents(folder):
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_the_second_is_refused_while_the_first_starts(place, undisturbed):
    go_on, workdir = place.folder / "go-on", place.workdir("two")
    first = place.train("two", fault="pause", at="open */run/log.txt", go_on=str(go_on))
    first.wait_for("paused")
    before = contents(workdir)
    second = place.train("two").end()
    assert second.code == 1
    assert_one_sentence(second.err, first.pid, workdir, "--workdir")
    assert contents(workdir) == before
    go_on.touch()
    finished(first)
    assert_equal_runs(workdir, undisturbed)
