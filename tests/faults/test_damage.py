"""Tests damaged checkpoints of a run: it logs that, resumes from the step before, and trains to the same numbers."""

import re
import shutil

import pytest

from support.faults import KILLED, NIGHTLY, assert_equal_runs, assert_one_sentence, finished

pytestmark = NIGHTLY


@pytest.fixture(scope="module")
def killed(place, undisturbed):
    """A workdir with the checkpoints of steps 12 and 18."""
    assert place.train("killed", fault="kill", at="os.rename *latest/24.orbax-checkpoint-tmp*").end().code == KILLED
    assert sorted(path.name for path in (place.workdir("killed") / "checkpoints" / "latest").glob("??")) == ["12", "18"]
    return place.workdir("killed")


@pytest.fixture
def copy(killed, place):
    """Makes another run of it, by its name."""
    return lambda name: shutil.copytree(killed.parent, place.folder / name) / killed.name


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(newest):
    data = bytearray(largest(newest).read_bytes())
    data[len(data) // 2] ^= 8
    largest(newest).write_bytes(data)


def cut(newest):
    largest(newest).write_bytes(largest(newest).read_bytes()[:-1])


def emptied(newest):
    shutil.rmtree(newest)
    newest.mkdir()


def without_digests(newest):
    (newest / "digests.json").unlink()


@pytest.mark.parametrize("damage", [flip, cut, emptied, without_digests])
def test_damage_to_the_latest(damage, copy, place, undisturbed):
    """The damaged checkpoint is named, and the step that the run resumes from."""
    workdir = copy(damage.__name__)
    damage(workdir / "checkpoints" / "latest" / "18")
    out = finished(place.train(damage.__name__)).out
    assert str(workdir / "checkpoints/latest/18") in out and re.search(r"resum\w+\D*\b12\b", out)
    assert_equal_runs(workdir, undisturbed)


def test_damage_to_all(copy, place):
    workdir = copy("all")
    for step in ("12", "18"):
        cut(workdir / "checkpoints" / "latest" / step)
    ended = place.train("all").end()
    assert ended.code == 1
    assert_one_sentence(ended.err, workdir / "checkpoints/latest", "18", "12")
