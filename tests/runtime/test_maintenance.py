"""Tests that a notice of Google Cloud is waited for, against a metadata server on loopback."""

import queue
import threading
import time

import pytest

from support.metadata_server import ROOT, MetadataServer
from txl_jax.runtime import stop

pytestmark = pytest.mark.full
CALM = {"maintenance_event": "NONE", "preempted": "FALSE"}


def notices_of(server):
    """A queue of the notices."""
    notices: queue.Queue[str] = queue.Queue()
    stop.watch_notices(server.host, notices.put)
    return notices


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(stop, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(stop, "_PAUSE_SECONDS", 0.02)


@pytest.fixture
def watchers():
    """Returns the threads that wait for a notice, without those of earlier tests, which try again for a while."""
    earlier = set(threading.enumerate())
    return lambda: [one for one in set(threading.enumerate()) - earlier if one.name.startswith("notice of")]


@pytest.mark.parametrize(
    ("key", "value"), [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")]
)
def test_a_change_is_noticed_at_once(key, value, watchers):
    with MetadataServer(**CALM) as server:
        notices = notices_of(server)
        until(lambda: len(server.asked) == 4)
        assert notices.empty()
        server.change(key, value)
        assert notices.get(timeout=5) == f"{key}={value}"
        assert {path for path, _ in server.asked} == {ROOT + "maintenance-event", ROOT + "preempted"}
        assert all(query["wait_for_change"] == "true" for _, query in server.asked)
        assert {query["last_etag"] for _, query in server.asked} == {"0", "etag-NONE", "etag-FALSE"}
        server.change("preempted", "TRUE")
        server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        until(lambda: not watchers())
        assert notices.empty(), "one notice is enough"


def test_a_machine_that_migrates_goes_on():
    with MetadataServer(**CALM) as server:
        notices = notices_of(server)
        until(lambda: len(server.asked) == 4)
        server.change("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        until(lambda: len(server.asked) == 5)
        assert notices.empty()
        server.change("preempted", "TRUE")
        assert notices.get(timeout=5) == "preempted=TRUE"
        server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")  # So that the other thread ends too.


def test_a_server_that_fails_for_a_while_is_asked_again_and_one_without_the_keys_is_left_alone(watchers):
    with MetadataServer(failures=3, maintenance_event="NONE", preempted="TRUE") as server:
        assert notices_of(server).get(timeout=5) == "preempted=TRUE"
        server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    until(lambda: not watchers())
    with MetadataServer() as server:
        notices = notices_of(server)
        until(lambda: not watchers())
        assert len(server.asked) == 2 and notices.empty()
