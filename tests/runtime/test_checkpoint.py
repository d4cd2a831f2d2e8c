"""Tests checkpoints: what is saved comes back bit for bit, and any damage ends in an older step or an error."""

import json
import logging
import re
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.checkpoints import abstract, assert_same, make_state, step_names
from txl_jax.errors import CheckpointError
from txl_jax.runtime import checkpoint
from txl_jax.runtime.checkpoint import DIGESTS, Checkpointer

# Orbax does not close its event loop when a restore fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def process_wide_hooks():
    filters = [[*logging.getLogger(name).filters] for name in ("absl", "asyncio")]
    return filters, [*warnings.filters], sys.unraisablehook


# Whole


def test_round_trip_is_bit_equal(open_checkpoints, lines):
    state = make_state(7)
    hooks = process_wide_hooks()
    with open_checkpoints() as checkpoints:
        assert checkpoints.latest_step() is None
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(7, state, {"loss": 0.5, "name": "run"})
    with open_checkpoints() as checkpoints:
        step, restored, notes = checkpoints.restore(abstract(state))
        assert (step, notes, checkpoints.latest_step()) == (7, {"loss": 0.5, "name": "run"}, 7)
        assert_same(restored, state)
        assert checkpoints.notes(7) == notes
        assert_same(checkpoints.restore(make_state(8))[1], state)  # Arrays serve as well as their shapes.
    assert lines == []
    assert process_wide_hooks() == hooks, "a library changes no filters and hooks of the process"


def test_restores_to_another_sharding(two_steps, open_checkpoints):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state())
    with open_checkpoints() as checkpoints:
        restored = checkpoints.restore(wanted)[1]
    assert restored["params"]["q"].sharding == sharding
    assert_same(restored, make_state(200))


def test_sweeping_removes_what_killed_runs_left_and_no_step(two_steps, open_checkpoints):
    for name in ("300.orbax-checkpoint-tmp", "50.deleted"):
        shutil.copytree(two_steps / "100", two_steps / name)
    (two_steps / "200").rename(two_steps / "200.replaced-1")
    with open_checkpoints() as checkpoints:
        checkpoints.sweep()
    assert step_names(two_steps) == ["100", "200.replaced-1"]


def test_reading_changes_nothing(two_steps, open_checkpoints):
    (two_steps / "300.orbax-checkpoint-tmp-1").mkdir()  # As a running job has it while it writes.
    before = {path: path.stat().st_mtime_ns for path in two_steps.rglob("*")}
    with open_checkpoints(keep=1) as checkpoints:
        assert checkpoints.restore(abstract(make_state()))[0] == 200
        checkpoints.notes(100)
    assert {path: path.stat().st_mtime_ns for path in two_steps.rglob("*")} == before


def test_keeps_the_newest_and_vouches_for_every_file(open_checkpoints, tmp_path):
    with open_checkpoints(keep=2) as checkpoints:
        for step in (9, 10, 11, 100):
            checkpoints.save(step, make_state(step), {})
        deadline = time.monotonic() + 20
        while not (tmp_path / "latest" / "100" / DIGESTS).exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # The digests come without another call.
        assert checkpoints.latest_step() == 100
    assert step_names(tmp_path / "latest") == ["100", "11"]
    path = tmp_path / "latest" / "100"
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert json.loads((path / DIGESTS).read_bytes()).keys() == files - {DIGESTS}
    assert {"notes", "state"} <= {name.partition("/")[0] for name in files}


def test_older_steps_stay_until_the_new_one_has_its_digests(open_checkpoints, tmp_path, monkeypatch):
    with open_checkpoints(keep=1) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        go_on, digest = threading.Event(), checkpoint.sha256
        monkeypatch.setattr(checkpoint, "sha256", lambda path: go_on.wait(20) and digest(path))
        checkpoints.save(2, make_state(2), {})
        while not (tmp_path / "latest" / "2").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        assert step_names(tmp_path / "latest") == ["1", "2"]
        assert not (tmp_path / "latest" / "2" / DIGESTS).exists()
        go_on.set()
        checkpoints.wait()
        assert step_names(tmp_path / "latest") == ["2"]


def test_state_may_be_donated_right_after_save(open_checkpoints):
    # Large enough that writing takes longer than overwriting.
    state = {"x": jnp.arange(3_000_000, dtype=jnp.float32), "y": np.ones(500_000)}
    wanted = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    overwrite(state["x"] + 1)  # Compiled before: meanwhile a late copy would have been made.
    with open_checkpoints() as checkpoints:
        checkpoints.save(1, state, {})
        x = state["x"]
        for _ in range(10):
            x = overwrite(x)
        state["y"][:] = -7
        x.block_until_ready()
        restored = checkpoints.restore({"x": x, "y": state["y"]})[1]
    assert_same(restored, wanted)


# Damage


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_byte, truncate, Path.unlink])
def test_damage_to_any_file_falls_back_and_is_logged(damage, two_steps, open_checkpoints, lines):
    files = sorted(path for path in (two_steps / "200").rglob("*") if path.is_file())
    assert len(files) > 8
    for file in files:
        lines.clear()
        data = file.read_bytes()
        damage(file)
        with open_checkpoints() as checkpoints:
            step, restored, notes = checkpoints.restore(abstract(make_state()))
        file.write_bytes(data)
        assert (step, notes) == (100, {"loss": 1.0}), f"{file} was damaged and not noticed"
        assert_same(restored, make_state(100))
        assert len(lines) == 1 and str(two_steps / "200") in lines[0]
        if file.name != DIGESTS:
            assert str(file.relative_to(two_steps / "200")) in lines[0]


