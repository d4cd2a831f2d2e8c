"""Tests SIGTERM and Ctrl-C in every phase: the exit code, one line, and a run that resumes with the
same numbers.
"""

import itertools
import re
import signal

import pytest

from support.faults import NIGHTLY, assert_equal_runs, few_or_all, finished

ANSWERED = 128 + signal.SIGTERM
UNANSWERED = -signal.SIGTERM  # A shell shows this as 143 too.
# When the signal comes: a file operation of the phase, the exit code, and the step that is printed.
# With the open log the run stops after its first call, of two updates.
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
PHASES = ("compiling", "evaluating", "testing")
FAST = ("compiling", "testing")


def assert_stopped(ended, code, step, name="SIGTERM"):
    """Asserts that a start answered a signal with an error line and a last line of output.

    Before the handler is installed there is neither.
    """
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    if code != UNANSWERED:
        assert ended.stderr.startswith(f"{name}: "), ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert re.match(rf"stopped\D*\b{step}\b", ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("phases", few_or_all(FAST, PHASES))
def test_a_signal_when_a_phase_begins(phases, place, undisturbed):
    """SIGTERM and Ctrl-C, in turn, stop a run with exit codes 143 and 130, and it resumes."""
    name = f"term-{len(phases)}"
    signals = itertools.cycle([signal.SIGTERM, signal.SIGINT])
    for phase, sent in zip(phases, signals, strict=False):
        victim = place.train(name)
        victim.wait_for(f"+{phase}")
        victim.send(sent)
        assert_stopped(victim.end(), 128 + sent, r"\d+", sent.name)

    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


@NIGHTLY
def test_sigterm_before_chosen_file_operations(place, undisturbed):
    """SIGTERM stops a run in the middle of writing files, and it resumes."""
    for at, code, step in MOMENTS.values():
        assert_stopped(place.train("term-files", fault="term", at=at).end(), code, step)
    finished(place.train("term-files"))
    assert_equal_runs(place.workdir("term-files"), undisturbed)
