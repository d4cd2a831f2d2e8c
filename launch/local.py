r"""Starts a command as several processes on this machine, each as if on a host of its own.

    python -m launch.local --processes=2 --devices=4 -- \
        python -m experiments.enwik8 --flagfile=small --workdir=runs/two --data.file=enwik8-part

The processes find each other through environment variables that are set for them (JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES, JAX_PROCESS_ID). The output of process 0 is printed unchanged; lines of the others begin with their
number. When a process ends with an error the others are stopped, and its exit code is returned; of several that are
found dead at once, that of a process which was killed or failed by itself comes before one which only lost another.
SIGTERM and Ctrl-C are forwarded to all processes, once, and all are waited for; a second one kills them.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("processes", 2, "Processes to start.", lower_bound=1)
flags.DEFINE_integer(
    "devices", None, "Simulated CPU devices of each process; default: the devices that jax finds.", lower_bound=1
)
flags.DEFINE_bool("dry_run", False, "Print the commands and start nothing.")

# When one process is lost the others notice and report it themselves; after these times they get SIGTERM, then SIGKILL.
_SECONDS_TO_NOTICE = 15.0
_SECONDS_AFTER_SIGTERM = 5.0
_POLL_SECONDS = 0.1


def main() -> None:
    """Parses the flags and starts the processes."""
    if {"--help", "-h"} & set(sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]):
        print(f"{__doc__}\n{FLAGS.module_help(sys.argv[0])}")
        sys.exit(0)
    try:
        command = FLAGS(sys.argv)[1:]
    except flags.Error as error:
        _fail(error)
    if not command:
        _fail("no command was given; write it after --, as -- python -m experiments.enwik8 --workdir=runs/mine")
    environments = process_environments(FLAGS.processes, devices=FLAGS.devices, base=os.environ)
    if FLAGS.dry_run:
        for environment in environments:
            print(shell_line(command, environment))
        return
    sys.exit(ProcessGroup(command, environments).wait())


def process_environments(count: int, *, devices: int | None, base: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment variables of each process that are added to `base`."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]  # It is free at the moment.
    variables = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    if devices is not None:
        simulated = f"--xla_force_host_platform_device_count={devices}"
        variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{base.get('XLA_FLAGS', '')} {simulated}".strip()}
    return [variables | {"JAX_PROCESS_ID": str(number)} for number in range(count)]


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Formats a command with its environment variables as it could be typed.

    >>> shell_line(["echo", "a b"], {"X": "1"})
    "X=1 echo 'a b'"
    """
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


class ProcessGroup:
    """Several processes, from their start to the end of the last."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]):
        self._signalled = False
        self._handlers = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
        self._readers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for number, environment in enumerate(environments):
                self._start(number, command, os.environ | environment)
        except OSError as error:
            self._send(signal.SIGKILL)
            _fail(f"cannot start {command[0]} ({error.strerror}); give a program after --")

    def _start(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        output: dict[str, Any] = {} if number == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # A session of its own: else Ctrl-C in a terminal would reach it twice, from the terminal and from here.
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, text=True, errors="replace", **output
        )
        self._processes.append(process)
        if number:
            self._readers.append(threading.Thread(target=_print_lines, args=(number, process.stdout), daemon=True))
            self._readers[-1].start()

    def wait(self) -> int:
        """Waits for all processes; returns the exit code of the first that failed, as shells report it, or 0."""
        while self._first_failure() is None and self._are_running():
            time.sleep(_POLL_SECONDS)
        failed = self._first_failure()
        code = 0 if failed is None else self._processes[failed].returncode
        if code and not self._signalled:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with the exit code {code}"
            print(f"process {failed} {how}; the others are stopped", file=sys.stderr, flush=True)
        for number, seconds in (signal.SIGTERM, _SECONDS_TO_NOTICE), (signal.SIGKILL, _SECONDS_AFTER_SIGTERM):
            until = time.monotonic() + seconds
            while self._are_running() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            self._send(number)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return 128 - code if code < 0 else code

    def _are_running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def _first_failure(self) -> int | None:
        """Returns the failed process that is least likely a consequence of another's failure."""
        failed = [number for number, process in enumerate(self._processes) if process.poll()]
        return min(failed, key=lambda number: _consequence_rank(self._processes[number].returncode), default=None)

    def _forward(self, number: int, _: object) -> None:
        self._send(signal.SIGKILL if self._signalled else number)
        self._signalled = True

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)


def _print_lines(number: int, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"[{number}] {line}", end="", file=sys.stderr, flush=True)


def _consequence_rank(code: int) -> int:
    """Ranks how likely an exit code is that of a process which lost another: 75, or an abort by jax."""
    return 2 if code in (os.EX_TEMPFAIL, -signal.SIGABRT) else int(code > 0)


def _fail(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
