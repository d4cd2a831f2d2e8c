"""Tests that the first signal is noted, the second acts as before, and handlers come back."""

import os
import signal
import threading

import pytest

from support import processes
from support.metadata_server import MetadataServer
from txl_jax.runtime import stop
from txl_jax.runtime.stop import StopRequest

NAMES = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@pytest.fixture
def arrivals():
    """The signals that reach the handlers from before the request, instead of ending the tests."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in NAMES.values()}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("second", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("first", NAMES)
def test_the_first_signal_is_noted_and_the_second_acts_as_before(arrivals, first, second):
    with StopRequest() as stop:
        assert not stop and stop.signal_number == 0
        send(NAMES[first])
        assert stop and stop.signal_number == NAMES[first]
        assert arrivals == []
        send(second)
        assert arrivals == [second]
    assert stop.signal_number == NAMES[first]


def test_handlers_come_back(arrivals):
    before = {number: signal.getsignal(number) for number in NAMES.values()}
    with pytest.raises(KeyError), StopRequest():  # noqa: PT012
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
        raise KeyError
    assert {number: signal.getsignal(number) for number in NAMES.values()} == before
    send(signal.SIGTERM)
    assert arrivals == [signal.SIGTERM]


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_notice_is_no_signal(arrivals, when, monkeypatch):
    """The SIGTERM of a machine that is shut down after the notice is the first one, and the next acts as before."""
    monkeypatch.setattr(stop, "_requested", threading.Event())
    if when == "before":
        stop.request_stop("preempted=TRUE")
    with StopRequest() as asked:
        if when == "within":
            assert not asked
            stop.request_stop("preempted=TRUE")
        assert asked and asked.signal_number == signal.SIGTERM
        send(signal.SIGTERM)
        assert asked and arrivals == []
        send(signal.SIGTERM)
        assert arrivals == [signal.SIGTERM]
    with StopRequest() as asked:
        assert asked, "for the rest of the process"


SCRIPT = """
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from txl_jax.cli import google_cloud, hosts
from txl_jax.runtime.stop import StopRequest

hosts._given = dict  # No flags here.
hosts.join()
if sys.argv[1:] == ["noticed"]:
    google_cloud.stop_on_notice()
with StopRequest() as stop:
    step = 0
    while not stop:
        step += 1
        multihost_utils.process_allgather(np.zeros(1))
        if step == 3:
            print("ready", file=sys.stderr, flush=True)
        time.sleep(0.01)
    assert stop and stop.signal_number == 15, "it stays true"
print(step, file=sys.stderr)
"""


@pytest.mark.full
@pytest.mark.parametrize(("cause", "number"), [("SIGTERM", 1), ("SIGINT", 0), ("TERMINATE_ON_HOST_MAINTENANCE", 1)])
def test_a_signal_or_notice_to_one_process_stops_all_at_the_same_step(cause, number):
    with MetadataServer(maintenance_event="NONE", preempted="FALSE") as server:
        given = [(), () if cause in NAMES else ("noticed",)].__getitem__
        started = processes.start("-c", SCRIPT, devices=1, of_process=given, GCE_METADATA_HOST=server.host)
        while "ready" not in (line := started[number].stderr.readline()):
            assert line, processes.finish(started)
        if cause in NAMES:
            started[number].send_signal(NAMES[cause])
        else:
            server.change("maintenance-event", cause)
        ended = processes.finish(started)
    assert [code for code, _, _ in ended] == [0, 0], ended
    steps = [int(err.splitlines()[-1]) for _, _, err in ended]
    assert steps[0] == steps[1] >= 3
    assert cause in NAMES or [cause in err for _, _, err in ended] == [False, True]
