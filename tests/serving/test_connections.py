"""Tests connections: silent ones, too many, unread bodies and answers, pages of other sites,
strange requests.
"""

import contextlib
import http.client
import json
import logging
import socket
import time

import pytest

from support.http_server import ask, server
from support.serving import SECONDS
from support.waiting import wait_until
from txl_jax.serving import middleware
from txl_jax.serving.engine import ServerLimits
from txl_jax.serving.middleware import LOOPBACK

HALF = b"GET /v1/models HTTP/1.1\r\nHost: local"
WITHOUT_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
    b"application/json\r\nContent-Length: 9\r\n\r\n"
)
CHUNKED = WITHOUT_BODY.replace(
    b"Content-Length: 9", b"Authorization: Bearer secret\r\nTransfer-Encoding: chunked"
)
PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
FOREIGN, ALLOWED = "https://other.example", "https://app.example"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


@pytest.fixture(scope="module")
def port():
    with server(
        limits=ServerLimits(body_bytes=70_000), keys=("secret",), hosts=(*LOOPBACK, "app.example")
    ) as (port, _):
        yield port


def connect(port, content=b""):
    found = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    found.sendall(content)
    return found


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
        connections = [
            stack.enter_context(connect(port, content))
            for content in (b"", HALF, b"GET", PAGE + HALF)
        ]
        assert answered(connections[-1]) == 200
        assert all(map(is_closed, connections))
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
    """Of those that have no header, or else no body. A probe is answered at once."""
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
        assert time.monotonic() - began < 10  # On a busy machine. The usual limits are longer.
        assert all(map(is_closed, connections[:3]))
        assert all(map(is_open, connections[3:]))


def test_requests_that_run_are_not_closed_for_others():
    body = json.dumps({"prompt": "a", "max_tokens": 4000}).encode()
    content = WITHOUT_BODY.replace(b": 9", b": %d" % len(body)) + body
    with server(most=2) as (port, made), contextlib.ExitStack() as stack:
        running = [stack.enter_context(connect(port, content)) for _ in range(2)]
        wait_until(lambda: made.num_busy == 2)
        assert is_closed(stack.enter_context(connect(port, HALF)))
        assert all(map(is_open, running))


def test_a_client_that_takes_nothing_is_disconnected():
    with server(stalled_seconds=0.3) as (port, _), connect(port) as connection:
        with pytest.raises(ConnectionError):
            send_endlessly(connection, PAGE)
        assert ask(port, "/healthz")[0] == 200


def send_endlessly(connection, content):
    """Sends content again and again, at most 8 GB.

    Raises `ConnectionError` when the server closes the connection.
    """
    for _ in range((1 << 33) // len(content)):
        connection.sendall(content)


# What a client sends with a body that it does not end, and the status of the answer.
UNREAD = {
    "type": ("/v1/completions", {"Content-Type": "text/plain"}, 415),
    "size": ("/v1/completions", {}, 413),
    "path": ("/nothing", {}, 404),
    "method": ("/v1/models", {}, 405),
    "key": ("/v1/completions", {"Authorization": "Bearer other"}, 401),
    "host": ("/v1/completions", {"Host": "other.example"}, 421),
    "page": ("/v1/completions", {"Origin": FOREIGN}, 403),
    "probe": ("/healthz", {}, 405),
}


@pytest.mark.parametrize(("path", "headers", "status"), UNREAD.values(), ids=UNREAD)
def test_a_body_that_nobody_reads_ends_its_connection(port, monkeypatch, path, headers, status):
    monkeypatch.setattr(middleware, "UNREAD_BYTES", 1 << 20)
    connection = http.client.HTTPConnection("localhost", port, timeout=SECONDS)
    sent = {
        "Content-Type": "application/json",
        "Content-Length": str(1 << 30),
        "Authorization": "Bearer secret",
    }
    connection.request("POST", path, b" " * 80_000, sent | headers)
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (status, "close")
    connection.close()


@pytest.mark.parametrize(("size", "seconds"), [(1 << 20, SECONDS), (1 << 40, 0.2)])
def test_what_is_sent_after_an_answer_is_read_up_to_a_limit(port, monkeypatch, size, seconds):
    monkeypatch.setattr(middleware, "UNREAD_BYTES", size)
    monkeypatch.setattr(middleware, "UNREAD_SECONDS", seconds)
    head = WITHOUT_BODY.replace(b"application/json", b"text/plain").replace(
        b": 9", b": 1000000000000"
    )
    with connect(port, head) as connection, pytest.raises(ConnectionError):
        send_endlessly(connection, b" " * (1 << 16))


def test_a_body_that_is_sent_to_its_end_leaves_its_answer(port):
    """With the largest body, a client that only reads after it has sent all of it still gets its
    answer.
    """
    for size in (10, 300_000, 3 << 20):
        status, found = ask(
            port,
            "/v1/completions",
            b" " * size,
            headers={"Content-Type": "text/plain"},
            key="secret",
        )
        assert (status, found["error"]["code"]) == (415, "unsupported_media_type")


def test_a_request_with_two_lengths_is_the_last_of_its_connection(port):
    for lengths, connected in ((b"", None), (b"Content-Length: 2\r\n", "close")):
        head = CHUNKED.replace(b"Transfer-Encoding", lengths + b"Transfer-Encoding")
        with connect(port, head + b"2\r\n{}\r\n0\r\n\r\n") as connection:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, response.getheader("Connection")) == (200, connected)


