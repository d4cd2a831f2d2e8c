"""Tests checkpoints on disks and in buckets: a saved state is restored, and after damage an older
state or an error.
"""

import asyncio
import os
import re
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.tiny import enable_x64
from support.tiny_run import assert_equal
from support.waiting import wait_until
from txl_jax.errors import CheckpointError, UserError
from txl_jax.runtime import checkpoint, distributed
from txl_jax.runtime.checkpoint import DIGESTS, Checkpointer, find_steps
from txl_jax.runtime.remote import upload
from txl_jax.runtime.storage import write_json

# Orbax does not close its event loop when a restore fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_state(seed=0):
    """Every kind of leaf that a run has. The memory of a model without recurrence is empty."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(3, 5)).astype(np.float32)
    layers = [rng.normal(size=2).astype(np.float32), np.ones(7, np.float32)]
    hidden = rng.normal(size=(2, 3, 4)).astype(jnp.bfloat16)
    valid = np.arange(3, dtype=np.int32) + seed
    state = {
        "params": {"q": query, "layers": layers},
        "memory": {"hidden": hidden, "valid": valid},
        "empty": np.zeros((2, 3, 0, 4), jnp.bfloat16),
        "step": np.int32(seed),
    }
    return jax.device_put(state)


def abstract(state):
    """The shapes, dtypes and shardings of a state."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def step_names(directory):
    return sorted(path.name for path in directory.iterdir())


def assert_restores(checkpoints, step, *, seed=None):
    """Checks that a step is restored. Its state was drawn from a seed, by default the step.

    Returns the notes.
    """
    restored_step, state, notes = checkpoints.restore(abstract(make_state()))
    assert restored_step == step
    assert_equal(state, make_state(step if seed is None else seed))
    return notes


@pytest.fixture
def lines():
    """The lines that checkpoints report."""
    return []


@pytest.fixture
def open_checkpoints(tmp_path, lines):
    """Opens the directory of a test. Reported lines are added to `lines`."""
    return lambda keep=3: Checkpointer(tmp_path / "latest", keep=keep, log=lines.append)


@pytest.fixture(scope="module")
def two_steps_template(tmp_path_factory):
    """A directory with two whole steps, which tests copy."""
    directory = tmp_path_factory.mktemp("template") / "latest"
    with Checkpointer(directory, keep=3, log=print) as checkpoints:
        checkpoints.save(100, make_state(100), {"loss": 1.0})
        checkpoints.save(200, make_state(200), {"loss": 2.0})
    return directory


@pytest.fixture
def two_steps(two_steps_template, tmp_path):
    return Path(shutil.copytree(two_steps_template, tmp_path / "latest"))


@pytest.fixture
def steps_in_bucket(two_steps_template, bucket):
    upload(two_steps_template, bucket)
    return bucket


@pytest.fixture
def saved(steps_in_bucket, lines):
    with Checkpointer(steps_in_bucket, keep=2, log=lines.append) as checkpoints:
        yield checkpoints


# Whole


def test_round_trip_is_bit_equal(open_checkpoints, lines):
    state = make_state(7)
    with open_checkpoints() as checkpoints:
        assert checkpoints.notes() is None
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(7, state, {"loss": 0.5, "name": "run"})
    with open_checkpoints() as checkpoints:
        step, restored, notes = checkpoints.restore(abstract(state))
        assert step == 7
        assert notes == {"loss": 0.5, "name": "run"}
        assert checkpoints.notes() == notes
        assert_equal(restored, state)
        # Arrays serve as well as their shapes.
        assert_equal(checkpoints.restore(make_state(8))[1], state)
    assert lines == []


