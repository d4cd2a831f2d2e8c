"""Serves the tiny model from a process of its own, whose memory is the server's alone; prints its port and waits.

python -m support.serve_tiny SESSIONS LIMITS     (with tests/ on the path; it ends when its input does)
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support import ROOT
from support.http_server import served
from support.serving import SECONDS, engine, make_store
from txl_jax.serving.app import Settings
from txl_jax.serving.requests import Limits


@contextlib.contextmanager
def in_its_own_process(*, num_sessions: int, limits: Limits) -> Iterator[tuple[int, subprocess.Popen]]:
    """The port of a server, and its process."""
    given = [str(num_sessions), json.dumps(dataclasses.asdict(limits))]
    command = [sys.executable, "-m", "support.serve_tiny", *given]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | path, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def resident_mib(process: subprocess.Popen) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    limits = Limits(**json.loads(sys.argv[2]))
    store = make_store(limit=int(sys.argv[1]))
    with engine(store=store, limits=limits, start=False) as made, served(made, Settings("tiny", limits=limits)) as port:
        print(port, flush=True)
        sys.stdin.read()
