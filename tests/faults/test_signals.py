"""Tests SIGTERM in every phase: exit code 143, one line, and a run that goes on to the same numbers."""

import signal

import pytest
from faults.harness import assert_equal_runs, finished

ANSWERED = 128 + signal.SIGTERM
UNANSWERED = -signal.SIGTERM  # Which a shell shows as 143 too.
# Where the signal comes: a file operation of that phase, and what the start then says.
MOMENTS = {
    "while records are written": ("os.rename *tfds*incomplete*", UNANSWERED, ""),
    "while the log is opened, before anything is compiled": ("open */log.txt", ANSWERED, "after step 2;"),
    "while the first checkpoint is written": ("os.mkdir *latest/*.orbax-checkpoint-tmp", ANSWERED, "after step "),
    "while digests are written": ("open *latest/12/.digests.json.*", ANSWERED, "after step "),
    "after the last evaluation": ("os.mkdir *best/24.orbax-checkpoint-tmp", ANSWERED, "after step 24;"),
}
PHASES = ("compiling", "evaluating", "testing")  # Or when it begins.
FAST = ("compiling", "testing")


def assert_stopped(ended, code, says):
    """One answer on the error stream, one line on the other; or, without a handler, neither."""
    assert ended.code == code
    assert "Traceback" not in ended.err
    if code == ANSWERED:
        assert ended.err == "SIGTERM: saving and stopping as soon as this step is done; once more stops at once\n"
        assert f"stopped   on request {says}" in ended.out.splitlines()[-1]


@pytest.mark.parametrize(
    "phases", [FAST, pytest.param(PHASES, marks=pytest.mark.slow)], ids=lambda phases: "+".join(phases)
)
def test_sigterm_when_a_phase_begins(phases, place, undisturbed):
    name = f"term-{len(phases)}"
    for phase in phases:
        victim = place.train(name)
        victim.wait_for(f"+{phase}")
        victim.send(signal.SIGTERM)
        assert_stopped(victim.end(), ANSWERED, "after step ")
    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


@pytest.mark.slow
def test_sigterm_before_chosen_file_operations(place, undisturbed):
    for moment, (at, code, says) in MOMENTS.items():
        assert_stopped(place.train("term-files", fault="term", at=at).end(), code, says)
        print(f"SIGTERM {moment}: {code}")
    finished(place.train("term-files"))
    assert_equal_runs(place.workdir("term-files"), undisturbed)
