r"""Starts a command as multiple processes on this machine, each as if on a separate host.

    python -m launch.local --processes=2 --devices=4 -- \
        python -m experiments.enwik8 --flagfile=small --workdir=runs/two --data.file=enwik8-part

The processes find each other through environment variables that are set for them
(JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID). The output of process 0 is printed
unchanged. Lines of the others begin with their number. If a process fails, the others are stopped
and its exit code is returned. If multiple are found dead at once, a process that was killed or
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

# When one process is lost the others notice and report it themselves; after these times they get
# SIGTERM, then SIGKILL.
_SECONDS_TO_NOTICE = 15.0
_SECONDS_AFTER_SIGTERM = 5.0
_POLL_SECONDS = 0.1


def main() -> None:
    """Parses the flags and starts the processes."""
    output.prepare()
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "launch.local", description=__doc__, formatter_class=how, allow_abbrev=False
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", default=2, help="processes to start (default: 2)"
    )
    devices = "simulated CPU devices per process (default: jax's devices)"
    parser.add_argument("--devices", type=int, metavar="N", help=devices)
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    given = parser.parse_args()
    if given.processes < 1 or (given.devices or 1) < 1:
        parser.error(
            f"--processes and --devices must be at least 1, got {given.processes} and "
            f"{given.devices}"
        )
    if not shutil.which(given.command[0]):
        advice = "Pass one after --, such as -- python -m experiments.enwik8."
        parser.error(f"{given.command[0]} is not a program. {advice}")
    environments = process_environments(given.processes, devices=given.devices, base=os.environ)
    sys.exit(ProcessGroup(given.command, environments).wait())


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
            # A session of its own: else Ctrl-C in a terminal would reach it twice, from the
            # terminal and from here.
            how: dict[str, Any] = {"env": os.environ | environment, "start_new_session": True}
            if number > 0:
                how |= {
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.STDOUT,
                    "text": True,
                    "errors": "replace",
                }
            process = subprocess.Popen(command, **how)
            self._processes.append(process)
            if number > 0:
                self._readers.append(
                    threading.Thread(
                        target=_print_lines, args=(number, process.stdout), daemon=True
                    )
                )
                self._readers[-1].start()

    def wait(self) -> int:
        """Waits for all processes.

        Returns the exit code of the first that failed, as shells report it, or 0.
        """
        while None in (codes := self._codes()) and not any(codes):
            time.sleep(_POLL_SECONDS)
        cause, code = first_cause(codes)
        if code and not self._signalled:
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            print(f"process {cause} {how}, stopping the others", file=sys.stderr, flush=True)
        for number, seconds in (
            (signal.SIGTERM, _SECONDS_TO_NOTICE),
            (signal.SIGKILL, _SECONDS_AFTER_SIGTERM),
        ):
            until = time.monotonic() + seconds
            while None in self._codes() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            self._send(number)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=1)
        return 128 - code if code < 0 else code

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _forward(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and self._signalled:
            return  # A closed terminal: the shell and the system both send it.
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
    lost_another = os.EX_TEMPFAIL, -signal.SIGABRT  # As it says itself, or aborted by jax.
    failed = ((number, code) for number, code in enumerate(codes) if code)
    return min(
        failed, key=lambda each: 2 if each[1] in lost_another else int(each[1] > 0), default=(0, 0)
    )


def _print_lines(number: int, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"[{number}] {line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
