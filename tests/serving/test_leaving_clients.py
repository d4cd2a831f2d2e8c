"""Tests clients that leave early: while they wait for a row, while their prompt is read, and before
their request is understood.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import time

import pytest
from starlette.requests import ClientDisconnect

from support.http_server import ask, complete, left, server
from support.serving import SECONDS, gate
from support.waiting import wait_until
from txl_jax.serving import protocol
from txl_jax.serving.app import make_app
from txl_jax.serving.engine import ServerLimits

pytestmark = pytest.mark.full
LIMITS = ServerLimits(tokens=5000, new_tokens=4000)


@pytest.fixture
def running():
    """The port of a server, and its engine."""
    with server(limits=LIMITS) as port_and_engine:
        yield port_and_engine


@pytest.fixture
def session(running):
    """A session with a text.

    At the end of the test one request was ended, and the session is as before and can be used.
    """
    port, made = running
    name = ask(port, "/v1/sessions", {})[1]["id"]
    assert complete(port, session=name, max_tokens=5)[0] == 200
    opened = made.store.get(name, "")
    state = opened.state
    written = made.counters.written

    yield opened

    wait_until(lambda: not (made.num_busy or made.num_waiting))
    assert made.counters.ended["cancelled"] == 1
    assert made.counters.written < written + 1000, "most of the 4000 tokens were not written"
    assert not opened.busy
    assert opened.state is state


def body(session, **changes):
    return {"session": session.name, "prompt": "a", "max_tokens": 4000, "stream": True, **changes}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_while_it_waits_for_a_row(running, session, stream):
    """The client whose text is written at the same time is not disturbed.

    While the call that writes it is held up, no request gets a row.
    """
    port, made = running
    neighbour = {"max_tokens": 60, "seed": 4, "logprobs": 1}
    expected = complete(port, **neighbour)[1]["choices"]
    with (
        gate(made.step, "write") as (reached, through),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        request = pool.submit(complete, port, **neighbour)
        assert reached.wait(SECONDS)
        with left(port, body(session, stream=stream)):
            wait_until(lambda: made.num_waiting)
        wait_until(lambda: made._waiting[0].cancelled)
        through.set()
        status, answer = request.result(SECONDS)
    assert status == 200, answer
    assert answer["choices"] == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_while_its_prompt_is_read(running, session, stream):
    port, made = running
    read = made.counters.read
    # The third of the prompt's segments of 64 tokens is held up.
    with gate(made.step, "read", call=3) as (reached, through):
        with left(port, body(session, prompt="abcdefgh" * 100, stream=stream)):
            assert reached.wait(SECONDS)
        [completion] = [row.completion for row in made._rows.values()]
        wait_until(lambda: completion.cancelled)
        through.set()
        wait_until(lambda: made.counters.ended["cancelled"])
    assert made.counters.read < read + 400, "at least half of the 800 tokens were not read"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_before_its_request_is_understood(running, session, stream):
    port, made = running
    with gate(protocol, "prompts_of") as (reached, through):
        with left(port, body(session, stream=stream)):
            assert reached.wait(SECONDS)
        time.sleep(0.2)  # The server's loop notices it. Nothing shows when it has.
        through.set()
        wait_until(lambda: made.counters.ended["cancelled"])


def test_a_client_leaves_before_its_response_begins(running, session):
    """With a server of ASGI 2.4, whose first `send` to a client that has left raises.

    `session` sees at its end that the request was ended.
    """
    messages = [{"type": "http.request", "body": json.dumps(body(session)).encode()}]

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message):
        raise OSError("the connection is closed")

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    with contextlib.suppress(ClientDisconnect):
        asyncio.run(make_app(running[1], "tiny")(scope, receive, send))
