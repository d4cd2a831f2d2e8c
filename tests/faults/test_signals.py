"""Tests SIGTERM and Ctrl-C in every phase: the exit code, one line, and a run that goes on to the same numbers."""

import re
import signal

import pytest

from support.faults import NIGHTLY, assert_equal_runs, finished


@pytest.mark.full
def test_a_signal_when_a_phase_begins(place, undisturbed):
    name = "signals"
    for phase, sent in (("compiling", signal.SIGTERM), ("evaluating", signal.SIGTERM), ("testing", signal.SIGINT)):
        victim = place.train(name)
        victim.wait_for(f"+{phase}")
        victim.send(sent)
        ended = victim.end()
        assert ended.code == 128 + sent
        assert ended.err.startswith(f"{sent.name}: ") and ended.err.count("\n") == 1, ended.err
        assert re.match(r"stopped\D*\b\d+\b", ended.out.splitlines()[-1])
    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


@NIGHTLY
def test_sigterm_while_a_text_is_prepared_and_while_a_checkpoint_is_written(place, undisturbed):
    preparing = place.train("term-files", fault="term", at="os.rename *tfds*incomplete*").end()
    assert preparing.code == -signal.SIGTERM and "Traceback" not in preparing.err  # 143 in a shell.
    saving = place.train("term-files", fault="term", at="os.mkdir *latest/*.orbax-checkpoint-tmp").end()
    assert saving.code == 128 + signal.SIGTERM and saving.err.startswith("SIGTERM: "), saving.err
    finished(place.train("term-files"))
    assert_equal_runs(place.workdir("term-files"), undisturbed)
