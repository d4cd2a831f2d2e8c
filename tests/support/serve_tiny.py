"""Serves the tiny model from a process of its own, whose memory is the server's alone; prints its port and waits.

python -m support.serve_tiny SESSIONS FOLDER LIMITS     (with tests/ on the path; it ends when its input does)
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
def in_its_own_process(
    folder: Path, *, num_sessions: int, limits: Limits
) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """The port of a server that keeps sessions in a folder, and its process."""
    given = [str(num_sessions), str(folder), json.dumps(dataclasses.asdict(limits))]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "support.serve_tiny", *given]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | path, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def resident_mib(process: "subprocess.Popen[str]") -> int:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    limits = Limits(**json.loads(sys.argv[3]))
    with (
        engine(store=make_store(limit=int(sys.argv[1]), folder=Path(sys.argv[2])), limits=limits, start=False) as made,
        served(made, Settings("tiny", limits=limits)) as port,
    ):
        print(port, flush=True)
        sys.stdin.read()
