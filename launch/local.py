r"""Starts a command as multiple processes on this machine, each as if on a separate host.

    python -m launch.local --processes=2 --devices=4 -- \
        python -m experiments.enwik8 --flagfile=small --workdir=runs/two --data.file=enwik8-part

The processes find each other through environment variables that are set for them
(JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID). The output of process 0 is printed
unchanged. Lines of the other processes begin with their number. If a process fails, the others are
stopped and its exit code is returned. If several have failed at once, a process that was killed or
failed by itself takes precedence over one that only lost another. The first SIGTERM, SIGHUP or
Ctrl-C is forwarded to all processes, and the command waits for them. A second one kills them.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from txl_jax.runtime import output

# When one process is lost, the others notice and report it themselves. After these times they get
# SIGTERM, then SIGKILL.
_SECONDS_TO_NOTICE = 15.0
_SECONDS_AFTER_SIGTERM = 5.0
_POLL_SECONDS = 0.1


def main() -> None:
    """Parses the flags and starts the processes."""
    output.prepare()
    parser = argparse.ArgumentParser(
        "launch.local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", default=2, help="processes to start (default: 2)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="simulated CPU devices per process (default: the devices that jax finds)",
    )
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    flags = parser.parse_args()
    if flags.processes < 1 or (flags.devices or 1) < 1:
        parser.error(
            f"--processes and --devices must be at least 1, got {flags.processes} and "
            f"{flags.devices}"
        )
    if not shutil.which(flags.command[0]):
        parser.error(
            f"{flags.command[0]} is not a program. Pass one after --, such as -- python -m "
            "experiments.enwik8."
        )
    environments = process_environments(flags.processes, devices=flags.devices, base=os.environ)
    sys.exit(ProcessGroup(flags.command, environments).wait())


def process_environments(
    count: int, *, devices: int | None, base: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the environment variables to add to `base` for each process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]  # It is free at the moment.
    variables = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    if devices is not None:
        simulated = f"--xla_force_host_platform_device_count={devices}"
        variables |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{base.get('XLA_FLAGS', '')} {simulated}".strip(),
        }
    return [variables | {"JAX_PROCESS_ID": str(number)} for number in range(count)]


class ProcessGroup:
    """A group of processes, from their start to the end of the last."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]):
        self._signalled = False
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        signal.signal(signal.SIGTERM, self._forward)
        signal.signal(signal.SIGINT, self._forward)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Not if started by nohup.
            signal.signal(signal.SIGHUP, self._forward)
        for number, environment in enumerate(environments):
            self._start(command, number, environment)

    def _start(self, command: Sequence[str], number: int, environment: Mapping[str, str]) -> None:
        # A separate session: otherwise Ctrl-C in a terminal would reach the process twice, from the
        # terminal and from `_forward`.
        options: dict[str, Any] = {"env": os.environ | environment, "start_new_session": True}
        if number == 0:
            self._processes.append(subprocess.Popen(command, **options))
            return

        # A thread prints the output of each process except the first, with its number.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **options,
        )
        self._processes.append(process)
        reader = threading.Thread(target=_print_lines, args=(number, process.stdout), daemon=True)
        self._readers.append(reader)
        reader.start()

    def wait(self) -> int:
        """Waits for all processes.

        Returns the exit code of the first that failed, as shells report it, or 0.
        """
        codes = self._codes()
        while None in codes and not any(codes):
            time.sleep(_POLL_SECONDS)
            codes = self._codes()

        cause, code = first_cause(codes)
        if code and not self._signalled:
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            else:
                how = f"exited with code {code}"
            print(f"process {cause} {how}, stopping the others", file=sys.stderr, flush=True)

        self._stop_after(_SECONDS_TO_NOTICE, signal.SIGTERM)
        self._stop_after(_SECONDS_AFTER_SIGTERM, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=1)
        # Shells report a signal as 128 + its number.
        return 128 - code if code < 0 else code

    def _stop_after(self, seconds: float, number: int) -> None:
        """Waits this long for the processes to end, then sends a signal to the remaining ones."""
        until = time.monotonic() + seconds
        while None in self._codes() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        self._send(number)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _forward(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and self._signalled:
            return  # When a terminal closes, the shell and the system both send it.
        self._send(signal.SIGKILL if self._signalled else number)
        self._signalled = True

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)


def first_cause(codes: Sequence[int | None]) -> tuple[int, int]:
    """Returns the number and exit code of the process that most likely caused the failure.

    This is the process whose failure is least likely caused by another's.
    """
    # The codes of a process that lost another: its own, or the one with which jax aborts it.
    lost_another = (os.EX_TEMPFAIL, -signal.SIGABRT)

    def rank(failure: tuple[int, int]) -> int:
        _, code = failure
        if code in lost_another:
            return 2
        # A process that was killed comes before one that ended with an error.
        return 1 if code > 0 else 0

    failures = [(number, code) for number, code in enumerate(codes) if code]
    return min(failures, key=rank, default=(0, 0))


def _print_lines(number: int, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"[{number}] {line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
