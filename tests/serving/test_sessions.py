"""Tests the store of sessions: number, expiry, owners."""

from support.serving import make_store, refused
from txl_jax.serving.sessions import State


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
    store.commit(session, State(None, 3, 2, 21))
    assert store.begin(session.name, "a").state.tokens == 21
    store.release(session)
    assert not session.busy and session.state.tokens == 21


def test_sessions_expire_after_their_last_use():
    now = [1000.0]
    store = make_store(seconds=60, clock=lambda: now[0])
    old, used, busy = (store.create("a") for _ in range(3))
    store.begin(busy.name, "a")
    now[0] += 50
    store.release(store.begin(used.name, "a"))
    now[0] += 50
    refused(404, store.get, old.name, "a")
    assert {each.name for each in store.of_owner("a")} == {used.name, busy.name}
    now[0] += 100
    store.release(busy)
    assert store.get(busy.name, "a") is busy
