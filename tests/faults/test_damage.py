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


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def resumed_from_12(name, place, undisturbed):
    """The output of a run that ends as if undisturbed. It names the damaged checkpoint and the step before."""
    out = finished(place.train(name)).out
    assert f"{place.workdir(name)}/checkpoints/latest/18" in out and re.search(r"resum\w+\D*\b12\b", out)
    assert_equal_runs(place.workdir(name), undisturbed)
    return out


def test_a_flipped_bit_in_any_file(copy, killed, place, undisturbed):
    newest = killed / "checkpoints" / "latest" / "18"
    files = sorted(path.relative_to(killed) for path in newest.rglob("*") if path.is_file())
    assert len(files) > 8
    for n, file in enumerate(files):
        flip(copy(f"flipped-{n}") / file)
        out = resumed_from_12(f"flipped-{n}", place, undisturbed)
        assert file.name == "digests.json" or str((killed / file).relative_to(newest)) in out


def cut(newest):
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def emptied(newest):
    shutil.rmtree(newest)
    newest.mkdir()


def without_digests(newest):
    (newest / "digests.json").unlink()


@pytest.mark.parametrize("damage", [cut, emptied, without_digests])
def test_other_damage(damage, copy, place, undisturbed):
    damage(copy(damage.__name__) / "checkpoints" / "latest" / "18")
    resumed_from_12(damage.__name__, place, undisturbed)


def test_damage_to_all(copy, place):
    workdir = copy("all")
    for step in ("12", "18"):
        cut(workdir / "checkpoints" / "latest" / step)
    ended = place.train("all").end()
    assert ended.code == 1
    assert_one_sentence(ended.err, workdir / "checkpoints/latest", "18", "12")
