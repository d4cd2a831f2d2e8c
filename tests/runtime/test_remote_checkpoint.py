"""Tests checkpoints on object storage: complete or not there, damage ends in an older step, an outage does not."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.checkpoints import abstract
from txl_jax.errors import UserError
from txl_jax.runtime import checkpoint
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.storage import files_below, names, read, write

pytestmark = pytest.mark.full
STATE = {"a": jnp.arange(12.0), "b": {"c": jnp.ones((3, 4))}}
ABSTRACT = abstract(STATE)


def scaled(step):
    return jax.tree.map(lambda leaf: leaf * step, STATE)


@pytest.fixture
def checkpoints(bucket, lines):
    with Checkpointer(bucket, keep=2, log=lines.append) as opened:
        yield opened


@pytest.fixture
def saved(checkpoints):
    for step in (100, 200, 300):
        checkpoints.save(step, scaled(step), {"at": step})
    checkpoints.wait()
    return checkpoints


def restored_step(checkpoints):
    step, state, notes = checkpoints.restore(ABSTRACT)
    np.testing.assert_array_equal(state["a"], STATE["a"] * notes["at"])
    return step


def test_what_is_saved_comes_back_and_old_steps_go(saved, bucket):
    assert names(bucket) == ["200", "300"]
    assert checkpoint.find_damage(bucket / "300") is None and checkpoint.is_verified(bucket / "300")
    assert restored_step(saved) == 300 and saved.latest_step() == 300
    assert restored_step(Checkpointer(str(bucket), keep=1, log=print)) == 300


def test_damage_ends_in_the_step_before(saved, bucket, lines):
    name, _ = max(json.loads((bucket / "300" / "digests.json").read_bytes()).items())
    (bucket / "300" / name).write_bytes(b"damaged")
    assert restored_step(saved) == 200
    assert name in lines[-1]
    (bucket / "300" / name).unlink()
    assert restored_step(saved) == 200
    (bucket / "300" / checkpoint.DIGESTS).unlink()
    assert restored_step(saved) == 200
    assert any("unverified" in line for line in lines)


def test_a_step_without_its_commit_does_not_count_and_is_swept(saved, bucket, storage):
    storage.refuse("DELETE|batch")
    with pytest.raises(PermissionError):  # A deletion begins with the commit.
        checkpoint.delete_step(bucket / "300")
    storage.calm()
    assert saved.latest_step() == 300
    (bucket / "300" / checkpoint.COMMIT).unlink()
    assert saved.latest_step() == 200 and restored_step(saved) == 200
    saved.sweep()
    assert names(bucket) == ["200"]


def test_the_same_step_again_replaces_it_once_it_is_verified(saved, bucket):
    saved.save(200, scaled(7), {"at": 7})
    saved.wait()
    assert names(bucket) == ["200.again-1"]
    assert restored_step(saved) == 200
    saved.save(200, scaled(8), {"at": 8})
    saved.wait()
    assert names(bucket) == ["200.again-2"]
    assert saved.notes(200) == {"at": 8}


def test_of_two_folders_of_a_step_the_later_counts(saved, bucket):
    """As after a kill between the digests of the new one and the removal of the old."""
    saved.save(300, scaled(5), {"at": 5})
    saved.wait()
    for path in files_below(bucket / "200"):
        write(path.replace("/200/", "/300/"), read(path))
    assert [os.path.basename(each.path) for each in checkpoint.find_steps(bucket)] == ["300.again-1", "300", "200"]
    _, _, notes = saved.restore(ABSTRACT)
    assert notes == {"at": 5}
    assert saved.notes(300) == {"at": 5}


def test_a_folder_is_never_named_before_one_that_is_there(bucket):
    """After a kill between the digests of the new one and the removal of the old the new one must count."""
    for name in ("200.again-1", "300"):
        (bucket / name / checkpoint.COMMIT).write_bytes(b"")
    written = [os.path.basename(checkpoint.new_step_folder(bucket, step)) for step in (100, 200, 300)]
    assert written == ["100", "200.again-2", "300.again-1"]
    for name in written:
        (bucket / name / checkpoint.COMMIT).write_bytes(b"")
    assert [os.path.basename(each.path) for each in checkpoint.find_steps(bucket)] == [
        *("300.again-1", "300", "200.again-2", "200.again-1", "100"),
    ]


@pytest.mark.usefixtures("impatient")
def test_an_outage_is_no_damage(saved, storage):
    for pattern in ("digests.json", "state/manifest"):
        storage.refuse(f"GET .*{pattern}", status=503)
        with pytest.raises(UserError, match="start again"):
            saved.restore(ABSTRACT)
    storage.calm()
    assert restored_step(saved) == 300
