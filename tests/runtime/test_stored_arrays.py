"""Tests that a checkpoint with a missing part is noticed when it is written, and that a checkpoint
is whole in any directory.
"""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import order
from support.tiny_run import assert_equal
from txl_jax.errors import CheckpointError, UserError
from txl_jax.runtime import checkpoint, storage, stored_arrays
from txl_jax.runtime.checkpoint import Checkpointer, find_steps

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STATE = {
    "params": {"q": jnp.arange(15.0).reshape(3, 5), "zeros": jnp.zeros(7)},
    "step": jnp.int32(3),
}


def save(checkpoints, step):
    checkpoints.save(step, STATE, {"loss": 1.0})
    checkpoints.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "latest"
    with Checkpointer(folder, keep=1, log=print) as checkpoints:
        save(checkpoints, 1)
    return folder / "1" / "state"


@pytest.mark.parametrize("name", ["lr[0.1]", "run *best*?", "50%"])
def test_checkpoints_are_whole_in_a_directory_whose_name_is_a_pattern(name, tmp_path, monkeypatch):
    folder = tmp_path / name / "latest"
    folder.parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))  # TMPDIR may be in it too.
    for step in (1, 2):
        with Checkpointer(folder, keep=2, log=print) as checkpoints:
            save(checkpoints, step)
            restored_step, state, notes = checkpoints.restore(STATE)
        assert restored_step == step
        assert notes == {"loss": 1.0}
        assert_equal(state, STATE)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert [path.name for path in folder.parent.iterdir()] == ["latest"], "the link is removed"


def test_a_step_without_its_arrays_does_not_count_and_the_error_names_one(tmp_path, monkeypatch):
    """Orbax leaves such a step in a directory with wildcards, which it takes for a pattern."""
    folder = tmp_path / "lr[0.1]"
    with Checkpointer(folder, keep=1, log=print) as checkpoints:
        save(checkpoints, 1)
        monkeypatch.setattr(storage, "without_wildcards", contextlib.nullcontext)
        with pytest.raises(
            CheckpointError, match=r"step 2 .*lr\[0\.1\].* incompletely .*params\.q"
        ):
            save(checkpoints, 2)
        assert [step for step, _ in find_steps(folder)] == [1]
        monkeypatch.undo()
        assert checkpoints.restore(STATE)[0] == 1
        save(checkpoints, 2)
        assert [step for step, _ in find_steps(folder)] == [2]


def test_all_arrays_open_and_none_that_was_not_saved(saved):
    arrays = stored_arrays.describe(STATE)
    assert sorted(arrays) == ["params.q", "params.zeros", "step"]
    assert stored_arrays.find_missing(saved, arrays) is None

    with_memory = stored_arrays.describe({**STATE, "memory": np.ones(3)})
    assert "memory" in stored_arrays.find_missing(saved, with_memory)
    wider = stored_arrays.describe({"step": np.ones(3)})
    assert "shape" in stored_arrays.find_missing(saved, wider)


def test_values_that_are_missing_are_noticed(tmp_path):
    """The index is whole, and names a file that does not exist."""
    # TensorStore keeps up to 1 KiB in the index.
    state = {"large": np.random.default_rng(0).random(1000)}
    with Checkpointer(tmp_path, keep=1, log=print) as checkpoints:
        checkpoints.save(1, state, {})
    folder = tmp_path / "1" / "state"
    arrays = stored_arrays.describe(state)
    assert stored_arrays.find_missing(folder, arrays) is None
    data = max((folder / "ocdbt.process_0" / "d").iterdir(), key=os.path.getsize)
    data.unlink()
    assert stored_arrays.find_missing(folder, arrays) is not None


def test_files_that_appear_late_are_waited_for(saved, tmp_path, monkeypatch):
    pauses = []

    def appear(seconds):
        pauses.append(seconds)
        (tmp_path / "late").symlink_to(saved)

    monkeypatch.setattr("time.sleep", appear)
    arrays = stored_arrays.describe(STATE)
    assert stored_arrays.find_missing(tmp_path / "late", arrays, seconds=30) is None
    assert len(pauses) == 1


def test_each_process_opens_a_chunk_of_its_own():
    """The chunk with the first element of its first device. Here one process has all devices."""
    n_device = jax.device_count()
    mesh = jax.make_mesh((n_device,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    array = jax.device_put(np.zeros((4 * n_device, 3)), sharding)
    assert stored_arrays.describe({"x": array}) == {"x": ((4 * n_device, 3), (0, 0))}
    # The second device's rows begin at 4, where the second chunk does.
    assert stored_arrays._chunk_key((4, 0), [4, 3]) == "1.0"


def test_arrays_are_opened_before_the_digests_vouch_for_them(tmp_path, monkeypatch):
    events = order.record(monkeypatch, tmp_path)
    find_missing = stored_arrays.find_missing

    def opened(folder, arrays, **options):
        events.append(("open", os.path.relpath(folder, tmp_path)))
        return find_missing(folder, arrays, **options)

    monkeypatch.setattr(stored_arrays, "find_missing", opened)
    with Checkpointer(tmp_path, keep=1, log=print) as checkpoints:
        save(checkpoints, 1)
    order.assert_in_order(
        events, ("rename", "1"), ("open", "1/state"), ("sync", "1/.digests.json.tmp")
    )


def test_a_bucket_name_with_wildcards_is_refused_before_anything_is_written():
    """Fsspec deletes all that match it."""
    for act in (storage.make_folder, storage.check_new_folder, storage.refuse_wildcards):
        with pytest.raises(UserError, match=r"got \* in gs://bucket/run\*"):
            act("gs://bucket/run*")
    storage.refuse_wildcards("gs://bucket/run 50%")
    storage.refuse_wildcards("/runs/lr[0.1]")


@pytest.mark.full
def test_a_checkpoint_in_a_bucket_is_opened_with_few_requests(storage, bucket):
    """A chunk per array, and the index once."""
    with Checkpointer(bucket / "latest", keep=1, log=print) as checkpoints:
        save(checkpoints, 1)
    folder = bucket / "latest" / "1" / "state"
    arrays = stored_arrays.describe(STATE)
    before = len(storage.requests)
    assert stored_arrays.find_missing(folder, arrays) is None
    # The index takes up to three requests.
    assert len(storage.requests) - before <= 3 + len(arrays)
    assert stored_arrays.find_missing(bucket / "nothing", arrays) is not None
    assert checkpoint.find_damage(bucket / "latest" / "1") is None
