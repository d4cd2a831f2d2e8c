"""Tests that processes on one machine find each other, are stopped together, and get each signal
once.
"""

import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from launch import local as local_module
from support import ROOT, processes


def test_each_flag_reaches_the_processes(monkeypatch):
    """As many as `--processes`, with as many simulated devices as `--devices`, or jax's own."""
    started = []

    class ProcessGroup:
        def __init__(self, command, environments):
            started.append((command, environments))

        def wait(self):
            return 7

    def start(*flags):
        words = ["launch.local", *flags, "--", sys.executable, "--own=flag"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            local_module.main()
        assert ended.value.code == 7
        command, environments = started.pop()
        assert command == [sys.executable, "--own=flag"]
        return environments

    monkeypatch.setattr(local_module, "ProcessGroup", ProcessGroup)
    monkeypatch.setenv("XLA_FLAGS", "--own_flag=1")
    assert [environment["JAX_NUM_PROCESSES"] for environment in start()] == ["2", "2"]
    environments = start("--processes=3", "--devices=5")
    assert [environment["JAX_PROCESS_ID"] for environment in environments] == ["0", "1", "2"]
    assert len({environment["JAX_COORDINATOR_ADDRESS"] for environment in environments}) == 1
    for environment in environments:
        assert environment["JAX_NUM_PROCESSES"] == "3" and environment["JAX_PLATFORMS"] == "cpu"
        assert environment["XLA_FLAGS"] == "--own_flag=1 --xla_force_host_platform_device_count=5"
    for environment in start("--processes=1"):
        assert not environment.keys() & {"JAX_PLATFORMS", "XLA_FLAGS"}


def local(*arguments, **kwargs):
    command = [sys.executable, "-m", "launch.local", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        **kwargs,
    )


def finish(process):
    [ended] = processes.finish([process])
    return ended


@pytest.mark.full
def test_each_process_gets_the_addresses_of_the_others():
    code, out, err = finish(
        local("--processes=3", "--devices=2", "--", "sh", "-c", "env | grep -E '^(JAX|XLA)'")
    )
    assert code == 0
    [coordinator] = {
        line for line in out.splitlines() if line.startswith("JAX_COORDINATOR_ADDRESS=localhost:")
    }
    for number, lines in ((0, out), (1, err), (2, err)):
        prefix = "" if number == 0 else f"[{number}] "
        for line in (
            coordinator,
            "JAX_NUM_PROCESSES=3",
            f"JAX_PROCESS_ID={number}",
            "JAX_PLATFORMS=cpu",
        ):
            assert f"{prefix}{line}\n" in lines
    assert "force_host_platform_device_count=2" in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "expected", "reported"), [("exit 7", 7, "7"), ("kill -9 $$", 137, "SIGKILL")]
)
def test_when_one_dies_the_others_are_ended_and_its_exit_code_is_reported(how, expected, reported):
    script = f'trap "" TERM; test $JAX_PROCESS_ID = 1 && {how}; sleep 50'
    waits = "local._SECONDS_TO_NOTICE = local._SECONDS_AFTER_SIGTERM = 0.3"
    starter = f"from launch import local; {waits}; local.main()"
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", starter, "--", "sh", "-c", script],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
    )
    code, _, err = finish(process)
    assert code == expected and time.monotonic() - began < 20
    assert re.search(rf"\bprocess 1\b.*\b{reported}\b", err)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((1, -9), (2, -9)),
        ((75, 1), (2, 1)),
        ((-6, 1), (2, 1)),
        ((-6, -9), (2, -9)),
        ((75, -6), (1, 75)),
        ((0, 0), (0, 0)),
    ],
)
def test_of_several_that_are_dead_at_once_the_first_cause_is_reported(codes, expected):
    """Killed by a signal, a mistake, and then what comes of losing another; one that has not ended
    has not failed.
    """
    assert local_module.first_cause([None, *codes]) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (7, 7), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)],
)
def test_the_exit_code_is_that_of_a_shell(code, expected):
    """All processes have ended, the last one like this."""
    group = object.__new__(local_module.ProcessGroup)
    group._processes = [mock.Mock(poll=lambda: 0), mock.Mock(poll=lambda: code)]
    group._readers = []
    group._signalled = False
    assert group.wait() == expected


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_never_kills_what_saves(first):
    """The shell and the system both send SIGHUP.

    A second one of the others kills, as somebody is impatient.
    """
    sent = []
    group = object.__new__(local_module.ProcessGroup)
    group._signalled = False
    group._send = sent.append
    group._forward(first, None)
    group._forward(signal.SIGHUP, None)
    assert sent == [first]
    group._forward(signal.SIGTERM, None)
    assert sent == [first, signal.SIGKILL]


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_passed_on_once_and_all_are_waited_for(name, tmp_path):
    script = f"""
import os, signal, sys, time
arrived = []
signal.signal(signal.{name}, lambda number, frame: arrived.append(number))
open(f"{tmp_path}/ready" + os.environ["JAX_PROCESS_ID"], "w")
while not arrived:
    time.sleep(0.01)
time.sleep(0.5)  # As if a checkpoint were written.
# Otherwise a terminal's Ctrl-C would come beside the one that is passed on.
assert os.getsid(0) == os.getpid()
print("saved after", len(arrived), flush=True)
sys.exit(143)
"""
    with processes.that_notice_hangups():
        process = local("--", sys.executable, "-c", script, start_new_session=True)
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.Signals[name])  # As a terminal does it.
    code, out, err = finish(process)
    assert code == 143
    assert out == "saved after 1\n" and err == "[1] saved after 1\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], "command"), (["--procs=2", "--", "true"], "procs"), (["--", "no-such"], "no-such")],
)
def test_mistakes_are_named(arguments, expected):
    code, out, err = finish(local(*arguments))
    assert code == 2 and out == "" and expected in err.splitlines()[-1] and "error: " in err