def test_reading_changes_nothing_and_sweeping_removes_what_killed_runs_left(
    two_steps, open_checkpoints
):
    # A save and a deletion that were killed. A running job writes into a directory with the first
    # name, too.
    for name in ("300.orbax-checkpoint-tmp-1", "50.deleted"):
        shutil.copytree(two_steps / "100", two_steps / name)
    before = {path: path.stat().st_mtime_ns for path in two_steps.rglob("*")}
    with open_checkpoints(keep=1) as checkpoints:
        assert_restores(checkpoints, 200)
        assert checkpoints.notes() == {"loss": 2.0}
        assert {path: path.stat().st_mtime_ns for path in two_steps.rglob("*")} == before
        checkpoints.sweep()
    assert step_names(two_steps) == ["100", "200"]


def test_older_steps_stay_until_the_new_one_has_its_digests(
    open_checkpoints, tmp_path, monkeypatch
):
    with open_checkpoints(keep=1) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        may_write = threading.Event()

        def write_later(path, value):
            assert may_write.wait(20)
            write_json(path, value)

        monkeypatch.setattr("txl_jax.runtime.storage.write_json", write_later)
        checkpoints.save(2, make_state(2), {})
        wait_until((tmp_path / "latest" / "2").exists)
        time.sleep(0.1)  # Time for a deletion that does not wait.
        assert step_names(tmp_path / "latest") == ["1", "2"]
        assert not (tmp_path / "latest" / "2" / DIGESTS).exists()
        may_write.set()
        wait_until(lambda: step_names(tmp_path / "latest") == ["2"])  # Without another call.


def test_state_may_be_donated_right_after_save(open_checkpoints):
    # Large enough that writing takes longer than overwriting.
    state = {"x": jnp.arange(3_000_000, dtype=jnp.float32), "y": np.ones(500_000)}
    expected = jax.tree.map(np.array, state)
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
    assert_equal(restored, expected)


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
    assert len(files) > 8, "of arrays, notes and digests"
    for file in files:
        lines.clear()
        data = file.read_bytes()
        damage(file)
        with open_checkpoints() as checkpoints:
            notes = assert_restores(checkpoints, 100)
        file.write_bytes(data)

        assert notes == {"loss": 1.0}, file
        [line] = lines
        assert str(two_steps / "200") in line
        if file.name != DIGESTS:
            assert str(file.relative_to(two_steps / "200")) in line


def test_unverified_steps_are_used_only_without_a_verified_one(two_steps, open_checkpoints, lines):
    (two_steps / "200" / DIGESTS).unlink()
    with open_checkpoints() as checkpoints:
        assert_restores(checkpoints, 100)
        assert str(two_steps / "200") in lines[-1]
        (two_steps / "100" / DIGESTS).rename(two_steps / "kept")
        assert_restores(checkpoints, 200)
        assert str(two_steps / "200") in lines[-1]
        (two_steps / "kept").rename(two_steps / "100" / DIGESTS)
    # The verified step is kept, although the unverified one is later.
    with open_checkpoints(keep=2) as checkpoints:
        checkpoints.save(300, make_state(300), {})
    assert step_names(two_steps) == ["100", "300"]


def test_an_unverified_step_that_orbax_cannot_read_falls_back_too(
    two_steps, open_checkpoints, lines
):
    for step in ("100", "200"):
        (two_steps / step / DIGESTS).unlink()
    # Small arrays are here, not in ocdbt.process_0.
    shutil.rmtree(two_steps / "200" / "state" / "d")
    with open_checkpoints() as checkpoints:
        assert_restores(checkpoints, 100)
    about_orbax = [line for line in lines if "Orbax" in line]
    assert any(str(two_steps / "200") in line for line in about_orbax), lines


def test_if_no_step_restores_the_error_names_the_damage_of_each(two_steps, open_checkpoints):
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
        assert_restores(checkpoints, 100)
        checkpoints.save(150, make_state(150), {})
        checkpoints.wait()
        assert "200" in lines[-1] and "150" in lines[-1]
        assert step_names(two_steps) == ["100", "150"], (
            "the damaged step took the place of a good one"
        )
        checkpoints.save(200, make_state(201), {})  # The step of the damaged one, with new values.
        checkpoints.save(250, make_state(250), {})
        assert_restores(checkpoints, 250)
    assert step_names(two_steps) == ["200", "250"]


