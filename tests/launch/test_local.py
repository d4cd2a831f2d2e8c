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


@pytest.fixture
def environments_of(monkeypatch):
    """A function that starts processes with some flags, and returns their environments.

    Nothing runs: the processes end with the code 7.
    """
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
    return start


def values_of(environments, name):
    """The value of a variable in each process."""
    return [environment[name] for environment in environments]


def test_two_processes_are_the_default(environments_of):
    assert values_of(environments_of(), "JAX_NUM_PROCESSES") == ["2", "2"]


def test_each_flag_reaches_the_processes(environments_of):
    """As many as `--processes`, with as many simulated devices as `--devices`."""
    environments = environments_of("--processes=3", "--devices=5")
    assert values_of(environments, "JAX_NUM_PROCESSES") == ["3", "3", "3"]
    assert values_of(environments, "JAX_PROCESS_ID") == ["0", "1", "2"]
    assert values_of(environments, "JAX_PLATFORMS") == ["cpu", "cpu", "cpu"]
    assert len(set(values_of(environments, "JAX_COORDINATOR_ADDRESS"))) == 1
    flags = "--own_flag=1 --xla_force_host_platform_device_count=5"
    assert values_of(environments, "XLA_FLAGS") == [flags, flags, flags]


def test_without_simulated_devices_the_processes_have_those_of_jax(environments_of):
    [environment] = environments_of("--processes=1")
    assert "JAX_PLATFORMS" not in environment
    assert "XLA_FLAGS" not in environment


def local(*arguments, **options):
    """Starts the launcher in a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.local", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
        **options,
    )


def finish(process):
    """Waits for a process. Returns its exit code, output and errors."""
    [ended] = processes.finish([process])
    return ended


@pytest.mark.full
def test_each_process_gets_the_addresses_of_the_others():
    """The output of each process but the first has its number in front."""
    code, out, err = finish(
        local("--processes=3", "--devices=2", "--", "sh", "-c", "env | grep -E '^(JAX|XLA)'")
    )
    assert code == 0, err
    [coordinator] = re.findall(r"(?m)^JAX_COORDINATOR_ADDRESS=localhost:.*", out)
    assert "force_host_platform_device_count=2" in out
    for number, prefix, lines in ((0, "", out), (1, "[1] ", err), (2, "[2] ", err)):
        assert f"{prefix}{coordinator}\n" in lines
        assert f"{prefix}JAX_NUM_PROCESSES=3\n" in lines
        assert f"{prefix}JAX_PROCESS_ID={number}\n" in lines
        assert f"{prefix}JAX_PLATFORMS=cpu\n" in lines


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "expected", "reported"),
    [("exit 7", 7, "7"), ("kill -9 $$", 137, "SIGKILL")],
    ids=["exit code", "signal"],
)
def test_when_one_dies_the_others_are_ended_and_its_exit_code_is_reported(how, expected, reported):
    # Both processes ignore SIGTERM, so that the one that is left must be killed. It would sleep
    # longer than the 20 seconds below.
    script = f'trap "" TERM; test $JAX_PROCESS_ID = 1 && {how}; sleep 50'
    waits = "local._SECONDS_TO_NOTICE = local._SECONDS_AFTER_SIGTERM = 0.3"
    starter = f"from launch import local; {waits}; local.main()"
    command = [sys.executable, "-c", starter, "--", "sh", "-c", script]

    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    code, _, err = finish(process)

    assert code == expected
    assert time.monotonic() - began < 20
    assert re.search(rf"\bprocess 1\b.*\b{reported}\b", err)


# Exit codes of processes 1 and 2, and the number and exit code of the one that is reported. A
# process that loses another exits with 75, or jax aborts it (-6).
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
    ids=str,
)
def test_of_several_that_are_dead_at_once_the_first_cause_is_reported(codes, expected):
    """Killed by a signal, a mistake, and then what comes of losing another. Process 0 has not
    ended, and so has not failed.
    """
    assert local_module.first_cause([None, *codes]) == expected


def group_of(*processes):
    """A group of processes that were not started by it."""
    group = object.__new__(local_module.ProcessGroup)
    group._processes = list(processes)
    group._readers = []
    group._signalled = False
    return group


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, 0), (7, 7), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)],
)
def test_the_exit_code_is_that_of_a_shell(code, expected):
    """All processes have ended, the last one like this."""
    group = group_of(mock.Mock(poll=lambda: 0), mock.Mock(poll=lambda: code))
    assert group.wait() == expected


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_never_kills_what_saves(first):
    """The shell and the system both send SIGHUP.

    A second one of the other signals kills, because somebody is impatient.
    """
    group = group_of()
    sent = []
    group._send = sent.append

    group._forward(first, None)
    group._forward(signal.SIGHUP, None)
    assert sent == [first]

    group._forward(signal.SIGTERM, None)
    assert sent == [first, signal.SIGKILL]


# A process that saves for half a second after the signals {name}.
SAVES = """
import os, signal, sys, time
arrived = []
signal.signal(signal.{name}, lambda number, frame: arrived.append(number))
open("{folder}/ready" + os.environ["JAX_PROCESS_ID"], "w")
while not arrived:
    time.sleep(0.01)
time.sleep(0.5)  # As if a checkpoint were written.
# Otherwise a terminal's Ctrl-C would come with the one that is passed on.
assert os.getsid(0) == os.getpid()
print("saved after", len(arrived), flush=True)
sys.exit(143)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_passed_on_once_and_all_are_waited_for(name, tmp_path):
    script = SAVES.format(name=name, folder=tmp_path)
    with processes.that_notice_hangups():
        process = local("--", sys.executable, "-c", script, start_new_session=True)
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)

    os.killpg(process.pid, signal.Signals[name])  # As a terminal does it.
    code, out, err = finish(process)

    assert code == 143
    assert out == "saved after 1\n"
    assert err == "[1] saved after 1\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], "command"), (["--procs=2", "--", "true"], "procs"), (["--", "no-such"], "no-such")],
    ids=["no command", "unknown flag", "unknown command"],
)
def test_mistakes_are_named(arguments, expected):
    code, out, err = finish(local(*arguments))
    assert code == 2
    assert out == ""
    assert "error: " in err
    assert expected in err.splitlines()[-1]
