"""A program of this project with faults in it: `python victim.py MARKS FAULTS PROGRAM [flags]`.

MARKS is a descriptor that takes a line per mark: "ready" once everything is imported, "+NAME" where
a phase begins. FAULTS is a JSON list of objects. What they ask for happens at moments of the
program's own, so that a test can be repeated:

fault   "kill", "term" (SIGTERM), "full" (from then on no file may grow), or "clock" (from then on
        the clock is wrong)
at      when: a pattern, as of the shell, of a file operation such as "os.rename */config.json"
count   which of the operations that match, from 1
jump    for "clock": by how many seconds it is wrong
largest for "full": the number of bytes that a file may have; 0: none
more    for "full", instead of largest: by how many bytes the run's log.txt may still grow; no file
        may become larger

Python reports its file operations to audit hooks, before they are done; those of other languages it
does not report.
"""

import contextlib
import fnmatch
import functools
import json
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from support import miniature
from txl_jax.runs import build
from txl_jax.runs.validation import Validation

PHASES = {
    "compiling": (build.Built, "compile_step"),
    "evaluating": (Validation, "evaluate"),
    "testing": (Validation, "make_results"),
}


def main() -> None:
    _, marks, faults, program, *flags = sys.argv
    sys.argv = [program, *flags]
    miniature.install()

    def mark(name):
        # One write: after a kill all of the line is there or nothing.
        os.write(int(marks), f"{name}\n".encode())

    for name, (owner, attribute) in PHASES.items():
        setattr(owner, attribute, marked(getattr(owner, attribute), mark, f"+{name}"))
    for fault in json.loads(faults):
        sys.addaudithook(AuditHook(fault))
    mark("ready")
    runpy.run_module(f"experiments.{program}", run_name="__main__", alter_sys=True)


def marked(function, mark, name):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        mark(name)
        return function(*args, **kwargs)

    return wrapper


class AuditHook:
    """An audit hook that waits for the operation of a fault, and then makes it."""

    def __init__(self, plan):
        self.plan = plan
        self.left = plan.get("count", 1)

    def __call__(self, event: str, args: tuple) -> None:
        if (
            self.left
            and (operation := operation_of(event, args))
            and fnmatch.fnmatch(operation, self.plan["at"])
        ):
            self.left -= 1
            if not self.left:
                getattr(self, self.plan["fault"])()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def full(self) -> None:
        """A limit on the size of files stops every thread, whatever the language, as a full disk
        would.
        """
        largest = self.plan.get("largest", 0)
        if "more" in self.plan:
            largest = (workdir() / "log.txt").stat().st_size + self.plan["more"]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))

    def clock(self) -> None:
        """The time of day jumps, and with it that of every file of the run; clocks that only ever
        go on do not.
        """
        for name in ("time", "time_ns"):
            real, jump = (
                getattr(time, name),
                self.plan["jump"] * (10**9 if name == "time_ns" else 1),
            )
            mock.patch.object(time, name, lambda real=real, jump=jump: real() + jump).start()
        for path in sorted(workdir().rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # Saving goes on in another thread.
                os.utime(path, (path.stat().st_mtime + self.plan["jump"],) * 2)


def workdir() -> Path:
    (flag,) = (flag for flag in sys.argv if flag.startswith("--workdir="))
    return Path(flag.partition("=")[2])


def operation_of(event: str, args: tuple) -> str | None:
    """A file operation that changes something, as "os.rename from to"; None for all else."""
    if event == "open":
        path, _, flags = args
        return f"open {text(path)}" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else None
    paths = {"os.rename": 2, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "shutil.rmtree": 1}.get(
        event
    )
    return " ".join([event, *map(text, args[:paths])]) if paths else None


def text(path) -> str:
    return str(path) if isinstance(path, int) else os.fsdecode(path)


if __name__ == "__main__":
    main()
