"""Tests silent connections, too many connections, unread bodies and answers, pages of other sites,
and malformed requests.
"""

import collections
import contextlib
import http.client
import json
import logging
import socket
import time
from unittest import mock

import pytest

from support.http_server import ask, server
from support.serving import SECONDS
from support.waiting import wait_until
from txl_jax.serving import middleware
from txl_jax.serving.connections import Connections, Phase
from txl_jax.serving.engine import ServerLimits
from txl_jax.serving.middleware import LOOPBACK

HALF = b"GET /v1/models HTTP/1.1\r\nHost: local"
# A body of 9 bytes is announced and does not come.
WITHOUT_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
    b"application/json\r\nContent-Length: 9\r\n\r\n"
)
# The body comes in chunks, each after a line with its length.
CHUNKED = WITHOUT_BODY.replace(
    b"Content-Length: 9", b"Authorization: Bearer secret\r\nTransfer-Encoding: chunked"
)
NO_HTTP = b"nothing that is HTTP\r\n\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
FOREIGN = "https://other.example"
ALLOWED = "https://app.example"
# A browser asks whether a page may send a request, here with a header of OpenAI's client.
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


BODY_BYTES = 70_000  # The largest body that the server takes.


@pytest.fixture(scope="module")
def port():
    """A server that needs a key, and that has a name besides the names of this machine."""
    with server(
        limits=ServerLimits(body_bytes=BODY_BYTES),
        keys=("secret",),
        hosts=(*LOOPBACK, "app.example"),
    ) as (port, _):
        yield port


