"""Fuzzes the HTTP surface: no answer of 500, no hang, nothing left in rows; 100 requests, or 10,000 in the slow run."""

import http.client
import json
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from support.http_server import ask, served
from support.serving import engine, make_store, resident_bytes
from txl_jax.serving.app import Settings
from txl_jax.serving.requests import Limits

LIMITS = Limits(body_bytes=5000, prompt_tokens=100, new_tokens=20, choices=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WRONG = JSON | st.sampled_from([-1, 0, 1, 2, 1e308, -0.0, "", [], {}, True, 1 << 65])
# Fields with values that are mostly right, so that many requests are answered.
FIELDS = {
    "prompt": st.text("abcdefghijk \n", max_size=12) | st.lists(st.integers(0, 12), min_size=1, max_size=9),
    "max_tokens": st.integers(0, 20),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "n": st.integers(1, 3),
    "stop": st.text("abc", max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "session": st.sampled_from(["SESSION", "0" * 32]),
    "model": st.sampled_from(["tiny", "tiny", "other"]),
}
RIGHT = st.fixed_dictionaries({}, optional=FIELDS)
HALF_WRONG = st.fixed_dictionaries({}, optional={name: FIELDS[name] | WRONG for name in FIELDS})
BODIES = RIGHT | RIGHT | HALF_WRONG | st.dictionaries(st.text(max_size=9), JSON, max_size=4)
RAW = BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=300)
PATHS = st.sampled_from(
    ["/v1/completions"] * 6 + ["/v1/sessions", "/v1/sessions/SESSION/save", "/v1/models", "/", "/x"]
)
METHODS = st.sampled_from(["POST"] * 8 + ["GET", "PUT", "OPTIONS", "HEAD"])
TYPES = st.sampled_from(["application/json"] * 8 + ["text/plain", "", "application/json; charset=latin-1"])


@pytest.fixture(scope="module")
def server():
    """Port and engine."""
    with (
        engine(store=make_store(limit=2), limits=LIMITS, start=False) as made,
        served(made, Settings("tiny", limits=LIMITS)) as port,
    ):
        yield port, made


def fuzz(server, examples):
    port, made = server
    session = ask(port, "/v1/sessions", {})[1]["id"]
    statuses = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    @hypothesis.given(path=PATHS, method=METHODS, kind=TYPES, body=RAW)
    @hypothesis.settings(deadline=None, max_examples=examples, database=None, phases=[hypothesis.Phase.generate])
    def send(path, method, kind, body):
        connection.request(
            method, path.replace("SESSION", session), body.replace(b"SESSION", session.encode()), {"Content-Type": kind}
        )
        response = connection.getresponse()
        content = response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        assert response.status < 500, content
        assert b"Traceback" not in content
        if response.status >= 400 and method != "HEAD":
            assert json.loads(content)["error"]["message"]

    send()
    connection.close()
    until = time.monotonic() + 60
    while made.num_busy or made.num_waiting:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert made.ready and not any(each.busy for each in made.store.of_owner(""))
    for each in made.store.of_owner(""):
        made.store.delete(each.name, "")
    return statuses


def test_requests_at_random(server):
    statuses = fuzz(server, 100)
    assert statuses[200] > 10 and statuses[400] > 10


@pytest.mark.slow
def test_many_requests_at_random(server):
    fuzz(server, 500)
    before = resident_bytes()
    statuses = fuzz(server, 10_000)
    print(statuses, f"resident {before >> 20} MiB, then {resident_bytes() >> 20} MiB")
    assert sum(statuses.values()) >= 10_000 and resident_bytes() <= 1.05 * before
