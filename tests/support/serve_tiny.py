"""Serves the tiny model from a process of its own, whose memory is the server's alone; prints its port and waits.

python -m support.serve_tiny SESSIONS FOLDER     (with tests/ on the path; it ends when its input does)
"""

import sys
from pathlib import Path

from support.http_server import served
from support.serving import FEW, engine, make_store
from txl_jax.serving.app import Settings

if __name__ == "__main__":
    with (
        engine(store=make_store(limit=int(sys.argv[1]), folder=Path(sys.argv[2])), limits=FEW, start=False) as made,
        served(made, Settings("tiny", limits=FEW)) as port,
    ):
        print(port, flush=True)
        sys.stdin.read()
