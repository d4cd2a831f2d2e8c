"""Starts a command as multiple processes with made-up CPU devices, as if each were a host."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from launch.local import process_environments
from support import ON_PATH, ROOT

SECONDS = 120  # Longer is a hang.


def start(*arguments, processes=2, devices=4, of_process=lambda number: (), **variables):
    """Starts the processes. `of_process` returns further arguments for each number."""
    environments = process_environments(processes, devices=devices, base=os.environ)
    started = []
    for number, environment in enumerate(environments):
        command = [sys.executable, *map(str, arguments), *of_process(number)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | ON_PATH | environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    return started


@contextlib.contextmanager
def that_notice_hangups():
    """Processes that are started in the block get SIGHUP, also if `nohup` has started the tests."""
    # A new program begins with the default.
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_for(condition, started, *, seconds=SECONDS):
    """Returns once the condition holds.

    If a process ends before, it ends the others and shows what all of them printed.
    """
    end = time.monotonic() + seconds
    while not condition():
        are_running = all(process.poll() is None for process in started)
        assert are_running and time.monotonic() < end, finish(started)
        time.sleep(0.02)


def finish(started, *, seconds=SECONDS):
    """Returns exit code, output and errors of each process, of which none may hang."""
    try:
        ended = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, ended, strict=True)]
