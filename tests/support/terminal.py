"""A reader's terminal: a shell and a Python that stay open, in one directory."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

# Runs the blocks that it reads, each on a line of JSON, in one namespace. Writes 0 after each.
_PYTHON = """
import json, os, sys
names = {"__name__": "page"}
for line in sys.stdin:
    place, source = json.loads(line)
    exec(compile(source, place, "exec"), names)
    os.write(int(sys.argv[1]), b"0\\n")
"""


class TerminalError(Exception):
    """What was run failed, ended the process or took too long."""


class Terminal:
    """Runs shell commands and Python blocks in a directory, one after the other.

    Variables of the shell, and names of Python, last until the terminal is closed.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], log: Path):
        self._folder = folder
        self._environment = environment
        self._log = log
        self._shell = self._open(["bash", "-e", "-o", "pipefail", "-s"])
        self._python: _Process | None = None
        self._n_started = 0

    def run(self, command: str, seconds: float) -> None:
        """Runs a shell command.

        Raises:
          TerminalError: If it fails, or after these seconds.
        """
        # A command must not read the commands behind it.
        report = f"echo $? >&{self._shell.report}"
        self._shell.run(f"{{\n{command}\n}} </dev/null\n{report}\n", seconds)

    def run_python(self, place: str, source: str, seconds: float) -> None:
        """Runs a block of Python. `place` is where it stands, for tracebacks.

        Raises:
          TerminalError: If it raises, or after these seconds.
        """
        if self._python is None:
            self._python = self._open(["python", "-u", "-c", _PYTHON])
        self._python.run(json.dumps([place, source]) + "\n", seconds)

    def start(self, command: str, answers: str | None, seconds: float) -> None:
        """Starts a shell command that does not end, such as a server.

        Returns once the URL `answers` responds, or after a second if it is None.

        Raises:
          TerminalError: If the command ends, or does not answer after these seconds.
        """
        self._n_started += 1
        self.run(f"{{\n{command}\n}} </dev/null &\nstarted_{self._n_started}=$!", seconds)
        end = time.monotonic() + seconds
        time.sleep(1)
        while answers and not _does_answer(answers):
            self.check_started()
            if time.monotonic() > end:
                raise TerminalError(f"{answers} does not answer after {seconds:.0f} s")
            time.sleep(0.2)
        self.check_started()

    def check_started(self) -> None:
        """Checks that what was started runs.

        Raises:
          TerminalError: If a command has ended.
        """
        for number in range(1, self._n_started + 1):
            self.run(f"kill -0 $started_{number}", seconds=10)

    def close(self) -> None:
        """Ends the shell, the Python and all that they have started."""
        self._shell.close()
        if self._python is not None:
            self._python.close()

    def _open(self, words: list[str]) -> "_Process":
        return _Process(words, self._folder, self._environment, self._log)


class _Process:
    """A process that reads from its standard input what it should run, and writes an exit code
    for each piece into a pipe.
    """

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str], log: Path):
        # The number of the pipe's end is the same in the process. It is its last argument.
        self._codes, self.report = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, str(self.report)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[self.report],
                start_new_session=True,
            )
        os.close(self.report)

    def run(self, text: str, seconds: float) -> None:
        """Runs a piece.

        Raises:
          TerminalError: If its exit code is not 0, if the process ends, or after these seconds.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended, and `_code` says how.
            self._process.stdin.write(text)
            self._process.stdin.flush()
        code = self._code(seconds)
        if code != 0:
            raise TerminalError(f"exit code {code}")

    def _code(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_readable, _, _ = select.select([self._codes], [], [], 0.1)
            if is_readable:
                code = os.read(self._codes, 16)
                if code:
                    return int(code)
            ended = self._process.poll()
            if ended is not None:
                return ended or 1  # It should not have ended, whatever its code.
        raise TerminalError(f"not done after {seconds:.0f} s")

    def close(self) -> None:
        """Ends the process and all that it has started."""
        # Servers end in order after SIGTERM.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._codes)


def _does_answer(url: str) -> bool:
    """Returns whether a URL answers, with an error of the client's or none."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