@pytest.mark.parametrize(
    "place", ["two_steps", pytest.param("steps_in_bucket", marks=pytest.mark.full)]
)
def test_the_same_step_again_replaces_it_once_it_is_verified(place, request):
    directory = request.getfixturevalue(place)
    with Checkpointer(directory, keep=2, log=print) as checkpoints:
        for number in (1, 2):
            checkpoints.save(200, make_state(number), {"at": number})
            checkpoints.wait()
            assert step_names(directory) == ["100", f"200.again-{number}"]
            assert checkpoints.notes() == {"at": number}
        assert_restores(checkpoints, 200, seed=2)


def test_of_two_folders_of_a_step_the_later_counts(two_steps, open_checkpoints):
    """A kill between the digests of the new directory and the removal of the old leaves both."""
    for number in (9, 10):  # As texts they would be in the other order.
        shutil.copytree(two_steps / "100", two_steps / f"200.again-{number}")
    names = [os.path.basename(path) for _, path in find_steps(two_steps)]
    assert names == ["200.again-10", "200.again-9", "200", "100"]

    with open_checkpoints() as checkpoints:
        assert checkpoints._prepare(100) == "100.again-1"
        assert checkpoints._prepare(200) == "200.again-11"
        assert checkpoints._prepare(300) == "300"
        assert_restores(checkpoints, 200, seed=100)


def test_another_model_is_an_error_and_no_damage(two_steps, open_checkpoints, lines):
    other = make_state()
    other["params"]["q"] = jnp.zeros((3, 8))
    del other["params"]["layers"]
    with open_checkpoints() as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(abstract(other))
    error = str(caught.value)
    assert f"{two_steps}/200" in error
    assert re.search(r"params/q\b.*float32\[3, 5\].*\[3, 8\]", error)
    assert re.search(r"params/layers/.*float32\[7\]", error)
    assert step_names(two_steps) == ["100", "200"]
    assert lines == []


def test_floats_are_restored_as_they_were_saved_or_wider_if_that_is_allowed(
    two_steps, open_checkpoints
):
    state = abstract(make_state())
    wider = state | {
        "params": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float64, sharding=leaf.sharding),
            state["params"],
        )
    }
    wide_step = jax.ShapeDtypeStruct((), jnp.int64, sharding=state["step"].sharding)
    with enable_x64(True), open_checkpoints() as checkpoints:
        error = r"params/q is float32\[3, 5\] .*JAX_ENABLE_X64 is on here"
        with pytest.raises(CheckpointError, match=error):
            checkpoints.restore(wider)
        _, restored, _ = checkpoints.restore(wider, casts=True)
        assert restored["params"]["q"].dtype == jnp.float64
        # Integers are not widened.
        with pytest.raises(CheckpointError, match="JAX_ENABLE_X64 is on here"):
            checkpoints.restore(wider | {"step": wide_step}, casts=True)
    np.testing.assert_array_equal(restored["params"]["layers"][1], np.ones(7))


# Trouble


def no_space(path):
    raise OSError(28, "No space left on device")


def test_a_failed_save_is_known_to_all(tmp_path, open_checkpoints, monkeypatch):
    """Otherwise the others would wait in the next save, and report the disk or the network."""
    # As with a second process, whose saves do not fail.
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: True)
    monkeypatch.setattr(distributed, "gather_texts", lambda text: [text, ""])
    with open_checkpoints() as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr("txl_jax.runtime.storage.sha256", no_space)
            checkpoints.save(1, make_state(), {})
            # An error in the background is raised by the next save.
            with pytest.raises(CheckpointError, match=r"\bstep 1\b.*\bNo space left\b") as late:
                checkpoints.save(2, make_state(), {})
        (tmp_path / "latest").rename(tmp_path / "elsewhere")
        (tmp_path / "latest").write_text("a file")
        with pytest.raises(CheckpointError, match=r"\bstep 3\b.*latest.*\bFile exists\b") as early:
            checkpoints.save(3, make_state(), {})
    assert distributed.is_known_to_all(late.value)
    assert distributed.is_known_to_all(early.value)


