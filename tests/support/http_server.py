"""A server over the tiny model, in a thread of the test or in a separate process, and requests to
it.

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

    `most` and `times` are passed to `Connections`.
    """
    times = {"header_seconds": SECONDS, "stalled_seconds": SECONDS, "sweep_seconds": 0.05} | times
    store = make_store(limit=sessions, limit_per_owner=sessions)
    with engine(store=store, limits=limits, start=False) as made:
        application = make_app(made, "tiny", hosts=hosts, keys=keys)
        connections = Connections(most, count=application.state.count, **times)
        settings = uvicorn.Config(
            application,
            http=connections.make,
            ws="none",
            port=0,
            log_level="warning",
            # A client of a busy machine may take long to its next request.
            timeout_keep_alive=SECONDS,
            timeout_graceful_shutdown=5,
        )
        running = uvicorn.Server(settings)
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
    """Asks a server, and returns the status and body of its response.

    A body that is not bytes is sent as JSON. A response of type JSON is parsed. Without `method`, a
    request with a body is a POST, and one without is a GET.
    """
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    if method is None:
        method = "GET" if body is None else "POST"
    sent_headers = {"Content-Type": "application/json"}
    if key:
        sent_headers["Authorization"] = f"Bearer {key}"
    sent_headers |= headers or {}

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, content, sent_headers)
    response = connection.getresponse()
    answer = response.read()
    connection.close()

    if (response.getheader("content-type") or "").startswith("application/json"):
        return response.status, json.loads(answer)
    return response.status, answer.decode()


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
    """Joins the parts of an answer.

    Returns, for each choice, the text, the reason of the end, and the tokens with their logprobs.
    """
    choices: dict[int, tuple] = collections.defaultdict(lambda: ("", None, []))
    for part in parts:
        for choice in part["choices"]:
            text, _, scores = choices[choice["index"]]
            if choice["logprobs"]:
                tokens = choice["logprobs"]["tokens"]
                logprobs = choice["logprobs"]["token_logprobs"]
                scores = [*scores, *zip(tokens, logprobs, strict=True)]
            choices[choice["index"]] = (text + choice["text"], choice["finish_reason"], scores)
    return [choices[index] for index in range(len(choices))]


def metrics(port: int) -> dict[str, float]:
    """Returns the values of the server's metrics, by name with labels."""
    status, text = ask(port, "/metrics")
    assert status == 200, text
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def wait_idle(port: int) -> None:
    """Waits until all rows are free and no session is in use."""

    def idle() -> bool:
        values = metrics(port)
        status, answer = ask(port, "/v1/sessions")
        assert status == 200, answer
        if values["txl_rows_busy"] or values["txl_choices_waiting"]:
            return False
        return not any(session["busy"] for session in answer["data"])

    wait_until(idle, SECONDS)


@contextlib.contextmanager
def in_its_own_process(
    *, num_sessions: int, limits: ServerLimits
) -> Iterator[tuple[int, subprocess.Popen]]:
    """The port of a server in a separate process, and the process."""
    words = [str(num_sessions), json.dumps(dataclasses.asdict(limits))]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.http_server", *words],
        cwd=ROOT,
        env=os.environ | ON_PATH,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


class Program:
    """The program that serves a run, with two rows, once it is ready for requests."""

    def __init__(self, model: Path, *flags: str, change: str = "", **variables: str):
        """Starts it, after a change of its modules in Python."""
        start = "runpy.run_module('experiments.serve', run_name='__main__', alter_sys=True)"
        code = f"{change}\nimport runpy\n{start}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, f"--model={model}", "--port=0", "--rows=2", *flags],
            cwd=ROOT,
            env=os.environ | ON_PATH | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = self._announced_port()
        wait_until(lambda: ask(self.port, "/readyz")[0] == 200, SECONDS)

    def _announced_port(self) -> int:
        for line in self.process.stdout:
            if line.startswith("listening"):
                return int(line.rpartition(":")[2])
        raise AssertionError(self.process.stderr.read())

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        self.last_lines, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


def resources(process: subprocess.Popen) -> tuple[int, int]:
    """The memory of a process in MiB, and the number of files that it has open."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir(f"/proc/{process.pid}/fd"))


def check_as_before(process: subprocess.Popen, before: tuple[int, int]) -> None:
    """Asserts that a server has closed its files and freed nearly all of its memory since `before`.

    `before` is what `resources` returned then.
    """
    wait_until(lambda: resources(process)[1] <= before[1])
    memory, files = resources(process)
    print(
        f"the server's memory {before[0]} MiB, then {memory} MiB; "
        f"open files {before[1]}, then {files}"
    )
    assert memory <= 1.05 * before[0]


def main(sessions: str, limits: str) -> None:
    with server(limits=ServerLimits(**json.loads(limits)), sessions=int(sessions)) as (port, _):
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