def connect(port, content=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(content)
    return connection


def is_closed(connection):
    """Returns whether the server closes a connection to which it sends nothing, within the time
    that tests wait.
    """
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def is_open(connection):
    """Returns whether the server has neither closed a connection nor reset it so far."""
    connection.settimeout(0)
    try:
        with contextlib.suppress(BlockingIOError):
            return connection.recv(1 << 20) != b""
        return True
    finally:
        connection.settimeout(SECONDS)


def answered(connection):
    """Reads one answer to its end, and returns its status."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def test_a_header_that_does_not_come_ends_its_connection():
    with server(header_seconds=0.2) as (port, _), contextlib.ExitStack() as stack:
        kept = stack.enter_context(connect(port, PAGE))
        assert answered(kept) == 200
        silent = stack.enter_context(connect(port))
        half = stack.enter_context(connect(port, HALF))
        method = stack.enter_context(connect(port, b"GET"))
        second_request = stack.enter_context(connect(port, PAGE + HALF))
        assert answered(second_request) == 200

        assert is_closed(silent)
        assert is_closed(half)
        assert is_closed(method)
        assert is_closed(second_request)
        assert is_open(kept), "it waits for its next request"
        kept.sendall(HALF)
        assert is_closed(kept)


# The server says when it begins to read the body.
WAITING = WITHOUT_BODY[:-2] + b"Expect: 100-continue\r\n\r\n"


@pytest.mark.parametrize(
    ("content", "answer"),
    [(b"", None), (HALF, None), (WAITING, 100), (PAGE, 200)],
    ids=["nothing", "half", "no body", "kept"],
)
def test_at_the_limit_the_oldest_connection_makes_room(content, answer):
    """The oldest connection without a header is closed, or else the oldest without a body.

    A probe is answered at once.
    """
    with server(most=3) as (port, _), contextlib.ExitStack() as stack:
        connections = []
        for _ in range(5):
            connection = stack.enter_context(connect(port, content))
            if answer == 100:
                assert connection.recv(1 << 20).startswith(b"HTTP/1.1 100")
            elif answer:
                assert answered(connection) == answer
            connections.append(connection)
        began = time.monotonic()
        assert ask(port, "/healthz")[0] == 200
        # The probe does not wait until a time limit, here of 300 s, closes a connection. A busy
        # machine may take seconds.
        assert time.monotonic() - began < 10
        # The probe's connection and the last two are as many as may be open.
        assert [is_closed(connection) for connection in connections[:3]] == [True] * 3
        assert [is_open(connection) for connection in connections[3:]] == [True] * 2


@pytest.mark.parametrize("phase", [Phase.HEADER, Phase.BODY, Phase.READER])
def test_at_the_limit_a_request_that_runs_is_not_closed_for_a_newer_connection(phase):
    """Not even if it is the oldest of all: the other one has done less."""

    def connection(phase, since):
        return mock.Mock(phase=phase, since=since)

    connections = Connections(2)
    running = connection(Phase.WORK, since=1.0)
    waiting = connection(phase, since=2.0)
    new = connection(Phase.HEADER, since=3.0)

    for added in (running, waiting, new):
        connections.add(added)

    waiting.transport.abort.assert_called_once_with()
    running.transport.abort.assert_not_called()
    new.transport.abort.assert_not_called()


def test_requests_that_run_are_not_closed_for_others():
    body = json.dumps({"prompt": "a", "max_tokens": 4000}).encode()
    content = WITHOUT_BODY.replace(b": 9", b": %d" % len(body)) + body
    with server(most=2) as (port, made), contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(port, content))
        second = stack.enter_context(connect(port, content))
        wait_until(lambda: made.num_busy == 2)
        assert is_closed(stack.enter_context(connect(port, HALF)))
        assert is_open(first)
        assert is_open(second)


def test_a_client_that_takes_nothing_is_disconnected():
    with server(stalled_seconds=0.3) as (port, _), connect(port) as connection:
        with pytest.raises(ConnectionError):
            send_endlessly(connection, PAGE)
        assert ask(port, "/healthz")[0] == 200


def send_endlessly(connection, content):
    """Sends content again and again, at most 8 GB, so that a test that fails ends.

    Raises `ConnectionError` when the server closes the connection.
    """
    for _ in range((1 << 33) // len(content)):
        connection.sendall(content)


# The path and headers of a request with a body that does not end, and the status of the answer.
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        pytest.param("/v1/completions", {"Content-Type": "text/plain"}, 415, id="type"),
        pytest.param("/v1/completions", {}, 413, id="size"),
        pytest.param("/nothing", {}, 404, id="path"),
        pytest.param("/v1/models", {}, 405, id="method"),
        pytest.param("/v1/completions", {"Authorization": "Bearer other"}, 401, id="key"),
        pytest.param("/v1/completions", {"Host": "other.example"}, 421, id="host"),
        pytest.param("/v1/completions", {"Origin": FOREIGN}, 403, id="page"),
        pytest.param("/healthz", {}, 405, id="probe"),
    ],
)
def test_a_body_that_nobody_reads_ends_its_connection(port, path, headers, status):
    """The answer says so. The next test sees that the server does close the connection."""
    connection = http.client.HTTPConnection("localhost", port, timeout=SECONDS)
    usual = {
        "Content-Type": "application/json",
        "Content-Length": str(1 << 30),
        "Authorization": "Bearer secret",
    }
    # More than the server takes, and less than is announced.
    connection.request("POST", path, b" " * (BODY_BYTES + 10_000), usual | headers)
    response = connection.getresponse()
    assert response.status == status
    assert response.getheader("Connection") == "close"
    connection.close()


# In each case one of the two limits is reached.
@pytest.mark.parametrize(
    ("size", "seconds"), [(1 << 20, SECONDS), (1 << 40, 0.2)], ids=["bytes", "seconds"]
)
def test_what_is_sent_after_an_answer_is_read_up_to_a_limit(port, monkeypatch, size, seconds):
    monkeypatch.setattr(middleware, "UNREAD_BYTES", size)
    monkeypatch.setattr(middleware, "UNREAD_SECONDS", seconds)
    # The type is refused with the header. More is announced than is ever sent.
    head = WITHOUT_BODY.replace(b"application/json", b"text/plain").replace(
        b": 9", b": 1000000000000"
    )
    with connect(port, head) as connection, pytest.raises(ConnectionError):
        send_endlessly(connection, b" " * (1 << 16))


def test_a_body_that_is_sent_to_its_end_leaves_its_answer(port):
    """A client that reads only when it has sent its whole body gets its answer."""
    plain = {"Content-Type": "text/plain"}
    # A small body, one that is larger than this server takes, and one that is larger than a server
    # takes by default.
    for size in (10, 300_000, 3 << 20):
        status, answer = ask(port, "/v1/completions", b" " * size, headers=plain, key="secret")
        assert status == 415, f"{size} bytes"
        assert answer["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("length", "connected"),
    [(b"", None), (b"Content-Length: 2\r\n", "close")],
    ids=["chunks", "chunks and a length"],
)
def test_a_request_with_two_lengths_is_the_last_of_its_connection(port, length, connected):
    """Where its body ends can be understood in two ways. With chunks alone the connection stays."""
    head = CHUNKED.replace(b"Transfer-Encoding", length + b"Transfer-Encoding")
    # The body is `{}` in one chunk.
    with connect(port, head + b"2\r\n{}\r\n0\r\n\r\n") as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        assert response.getheader("Connection") == connected


def counted_requests(port):
    """The number of requests so far by their status, from the server's metrics."""
    status, content = ask(port, "/metrics", key="secret")
    assert status == 200, content
    counts = collections.Counter()
    for line in content.splitlines():
        if line.startswith("txl_requests_total{"):
            counts[int(line.split('"')[1])] = int(float(line.split()[1]))
    return counts


def test_requests_that_are_refused_are_counted(port):
    before = counted_requests(port)

    assert ask(port, "/v1/models", headers={"Host": "other.example"})[0] == 421
    assert ask(port, "/v1/models", headers={"Origin": FOREIGN})[0] == 403
    assert ask(port, "/v1/models", method="PUT")[0] == 405
    assert ask(port, "/nothing")[0] == 404
    assert ask(port, "/v1/models")[0] == 401
    with connect(port, NO_HTTP) as connection:
        assert answered(connection) == 400
    assert ask(port, "/healthz")[0] == 200

    counts = counted_requests(port) - before
    # The request with status 200 is the first one for the metrics. The probe is not counted.
    assert counts == {421: 1, 403: 1, 405: 1, 404: 1, 401: 1, 400: 1, 200: 1}


PLAIN_CHUNKED = CHUNKED.replace(b"application/json", b"text/plain")
WEBSOCKET = PAGE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


# The length of a chunk is a hexadecimal number, so that `zz` is none.
@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(NO_HTTP, 400, id="no HTTP"),
        pytest.param(CHUNKED + b"zz\r\n", 400, id="no body"),
        pytest.param(PLAIN_CHUNKED + b"zz\r\n", 400, id="no body, unread"),
        pytest.param(PLAIN_CHUNKED, 415, id="no body after the answer"),
        pytest.param(WEBSOCKET, 200, id="websocket"),
    ],
)
def test_strange_requests_write_no_line(port, caplog, content, status):
    """Otherwise anybody could fill the log, also with advice to install other packages."""
    logger = logging.getLogger("uvicorn")  # It does not propagate.
    logger.addHandler(caplog.handler)
    try:
        with connect(port, content) as connection:
            assert answered(connection) == status
            if status == 415:
                # What follows the answer is not HTTP.
                connection.sendall(b"zz\r\n")
                assert is_closed(connection)
        assert ask(port, "/healthz")[0] == 200
    finally:
        logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def headers_of(port, method, path, headers, body=None):
    connection = http.client.HTTPConnection("localhost", port, timeout=SECONDS)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, response.headers, content


