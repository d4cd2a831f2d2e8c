"""Tests the number of the format: files without one, newer ones, and changes that must be refused."""

import json

import jax.numpy as jnp
import pytest

from txl_jax.errors import CheckpointError
from txl_jax.runtime import format as file_format
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.format import CHANGES, FORMAT, Change, changes_since, read_format, refusal
from txl_jax.runtime.integrity import write_digests

pytestmark = pytest.mark.full


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None, True, [2]])
def test_what_is_no_number_is_named(value):
    with pytest.raises(ValueError, match=r"format is"):
        read_format({"format": value})


def test_all_known_formats_are_read_and_a_newer_one_is_named():
    assert list(CHANGES) == list(range(2, FORMAT + 1)) and list(changes_since(1)) == [2]
    assert (read_format({}), read_format({"format": 99})) == (1, 99)
    assert [refusal(number) for number in range(1, FORMAT + 1)] == [None] * FORMAT
    assert f"format {FORMAT + 1}" in refusal(FORMAT + 1) and f"up to {FORMAT};" in refusal(FORMAT + 1)


def test_a_change_of_what_parameters_mean_refuses_older_formats(monkeypatch):
    later = CHANGES | {3: Change("parameters of heads come in another order", keeps_meaning=False)}
    monkeypatch.setattr(file_format, "CHANGES", later)
    monkeypatch.setattr(file_format, "FORMAT", 3)
    for number in (1, 2):
        assert f"has format {number} and since format 3 parameters of heads" in refusal(number)
    assert refusal(3) is None


# Checkpoints

STATE = {"w": jnp.arange(3.0)}


@pytest.fixture
def saved(tmp_path):
    """A folder with steps 1 and 2."""
    with Checkpointer(tmp_path, keep=2, log=print) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {"loss": 0.5})
    return tmp_path


def number_as(folder, step, value):
    """Rewrites the number of a step, whole with its digests; None takes it away."""
    [path] = [each for each in (folder / str(step) / "notes").iterdir() if each.name == "metadata"]
    notes = json.loads(path.read_text())
    assert notes["format"] == FORMAT
    path.write_text(json.dumps({"loss": notes["loss"]} | ({} if value is None else {"format": value})))
    (folder / str(step) / "digests.json").unlink()
    write_digests(folder / str(step))


@pytest.mark.parametrize("value", [None, 1])
def test_checkpoints_of_known_formats_are_restored_without_the_number_in_their_notes(saved, value):
    number_as(saved, 2, value)
    with Checkpointer(saved, keep=2, log=print) as checkpoints:
        step, state, notes = checkpoints.restore(STATE)
        assert (step, notes, checkpoints.notes(2)) == (2, {"loss": 0.5}, {"loss": 0.5})
    assert state["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("verified", [True, False])
def test_a_newer_checkpoint_is_refused_in_one_sentence_and_stays(saved, verified):
    """An older step would be restored if it counted as damaged, and what came after it would be lost."""
    number_as(saved, 2, FORMAT + 1)
    if not verified:
        for step in ("1", "2"):
            (saved / step / "digests.json").unlink()
    before = sorted(path for path in saved.rglob("*"))
    with Checkpointer(saved, keep=2, log=print) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore({"other": STATE["w"]})  # Of another shape too, which newer formats may well have.
    assert f"{saved}/2 has format {FORMAT + 1}" in str(error.value) and f"up to {FORMAT};" in str(error.value)
    assert "\n" not in str(error.value) and sorted(path for path in saved.rglob("*")) == before


def test_notes_that_are_no_format_are_damage_and_an_older_step_is_taken(saved):
    [path] = [each for each in (saved / "2" / "notes").iterdir() if each.name == "metadata"]
    path.write_text("{")
    (saved / "2" / "digests.json").unlink()
    write_digests(saved / "2")
    lines = []
    with Checkpointer(saved, keep=2, log=lines.append) as checkpoints:
        assert checkpoints.restore(STATE)[0] == 1
    assert len(lines) == 1 and f"{saved}/2 is skipped" in lines[0]
