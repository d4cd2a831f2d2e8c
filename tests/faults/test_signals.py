"""Tests SIGTERM and Ctrl-C in every phase: the exit code, one line, and a run that goes on to the same numbers."""

import re
import signal

import pytest

from support.faults import assert_equal_runs, few_or_all, finished

PHASES = ("compiling", "evaluating", "testing")
FAST = ("compiling", "testing")


@pytest.mark.parametrize("phases", few_or_all(FAST, PHASES))
def test_a_signal_when_a_phase_begins(phases, place, undisturbed):
    name = f"term-{len(phases)}"
    for number, phase in enumerate(phases):
        sent = (signal.SIGTERM, signal.SIGINT)[number % 2]
        victim = place.train(name)
        victim.wait_for(f"+{phase}")
        victim.send(sent)
        ended = victim.end()
        assert ended.code == 128 + sent
        assert ended.err.startswith(f"{sent.name}: ") and ended.err.count("\n") == 1, ended.err
        assert re.match(r"stopped\D*\b\d+\b", ended.out.splitlines()[-1])
    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)
