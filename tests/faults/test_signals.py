"""Tests SIGTERM and Ctrl-C in every phase: the exit code, one line, and a run that goes on to the
same numbers.
"""

import re
import signal

import pytest

from support.faults import NIGHTLY, assert_equal_runs, few_or_all, finished

ANSWERED = 128 + signal.SIGTERM
UNANSWERED = -signal.SIGTERM  # Which a shell shows as 143 too.
# Where the signal comes: a file operation of that phase, and the step that the start then names.
MOMENTS = {
    "while records are written": ("os.rename *tfds*incomplete*", UNANSWERED, None),
    "while the log is opened, before anything is compiled": ("open */log.txt", ANSWERED, "2"),
    "while the first checkpoint is written": (
        "os.mkdir *latest/*.orbax-checkpoint-tmp",
        ANSWERED,
        r"\d+",
    ),
    "while digests are written": ("open *latest/12/.digests.json.*", ANSWERED, r"\d+"),
    "after the last evaluation": ("os.mkdir *best/24.orbax-checkpoint-tmp", ANSWERED, "24"),
}
PHASES = ("compiling", "evaluating", "testing")  # Or when it begins.
FAST = ("compiling", "testing")


def assert_stopped(ended, code, step, name="SIGTERM"):
    """One answer on the error stream, one line on the other; or, without a handler, neither."""
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    if code != UNANSWERED:
        assert ended.stderr.startswith(f"{name}: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert re.match(rf"stopped\D*\b{step}\b", ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("phases", few_or_all(FAST, PHASES))
def test_a_signal_when_a_phase_begins(phases, place, undisturbed):
    name = f"term-{len(phases)}"
    for number, phase in enumerate(phases):
        sent = (signal.SIGTERM, signal.SIGINT)[number % 2]
        victim = place.train(name)
        victim.wait_for(f"+{phase}")
        victim.send(sent)
        assert_stopped(victim.end(), 128 + sent, r"\d+", sent.name)
    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


@NIGHTLY
def test_sigterm_before_chosen_file_operations(place, undisturbed):
    for at, code, step in MOMENTS.values():
        assert_stopped(place.train("term-files", fault="term", at=at).end(), code, step)
    finished(place.train("term-files"))
    assert_equal_runs(place.workdir("term-files"), undisturbed)
