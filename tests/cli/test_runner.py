"""Tests exit codes and messages, alone and beside other processes."""

import jax
import pytest

from txl_jax.cli import hosts, runner
from txl_jax.errors import CheckpointError, RemoteProcessError, UserError
from txl_jax.runtime import distributed

GLOO = "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def caused(error, cause):
    error.__cause__ = cause
    return error


def known_to_all(error):
    error.known_to_all = True
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError(GLOO), True),  # Raised where an array is fetched.
        (jax.errors.JaxRuntimeError(GLOO), True),
        (caused(CheckpointError("step 3 could not be written"), RuntimeError("UNAVAILABLE: barrier")), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # Of a disk, or of a download.
        (caused(ConnectionError("they did not come together"), RuntimeError("UNAVAILABLE")), False),
        (known_to_all(RemoteProcessError("process 1: Connection reset by peer")), False),
    ],
)
def test_a_lost_process_is_distinguished_from_mistakes(monkeypatch, capsys, error, lost):
    assert not hosts.lost_another(error), "alone there is none to lose"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: False)
    assert (runner.exit_code_for(error) == hosts.LOST == 75) is lost
    err = capsys.readouterr().err
    assert err.startswith("error: ") and (err == f"error: {error}\n") is not lost


@pytest.fixture
def ended(monkeypatch):
    """Collectives that were run, and how the process was ended at once."""
    done = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "run_on_all", lambda act: done.append("together"))
    monkeypatch.setattr(hosts.os, "_exit", lambda code: done.append(code))
    return done


def test_all_that_end_together_wait_for_each_other(ended):
    assert hosts.leave(143, together=True) == 143 and ended == ["together"]
    hosts.leave(1, together=False)
    assert ended == ["together", 1]


def test_one_that_is_lost_at_the_end_is_reported_unless_a_mistake_was(ended, monkeypatch):
    def lose(act):
        raise ValueError(GLOO)

    monkeypatch.setattr(distributed, "run_on_all", lose)
    with pytest.raises(ValueError, match="Gloo"):
        hosts.leave(0, together=True)
    hosts.leave(1, together=True)
    assert ended == [1]


def test_all_meet_as_soon_as_they_have_joined(ended, monkeypatch):
    monkeypatch.setattr(hosts, "announced", lambda *unused: hosts.Several(2, "a test", {}))
    monkeypatch.setattr(hosts, "_given", dict)
    monkeypatch.setattr(hosts, "_redirect_output", lambda **unused: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **unused: ended.append("joined"))
    hosts.join()
    assert ended == ["joined", "together"]


@pytest.mark.parametrize("error", [UserError("lengths is 0; give more"), FileNotFoundError(2, "No such file", "a.txt")])
def test_an_error_of_a_user_is_one_line_and_a_bug_keeps_its_traceback(capsys, error):
    def job(error):
        raise error

    assert runner.guarded(lambda: job(error)) == 1
    assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(ValueError, match="shapes"):
        runner.guarded(lambda: job(ValueError("shapes differ")))
    assert capsys.readouterr().err == ""