def test_a_page_with_an_allowed_name_can_ask_and_read(port):
    """As a browser does it: first whether it may, without the key."""
    origin = {"Origin": ALLOWED}
    status, headers, _ = headers_of(port, "OPTIONS", "/v1/completions", origin | ASKS)
    assert status == 204
    assert headers["access-control-allow-origin"] == ALLOWED
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]

    with_key = origin | {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    for expected, request in (
        (200, ("POST", "/v1/completions", with_key, body)),
        (400, ("POST", "/v1/completions", with_key, b"{")),
        (401, ("POST", "/v1/completions", origin, b"{}")),
        (404, ("GET", "/nothing", origin)),
        (200, ("GET", "/healthz", origin)),
    ):
        status, headers, content = headers_of(port, *request)
        assert status == expected, (request, content)
        assert headers["access-control-allow-origin"] == ALLOWED, request
        assert headers["vary"] == "Origin", request


@pytest.mark.parametrize(
    ("origin", "is_advised"),
    [(FOREIGN, True), ("null", False), ("http://localhost:1", False), ("https://127.0.0.1", False)],
)
def test_a_page_that_is_refused_gets_advice_that_helps(port, origin, is_advised):
    """A name of this machine cannot be allowed, and a page without an address has none."""
    status, headers, content = headers_of(
        port, "OPTIONS", "/v1/completions", {"Origin": origin} | ASKS
    )
    assert status == 403
    assert "access-control-allow-origin" not in headers
    assert ("--allowed_hosts" in content) == is_advised


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/health", "/healthz"),
        ("/ready", "/readyz"),
        ("/completions", "/v1/completions"),
        ("/x", "/healthz"),
    ],
)
def test_a_path_that_does_not_exist_names_one_that_does(port, path, near):
    """The most similar one, or at least the probes. A path that does not exist needs no key."""
    status, answer = ask(port, path)
    assert status == 404, answer
    assert near in answer["error"]["message"]