def test_a_directory_that_cannot_be_read(tmp_path, open_checkpoints, monkeypatch):
    def denied(folder, **options):
        raise PermissionError(13, "Permission denied", folder)

    (tmp_path / "latest").write_text("a file")
    with open_checkpoints() as checkpoints:
        with pytest.raises(CheckpointError, match=r"latest\b.*\bNot a directory\b"):
            checkpoints.restore(make_state())
        monkeypatch.setattr("txl_jax.runtime.storage.names", denied)
        for act in (checkpoints.sweep, checkpoints.notes):
            with pytest.raises(CheckpointError, match=r"/latest\b.*\bPermission denied\b"):
                act()
    assert (tmp_path / "latest").read_text() == "a file"


def test_a_failed_save_does_not_hide_the_error_that_ended_the_run(
    open_checkpoints, lines, monkeypatch
):
    monkeypatch.setattr("txl_jax.runtime.storage.sha256", no_space)
    with pytest.raises(KeyboardInterrupt), open_checkpoints() as checkpoints:  # noqa: PT012
        checkpoints.save(1, make_state(), {})
        raise KeyboardInterrupt
    assert "No space left on device" in lines[-1]
    # If nothing else has ended the block, it is raised.
    with pytest.raises(CheckpointError, match="No space left"), open_checkpoints() as checkpoints:
        checkpoints.save(2, make_state(), {})


# Object storage


@pytest.mark.full
def test_a_step_without_its_commit_does_not_count_and_is_swept(saved, steps_in_bucket, storage):
    storage.refuse("DELETE|batch")
    # A deletion begins with the commit. If that fails, the step is still whole.
    with pytest.raises(PermissionError):
        checkpoint.delete_step(steps_in_bucket / "200")
    storage.calm()
    assert find_steps(steps_in_bucket)[0][0] == 200
    (steps_in_bucket / "200" / checkpoint.COMMIT).unlink()
    assert find_steps(steps_in_bucket)[0][0] == 100
    assert_restores(saved, 100)
    saved.sweep()
    assert step_names(steps_in_bucket) == ["100"]


@pytest.mark.full
def test_a_save_outlasts_an_outage_that_reaches_orbax(storage, bucket, monkeypatch):
    """Orbax asks for the directory of a step by itself, through gcsfs, which tries six times."""
    sleep = asyncio.sleep
    intercepted = storage.intercepted
    refused = []

    async def short_sleep(seconds, *rest):
        return await sleep(min(seconds, 0.01), *rest)

    def intercept(method, path):
        is_of_step = "latest/200" in unquote(path)
        if is_of_step and len(refused) < 20:  # More than gcsfs tries.
            refused.append(path)
            return 503
        return intercepted(method, path)

    with Checkpointer(bucket / "latest", keep=3, log=print) as checkpoints:
        checkpoints.save(100, make_state(100), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("asyncio.sleep", short_sleep)
            patch.setattr(storage, "intercepted", intercept)
            checkpoints.save(200, make_state(200), {})
            checkpoints.wait()
        assert len(refused) == 20
        assert_restores(checkpoints, 200)


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_an_outage_is_no_damage(saved, storage):
    for pattern in ("digests.json", "state/manifest"):
        storage.refuse(f"GET .*{pattern}", status=503)
        with pytest.raises(UserError, match="Start again"):
            assert_restores(saved, 200)
    storage.calm()
    assert_restores(saved, 200)
