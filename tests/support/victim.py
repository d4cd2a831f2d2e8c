"""A program of this project with faults in it: `python victim.py MARKS FAULTS PROGRAM [flags]`.

MARKS is a descriptor that takes a line per mark: "ready" once everything is imported, "+NAME" where
a phase begins. FAULTS is a JSON list of objects. What they ask for happens at moments of the
program's own, so that a test can be repeated:

fault   "kill", "term" (SIGTERM), "full" (from then on no file may grow), or "clock" (from then on
        the clock is wrong)
at      when: a shell pattern of a file operation, such as "os.rename */config.json"
count   which of the operations that match, from 1
jump    for "clock": by how many seconds it is wrong
largest for "full": the number of bytes that a file may have
more    for "full", instead of largest: by how many bytes the run's log.txt may still grow, which is
        then the largest size of any file

Python reports its file operations to audit hooks before they are done. It does not report file
operations of other languages.
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

# Operations other than "open", and how many paths each has.
N_PATH = {"os.rename": 2, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "shutil.rmtree": 1}
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
        if not self.left:
            return
        operation = operation_of(event, args)
        if operation is None or not fnmatch.fnmatch(operation, self.plan["at"]):
            return
        self.left -= 1
        if not self.left:
            getattr(self, self.plan["fault"])()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def full(self) -> None:
        """Limits the size of files, which stops threads of any language, as a full disk would."""
        largest = self.plan.get("largest", 0)
        if "more" in self.plan:
            largest = (workdir() / "log.txt").stat().st_size + self.plan["more"]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))

    def clock(self) -> None:
        """The time of day jumps, and with it the time of every file of the run.

        Monotonic clocks do not jump.
        """
        seconds = self.plan["jump"]
        real_time = time.time
        real_time_ns = time.time_ns

        def moved_time():
            return real_time() + seconds

        def moved_time_ns():
            return real_time_ns() + seconds * 10**9

        mock.patch.object(time, "time", moved_time).start()
        mock.patch.object(time, "time_ns", moved_time_ns).start()
        for path in sorted(workdir().rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # Saving continues in another thread.
                moved = path.stat().st_mtime + seconds
                os.utime(path, (moved, moved))


def workdir() -> Path:
    (flag,) = (flag for flag in sys.argv if flag.startswith("--workdir="))
    return Path(flag.partition("=")[2])


def operation_of(event: str, args: tuple) -> str | None:
    """A file operation that changes something, such as "os.rename from to", or None."""
    if event == "open":
        path, _, flags = args
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return None
        return f"open {text(path)}"
    if event not in N_PATH:
        return None
    paths = args[: N_PATH[event]]
    return " ".join([event, *map(text, paths)])


def text(path) -> str:
    """A path or a descriptor as text."""
    if isinstance(path, int):
        return str(path)
    return os.fsdecode(path)


if __name__ == "__main__":
    main()
