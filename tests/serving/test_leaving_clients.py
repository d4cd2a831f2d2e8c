"""Tests clients that leave early: before their first piece, while their prompt is read, before they are understood."""

import asyncio
import contextlib
import http.client
import json
import threading
import time

import pytest
from starlette.requests import ClientDisconnect

from support.http_server import ask, served
from support.serving import SECONDS, engine, make_store
from txl_jax.serving import protocol
from txl_jax.serving.app import Settings, make_app
from txl_jax.serving.requests import Limits

LIMITS = Limits(prompt_tokens=5000, new_tokens=4000)
NEIGHBOUR = {"prompt": "abc", "max_tokens": 60, "seed": 4, "logprobs": 1}
LONG = "abcdefgh" * 100


@pytest.fixture(scope="module")
def made():
    with engine(store=make_store(), limits=LIMITS, start=False) as stopped:
        yield stopped


@pytest.fixture(scope="module")
def port(made):
    with served(made, Settings("tiny", limits=LIMITS)) as number:
        yield number


class Gate:
    """A function that waits at its n-th call until it is let through."""

    def __init__(self, function, *, call=1):
        self.function, self.call, self.calls = function, call, 0
        self.reached, self.through = threading.Event(), threading.Event()

    def __call__(self, *arguments, **named):
        self.calls += 1
        if self.calls == self.call:
            self.reached.set()
            self.through.wait(SECONDS)
        return self.function(*arguments, **named)


@contextlib.contextmanager
def gate(owner, name, **call):
    """A gate in place of a function."""
    found, before = Gate(getattr(owner, name), **call), getattr(owner, name)
    setattr(owner, name, found)
    try:
        yield found
    finally:
        found.through.set()
        setattr(owner, name, before)


@contextlib.contextmanager
def sent(port, body):
    """A request whose client leaves at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    yield
    connection.close()


def wait_until(condition):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def answer(port, body):
    status, found = ask(port, "/v1/completions", body)
    assert status == 200
    return found["choices"]


class Case:
    """A session with a text, a neighbour, and what must be as before when the others have left."""

    def __init__(self, port, made):
        self.port, self.made = port, made
        self.expected = answer(port, NEIGHBOUR)
        self.name = ask(port, "/v1/sessions", {})[1]["id"]
        answer(port, {"session": self.name, "prompt": "abc", "max_tokens": 5})
        self.state = made.store.get(self.name, "").state
        self.cancelled = made.counters.ended["cancelled"]
        self.found = []
        self.neighbour = threading.Thread(target=lambda: self.found.append(answer(port, NEIGHBOUR)))

    def body(self, **changes):
        return {"session": self.name, "prompt": "a", "max_tokens": 4000, "stream": True, **changes}

    def check(self):
        self.neighbour.join(SECONDS)
        assert self.found == [self.expected]
        wait_until(lambda: not (self.made.num_busy or self.made.num_waiting))
        assert self.made.counters.ended["cancelled"] == self.cancelled + 1
        session = self.made.store.get(self.name, "")
        assert not session.busy and session.state is self.state
        assert self.made.counters.written < self.written + 1000
        assert ask(self.port, f"/v1/sessions/{self.name}", method="DELETE")[0] == 200


@pytest.fixture
def case(port, made):
    found = Case(port, made)
    found.written = made.counters.written
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_piece(case, made, stream):
    with gate(made.step, "write") as writing:
        case.neighbour.start()
        assert writing.reached.wait(SECONDS)
        with sent(case.port, case.body(stream=stream)):
            wait_until(lambda: made.num_waiting)
        wait_until(lambda: made._waiting[0].cancelled)
        writing.through.set()
        case.check()


@pytest.mark.parametrize("stream", [True, False])
def test_while_the_prompt_is_read(case, made, stream):
    read = made.counters.read
    with gate(made.step, "read", call=3) as reading:
        with sent(case.port, case.body(prompt=LONG, stream=stream)):
            assert reading.reached.wait(SECONDS)
            case.neighbour.start()
            wait_until(lambda: made.num_waiting)
        [job] = [row.job for row in made._rows if row is not None]
        wait_until(lambda: job.cancelled)
        reading.through.set()
        case.check()
    assert made.counters.read < read + len(LONG) // 2


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_request_is_understood(case, made, stream):
    case.neighbour.start()
    case.neighbour.join(SECONDS)
    with gate(protocol, "parse_completion") as parsing:
        with sent(case.port, case.body(stream=stream)):
            assert parsing.reached.wait(SECONDS)
        time.sleep(0.2)  # The server's loop takes note; nothing shows that it has.
        parsing.through.set()
        wait_until(lambda: made.counters.ended["cancelled"] > case.cancelled)
    case.check()


def test_before_the_response_begins(case, made):
    """With a server of a newer ASGI, whose first `send` to a client that has left raises."""
    body = [{"type": "http.request", "body": json.dumps(case.body()).encode()}]

    async def receive():
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message):
        raise OSError("the connection is closed")

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1"}
    scope |= {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    app = make_app(made, Settings("tiny", limits=LIMITS))
    case.neighbour.start()
    with contextlib.suppress(ClientDisconnect):
        asyncio.run(app(scope, receive, send))
    case.check()
