"""A server over the tiny model in a thread of the test, and plain requests to it."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from support.serving import SECONDS
from support.waiting import wait_until
from txl_jax.serving.app import Settings, make_app
from txl_jax.serving.engine import Engine


@contextlib.contextmanager
def served(made: Engine, settings: Settings) -> Iterator[int]:
    """The port of a server with an engine that is not started."""
    # A client of a busy machine may take long to its next request.
    seconds = {"timeout_keep_alive": SECONDS, "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(make_app(made, settings), port=0, log_level="warning", **seconds))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_until(lambda: (server.started and made.ready) or not thread.is_alive(), SECONDS)
    assert thread.is_alive()
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(SECONDS)
    assert not thread.is_alive()


def ask(port: int, path: str, body: Any = None, *, method=None, key=None, headers=None) -> tuple[int, Any]:
    """Status and body of a response, as JSON where it is; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}) | (headers or {})
    connection.request(method or ("GET" if body is None else "POST"), path, raw, sent)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = (response.getheader("content-type") or "").startswith("application/json")
    return response.status, json.loads(content) if is_json else content.decode()


def events(text: str) -> list[Any]:
    """The events of a stream that has ended."""
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def metrics(port: int) -> dict[str, float]:
    """The figures of a server, as Prometheus reads them."""
    lines = ask(port, "/metrics")[1].splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def wait_idle(port: int) -> None:
    """Waits until all rows are free and no session is in use."""

    def idle() -> bool:
        found = metrics(port)
        sessions = ask(port, "/v1/sessions")[1]["data"]
        return not (found["txl_rows_busy"] or found["txl_choices_waiting"] or any(each["busy"] for each in sessions))

    wait_until(idle, SECONDS)