def test_unverified_steps_are_used_only_without_a_verified_one(two_steps, open_checkpoints, lines):
    (two_steps / "200" / DIGESTS).unlink()
    with open_checkpoints() as checkpoints:
        assert checkpoints.restore(abstract(make_state()))[0] == 100
        assert str(two_steps / "200") in lines[-1]
        (two_steps / "100" / DIGESTS).unlink()
        assert checkpoints.restore(abstract(make_state()))[0] == 200
        assert str(two_steps / "200") in lines[-1]


def test_verified_steps_are_kept_before_unverified_ones(two_steps, open_checkpoints):
    (two_steps / "200" / DIGESTS).unlink()
    with open_checkpoints(keep=2) as checkpoints:
        checkpoints.save(300, make_state(300), {})
    assert step_names(two_steps) == ["100", "300"]


def test_an_unverified_step_that_orbax_cannot_read_falls_back_too(two_steps, open_checkpoints, lines):
    for step in ("100", "200"):
        (two_steps / step / DIGESTS).unlink()
    shutil.rmtree(two_steps / "200" / "state" / "d")  # Small arrays are here, not in ocdbt.process_0.
    with open_checkpoints() as checkpoints:
        assert checkpoints.restore(abstract(make_state()))[0] == 100
    assert any(str(two_steps / "200") in line and "Orbax" in line for line in lines)


def test_steps_and_none_restores(two_steps, open_checkpoints):
    for step in ("100", "200"):
        flip_byte(two_steps / step / "notes" / "metadata")
    with open_checkpoints() as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(abstract(make_state()))
    assert str(two_steps) in str(caught.value)
    assert re.search(r"\b200\b.*\bnotes/metadata\b.*\b100\b.*\bnotes/metadata\b", str(caught.value))
    assert step_names(two_steps) == ["100", "200"]


def test_a_fallen_back_run_replaces_the_damaged_step(two_steps, open_checkpoints, lines):
    flip_byte(two_steps / "200" / "notes" / "metadata")
    with open_checkpoints(keep=2) as checkpoints:
        assert checkpoints.restore(abstract(make_state()))[0] == 100
        checkpoints.save(150, make_state(150), {})
        checkpoints.wait()
        assert "200" in lines[-1] and "150" in lines[-1]
        assert step_names(two_steps) == ["100", "150"], "the damaged step took the place of a good one"
        checkpoints.save(200, make_state(201), {})
        checkpoints.save(250, make_state(250), {})
        assert checkpoints.restore(abstract(make_state()))[0] == 250
    assert step_names(two_steps) == ["200", "250"]


@pytest.mark.parametrize("damaged", [False, True])
def test_saving_an_existing_step_replaces_it(damaged, two_steps, open_checkpoints):
    if damaged:
        flip_byte(two_steps / "200" / "notes" / "metadata")
    with open_checkpoints() as checkpoints:
        checkpoints.save(200, make_state(201), {"loss": 9.0})
        step, restored, notes = checkpoints.restore(abstract(make_state()))
    assert (step, notes) == (200, {"loss": 9.0})
    assert_same(restored, make_state(201))
    assert step_names(two_steps) == ["100", "200"]


def test_a_replacement_cut_short_leaves_the_earlier_step(two_steps, open_checkpoints):
    (two_steps / "200").rename(two_steps / "200.replaced-1")
    (two_steps / "200.orbax-checkpoint-tmp-5").mkdir()
    with open_checkpoints() as checkpoints:
        assert checkpoints.latest_step() == 200
        assert checkpoints.notes(200) == {"loss": 2.0}
        step, restored, _ = checkpoints.restore(abstract(make_state()))
        assert step == 200
        assert_same(restored, make_state(200))
        checkpoints.save(300, make_state(300), {})
    assert step_names(two_steps) == ["100", "300"]


def test_another_model_is_an_error_and_no_damage(two_steps, open_checkpoints, lines):
    other = make_state()
    other["params"]["q"] = jnp.zeros((3, 8))
    del other["params"]["layers"]
    with open_checkpoints() as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(abstract(other))
    for part in (
        str(two_steps / "200"),
        r"params/q\b.*float32\[3, 5\].*float32\[3, 8\]",
        r"params/layers/.*float32\[7\]",
    ):
        assert re.search(part, str(caught.value))
    assert (step_names(two_steps), lines) == (["100", "200"], [])


def test_arguments_that_cannot_be(two_steps, open_checkpoints):
    with open_checkpoints() as checkpoints, pytest.raises(CheckpointError, match=r"\bstep 3\b.*\b100, 200\b"):
        checkpoints.notes(3)
    for directory, keep, pattern in (("x", 0, r"\bkeep\D*\b0\b"), ("memory://x/y", 1, "memory://x/y")):
        with pytest.raises(ValueError, match=pattern):
            Checkpointer(directory, keep=keep, log=print)
