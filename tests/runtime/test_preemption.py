"""Tests that the first signal is noted, the second acts as before, and handlers come back."""

import os
import signal

import pytest

from support import processes
from txl_jax.runtime.preemption import StopRequest

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


def test_ctrl_c_twice_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), StopRequest() as stop:  # noqa: PT012
            send(signal.SIGINT)
            assert stop
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


SCRIPT = """
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.cli import hosts
from txl_jax.runtime.preemption import StopRequest

hosts._given = dict  # No flags here.
hosts.join()
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


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 1), ("SIGINT", 0)])
def test_a_signal_to_one_process_stops_all_at_the_same_step(name, number):
    started = processes.start("-c", SCRIPT, devices=1)
    while "ready" not in (line := started[number].stderr.readline()):
        assert line, processes.finish(started)
    started[number].send_signal(NAMES[name])
    ended = processes.finish(started)
    assert [code for code, _, _ in ended] == [0, 0], ended
    steps = [int(err.splitlines()[-1]) for _, _, err in ended]
    assert steps[0] == steps[1] >= 3
