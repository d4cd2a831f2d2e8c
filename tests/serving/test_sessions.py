"""Tests the store of sessions: number, expiry, owners, files, damage."""

import jax.numpy as jnp
import numpy as np
import pytest

from support.serving import make_store
from txl_jax.serving.requests import RequestError
from txl_jax.serving.row_step import Rings
from txl_jax.serving.sessions import State


def state(fill, *, dtype="float32"):
    """A memory of two layers."""
    rng = np.random.default_rng(fill)
    arrays = [rng.normal(size=(1, 2, 3, 5)).astype(jnp.dtype(dtype)) for _ in range(4)]
    return State(Rings(tuple(arrays[:2]), tuple(arrays[2:])), 100 + fill, fill, 7 * fill)


def refused(status, function, *arguments):
    with pytest.raises(RequestError) as raised:
        function(*arguments)
    assert raised.value.status == status


def assert_same(found, expected):
    assert (found.position, found.pending, found.tokens) == (expected.position, expected.pending, expected.tokens)
    for own, other in zip(
        (*found.rings.keys, *found.rings.values), (*expected.rings.keys, *expected.rings.values), strict=True
    ):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)


def test_sessions_are_bounded_and_belong_to_their_owner():
    store = make_store(limit=2)
    first, second = store.create("a"), store.create("b")
    refused(429, store.create, "a")
    for function in (store.get, store.begin, store.delete):
        refused(404, function, first.name, "b")
        refused(404, function, "nothing", "a")
    assert store.of_owner("b") == [second]
    store.delete(first.name, "a")
    assert store.create("b").name != first.name and store.num_sessions == 2


def test_a_session_serves_one_request_at_a_time():
    store = make_store()
    session = store.begin(store.create("a").name, "a")
    refused(409, store.begin, session.name, "a")
    refused(409, store.delete, session.name, "a")
    store.commit(session, state(3))
    assert store.begin(session.name, "a").state.tokens == 21
    store.release(session)
    assert not session.busy and session.state.tokens == 21


@pytest.mark.full
def test_sessions_expire_after_their_last_use_with_their_files(tmp_path):
    now = [1000.0]
    store = make_store(seconds=60, folder=tmp_path, clock=lambda: now[0])
    old, used, busy = (store.create("a") for _ in range(3))
    store.begin(busy.name, "a")
    for session in (old, used):
        store.save(session)
    now[0] += 50
    store.release(store.begin(used.name, "a"))
    now[0] += 50
    refused(404, store.get, old.name, "a")
    assert {each.name for each in store.of_owner("a")} == {used.name, busy.name}
    store.save_changed()
    assert {path.stem for path in tmp_path.iterdir()} == {used.name, busy.name}
    now[0] += 100
    assert make_store(seconds=60, folder=tmp_path, clock=lambda: now[0]).restore() == []
    store.release(busy)
    assert store.get(busy.name, "a") is busy


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_session_is_restored(tmp_path, dtype):
    store = make_store(folder=tmp_path)
    session, empty = store.create("a"), store.create("b")
    store.commit(store.begin(session.name, "a"), state(5, dtype=dtype))
    assert store.save_changed() == [] and session.saved is session.state
    other = make_store(folder=tmp_path)
    assert other.restore() == [] and other.num_sessions == 2
    assert_same(other.get(session.name, "a").state, session.state)
    assert other.get(empty.name, "b").state == empty.state and other.get(session.name, "a").created == session.created
    other.delete(session.name, "a")
    assert [path.stem for path in tmp_path.iterdir()] == [empty.name]


@pytest.mark.full
def test_files_that_are_damaged_or_of_another_model_are_left_out(tmp_path):
    store = make_store(folder=tmp_path)
    sessions = [store.create("a") for _ in range(4)]
    for number, session in enumerate(sessions):
        store.commit(store.begin(session.name, "a"), state(number))
        store.save(session)
    paths = [tmp_path / f"{session.name}.session" for session in sessions]
    flipped = bytearray(paths[0].read_bytes())
    flipped[-100] ^= 1
    paths[0].write_bytes(flipped)
    paths[1].write_bytes(paths[1].read_bytes()[:-7])
    paths[2].write_bytes(b"")
    (tmp_path / f".{paths[3].name}.99.tmp").write_bytes(b"of a process that was killed")
    other = make_store(folder=tmp_path)
    left_out = other.restore()
    assert {clause.partition(":")[0] for clause in left_out} == {path.name for path in paths[:3]}
    assert [each.name for each in other.of_owner("a")] == [sessions[3].name] and len(list(tmp_path.iterdir())) == 4
    assert len(make_store(folder=tmp_path, model_digest="another").restore()) == 4
    assert len(make_store(folder=tmp_path, limit=0).restore()) == 4


@pytest.mark.full
def test_a_folder_that_cannot_be_written_leaves_the_session_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    store = make_store(folder=tmp_path / "file" / "sessions")
    session = store.create("a")
    refused(507, store.save, session)
    assert [error.status for error in store.save_changed()] == [507] and store.get(session.name, "a") is session
    refused(400, make_store().save, session)
