"""A server over the tiny model in a thread of the test or in a process of its own, and plain
requests to it.

`python -m support.http_server SESSIONS LIMITS`, with tests/ on the path, prints its port, and ends
when its input does.
"""

import asyncio
import collections
import contextlib
import dataclasses
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from support import ON_PATH, ROOT
from support.serving import SECONDS, engine, make_store
from support.waiting import wait_until
from txl_jax.serving.app import make_app
from txl_jax.serving.connections import Connections
from txl_jax.serving.engine import Engine, ServerLimits
from txl_jax.serving.middleware import LOOPBACK


@contextlib.contextmanager
def server(
    *,
    limits: ServerLimits | None = None,
    sessions: int = 8,
    keys=(),
    hosts=LOOPBACK,
    most: int = 1000,
    **times: float,
) -> Iterator[tuple[int, Engine]]:
    """The port of a server over the tiny model, and its engine.

    `most` and `times` are those of `Connections`.
    """
    # A client of a busy machine may take long to its next request.
    options = {
        "timeout_keep_alive": SECONDS,
        "timeout_graceful_shutdown": 5,
        "port": 0,
        "log_level": "warning",
    }
    times = {"header_seconds": SECONDS, "stalled_seconds": SECONDS, "sweep_seconds": 0.05} | times
    with engine(
        store=make_store(limit=sessions, limit_per_owner=sessions), limits=limits, start=False
    ) as made:
        application = make_app(made, "tiny", hosts=hosts, keys=keys)
        connections = Connections(most, count=application.state.count, **times)
        running = uvicorn.Server(
            uvicorn.Config(application, http=connections.make, ws="none", **options)
        )
        thread = threading.Thread(target=lambda: asyncio.run(running.serve()), daemon=True)
        thread.start()
        wait_until(lambda: (running.started and made.ready) or not thread.is_alive(), SECONDS)
        assert thread.is_alive()
        yield running.servers[0].sockets[0].getsockname()[1], made
        running.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def complete(port: int, **body: Any) -> tuple[int, Any]:
    return ask(port, "/v1/completions", {"prompt": "abc", **body})


def ask(
    port: int, path: str, body: Any = None, *, method=None, key=None, headers=None
) -> tuple[int, Any]:
    """Status and body of a response, as JSON where it is; a body that is no bytes is sent as
    JSON.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = (
        {"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {key}"} if key else {})
        | (headers or {})
    )
    connection.request(method or ("GET" if body is None else "POST"), path, raw, sent)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = (response.getheader("content-type") or "").startswith("application/json")
    return response.status, json.loads(content) if is_json else content.decode()


@contextlib.contextmanager
def left(port: int, body: Any) -> Iterator[http.client.HTTPConnection]:
    """The connection of a request for a text whose client leaves at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    yield connection
    connection.sock.close()
    connection.close()


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def joined(parts: list[Any]) -> list[tuple[str, str, list[Any]]]:
    """The text, the reason of the end, and the tokens with their logprobs of each choice in the
    parts of an answer.
    """
    found: dict[int, tuple] = collections.defaultdict(lambda: ("", None, []))
    for choice in (choice for part in parts for choice in part["choices"]):
        text, _, scores = found[choice["index"]]
        own = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        scores = scores + list(zip(own["tokens"], own["token_logprobs"], strict=True))
        found[choice["index"]] = text + choice["text"], choice["finish_reason"], scores
    return [found[index] for index in range(len(found))]


def metrics(port: int) -> dict[str, float]:
    lines = ask(port, "/metrics")[1].splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def wait_idle(port: int) -> None:
    """Waits until all rows are free and no session is in use."""

    def idle() -> bool:
        found = metrics(port)
        sessions = ask(port, "/v1/sessions")[1]["data"]
        return not (
            found["txl_rows_busy"]
            or found["txl_choices_waiting"]
            or any(each["busy"] for each in sessions)
        )

    wait_until(idle, SECONDS)


@contextlib.contextmanager
def in_its_own_process(
    *, num_sessions: int, limits: ServerLimits
) -> Iterator[tuple[int, subprocess.Popen]]:
    given = [str(num_sessions), json.dumps(dataclasses.asdict(limits))]
    command = [sys.executable, "-m", "support.http_server", *given]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ON_PATH, stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


class Program:
    """The program that serves a run, with two rows; ready for requests."""

    def __init__(self, model: Path, *flags: str, change: str = "", **variables: str):
        """Starts it, after a change of its modules in Python."""
        code = (
            f"{change}\nimport runpy\nrunpy.run_module('experiments.serve', run_name='__main__', "
            "alter_sys=True)"
        )
        command = [sys.executable, "-c", code, f"--model={model}", "--port=0", "--rows=2", *flags]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ON_PATH | variables, **pipes
        )
        address = next((line for line in self.process.stdout if line.startswith("listening")), None)
        assert address, self.process.stderr.read()
        self.port = int(address.rpartition(":")[2])
        wait_until(lambda: ask(self.port, "/readyz")[0] == 200, SECONDS)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        self.last_lines, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


def resources(process: subprocess.Popen) -> tuple[int, int]:
    """The memory of a process in MiB, and the number of files that it has open."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir(f"/proc/{process.pid}/fd"))


def check_as_before(process: subprocess.Popen, before: tuple[int, int]) -> None:
    """Asserts that a server has given back the files and nearly all of the memory that it used
    since.
    """
    wait_until(lambda: resources(process)[1] <= before[1])
    memory, files = resources(process)
    print(
        f"the server's memory {before[0]} MiB, then {memory} MiB; "
        f"open files {before[1]}, then {files}"
    )
    assert memory <= 1.05 * before[0]


if __name__ == "__main__":
    with server(limits=ServerLimits(**json.loads(sys.argv[2])), sessions=int(sys.argv[1])) as (
        port,
        _,
    ):
        print(port, flush=True)
        sys.stdin.read()