def test_requests_that_are_refused_are_counted(port):
    def counted():
        found = ask(port, "/metrics", key="secret")[1].splitlines()
        return {
            line.split('"')[1]: float(line.split()[1])
            for line in found
            if line.startswith("txl_requests_total{")
        }

    before = counted()
    tries = {
        421: ("/v1/models", {"headers": {"Host": "other.example"}}),
        403: ("/v1/models", {"headers": {"Origin": FOREIGN}}),
        405: ("/v1/models", {"method": "PUT"}),
        404: ("/nothing", {}),
        401: ("/v1/models", {}),
    }
    for status, (path, how) in tries.items():
        assert ask(port, path, **how)[0] == status
    with connect(port, b"nothing that is HTTP\r\n\r\n") as connection:
        assert answered(connection) == 400
    assert ask(port, "/healthz")[0] == 200
    after = counted()
    new = {int(status): count - before.get(status, 0) for status, count in after.items()}
    assert {status: count for status, count in new.items() if count} == dict.fromkeys(
        (*tries, 400), 1
    ) | {200: 1}


STRANGE = {
    "no HTTP": (b"nothing that is HTTP\r\n\r\n", 400),
    "no body": (CHUNKED + b"zz\r\n", 400),
    "no body, unread": (CHUNKED.replace(b"application/json", b"text/plain") + b"zz\r\n", 400),
    "no body after the answer": (CHUNKED.replace(b"application/json", b"text/plain"), 415),
    "websocket": (PAGE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
}


@pytest.mark.parametrize(("content", "status"), STRANGE.values(), ids=STRANGE)
def test_strange_requests_write_no_line(port, caplog, content, status):
    """Anybody could fill the log, and with advice to install other packages."""
    logger = logging.getLogger("uvicorn")  # It passes nothing on.
    logger.addHandler(caplog.handler)
    try:
        with connect(port, content) as connection:
            assert answered(connection) == status
            if status == 415:
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
    return response.status, {name.lower(): value for name, value in response.getheaders()}, content


def test_a_page_with_an_allowed_name_can_ask_and_read(port):
    """As a browser does it: first whether it may, without the key."""
    own = {"Origin": ALLOWED}
    status, found, _ = headers_of(port, "OPTIONS", "/v1/completions", own | ASKS)
    assert (status, found["access-control-allow-origin"]) == (204, ALLOWED)
    assert "POST" in found["access-control-allow-methods"]
    assert found["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
    sent = own | {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    answers = [
        headers_of(port, "POST", "/v1/completions", sent, b'{"prompt": "a", "max_tokens": 1}'),
        headers_of(port, "POST", "/v1/completions", sent, b"{"),
        headers_of(port, "POST", "/v1/completions", own, b"{}"),
        headers_of(port, "GET", "/nothing", own),
        headers_of(port, "GET", "/healthz", own),
    ]
    assert [status for status, _, _ in answers] == [200, 400, 401, 404, 200]
    assert all(
        found["access-control-allow-origin"] == ALLOWED and found["vary"] == "Origin"
        for _, found, _ in answers
    )


@pytest.mark.parametrize(
    ("origin", "is_advised"),
    [(FOREIGN, True), ("null", False), ("http://localhost:1", False), ("https://127.0.0.1", False)],
)
def test_a_page_that_is_refused_gets_advice_that_helps(port, origin, is_advised):
    """A name of this machine cannot be allowed, and a page without an address has none."""
    status, found, content = headers_of(
        port, "OPTIONS", "/v1/completions", {"Origin": origin} | ASKS
    )
    assert status == 403 and "access-control-allow-origin" not in found
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
    assert near in ask(port, path)[1]["error"]["message"]
