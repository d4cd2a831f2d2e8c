"""Tests damaged checkpoints of a run: it logs that, resumes from the step before, and trains to the same numbers."""

import re
import shutil

import pytest

from support.faults import KILLED, NIGHTLY, assert_equal_runs, finished

pytestmark = NIGHTLY


@pytest.fixture(scope="module")
def killed(place, undisturbed):
    """A workdir with the checkpoints of steps 12 and 18."""
    assert place.train("killed", fault="kill", at="os.rename *latest/24.orbax-checkpoint-tmp*").end().code == KILLED
    assert sorted(path.name for path in (place.workdir("killed") / "checkpoints" / "latest").glob("??")) == ["12", "18"]
    return place.workdir("killed")


def copy(killed, place, name):
    """Makes another run of a killed one; returns its workdir."""
    shutil.copytree(killed.parent, place.folder / name)
    return place.workdir(name)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def assert_resumed_from_12(out, workdir):
    """The damaged checkpoint is named, and the step that the run goes on from."""
    assert str(workdir / "checkpoints/latest/18") in out and re.search(r"resum\w+\D*\b12\b", out)


def test_a_flipped_bit_in_any_file(killed, place, undisturbed):
    newest = killed / "checkpoints" / "latest" / "18"
    files = sorted(path.relative_to(killed) for path in newest.rglob("*") if path.is_file())
    assert len(files) > 8
    for n, file in enumerate(files):
        workdir = copy(killed, place, f"flipped-{n}")
        flip(workdir / file)
        out = finished(place.train(f"flipped-{n}")).out
        assert_resumed_from_12(out, workdir)
        assert file.name == "digests.json" or str((killed / file).relative_to(newest)) in out
        assert_equal_runs(workdir, undisturbed)


def test_an_empty_folder(killed, place, undisturbed):
    workdir = copy(killed, place, "empty")
    newest = workdir / "checkpoints" / "latest" / "18"
    shutil.rmtree(newest)
    newest.mkdir()
    assert_resumed_from_12(finished(place.train("empty")).out, workdir)
    assert_equal_runs(workdir, undisturbed)
