"""Fuzzes the HTTP surface: no answer has status 500, nothing hangs, and rows, memory and files are
free afterwards.
"""

import collections
import http.client
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from support.http_server import (
    ask,
    check_as_before,
    events,
    in_its_own_process,
    resources,
    wait_idle,
)
from support.serving import SECONDS
from txl_jax.serving.engine import ServerLimits

# Some of the requests exceed these limits.
FEW = ServerLimits(body_bytes=5000, tokens=100, new_tokens=20, choices=6)
SESSIONS = 3
# Halves of surrogate pairs among them.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | TEXT


def containers(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)


JSON = st.recursive(LEAF, containers, max_leaves=8)
BAD_VALUES = JSON | st.sampled_from([-1, 0, 1, 2, 1e308, -0.0, "", [], {}, True, 1 << 65])
# Letters and ids of the tiny vocabulary.
PROMPT = st.text("abcdefghijk \n", max_size=12) | st.lists(
    st.integers(0, 12), min_size=1, max_size=9
)
STOP = st.text("abc", max_size=3) | st.lists(st.text(max_size=3), max_size=3)
INCLUDE_USAGE = st.fixed_dictionaries({}, optional={"include_usage": st.booleans()})
SAMPLING = {
    "max_tokens": st.integers(1, 20),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "n": st.integers(1, 3),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
}
FIELDS = SAMPLING | {
    "prompt": PROMPT,
    "stop": STOP,
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
    "stream": st.booleans(),
    "stream_options": INCLUDE_USAGE,
    "model": st.just("tiny"),
}
# `send` replaces the word SESSION by the id of the newest session. The other id is unknown. A
# session takes one choice.
SESSION = st.fixed_dictionaries(
    {"session": st.sampled_from(["SESSION", "SESSION", "0" * 32]), "n": st.just(1)}
)
VALID = st.fixed_dictionaries({}, optional=FIELDS)
IN_SESSION = st.builds(dict.__or__, VALID, SESSION)
MISTAKES = st.dictionaries(
    st.sampled_from([*FIELDS, "session", "no_such_field"]), BAD_VALUES, max_size=2
)
ODD = st.builds(dict.__or__, VALID | IN_SESSION, MISTAKES)  # All valid but one or two fields.
BODIES = st.sampled_from([VALID, IN_SESSION, ODD, ODD, st.dictionaries(TEXT, JSON, max_size=4)])
ENCODED = BODIES.flatmap(lambda bodies: bodies.map(lambda body: json.dumps(body).encode()))
RAW = ENCODED | st.binary(max_size=300)
ONE = "/v1/sessions/SESSION"
# What is repeated here and below is drawn so much more often.
USUAL = (
    ["POST /v1/completions"] * 12
    + ["POST /v1/sessions"] * 3
    + [f"DELETE {ONE}", f"GET {ONE}", "GET /v1/sessions"]
)
USUAL += [
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /tokenizer_info",
    "GET /metrics",
]
UNUSUAL = ["PUT /v1/completions", "GET /v1/completions", "HEAD /v1/models", "OPTIONS /"]
UNUSUAL += ["GET /v1/models/%ff", "DELETE /v1/sessions/%00", "POST /x"]
TARGETS = st.sampled_from(USUAL * 2 + UNUSUAL)
TYPES = st.sampled_from(
    ["application/json"] * 12 + ["text/plain", "", "application/json; charset=latin-1"]
)


def check(method, path, status, content):
    assert status < 500 and b"Traceback" not in content, content
    if status >= 400 and method != "HEAD":
        assert json.loads(content)["error"]["message"]
    elif (method, path, status) == ("POST", "/v1/completions", 200):
        is_stream = content.startswith(b"data: ")
        parts = events(content.decode()) if is_stream else [json.loads(content)]
        for part in parts:
            for choice in part["choices"]:
                # A stream that fails has sent its status 200 already, and says so here.
                assert choice["finish_reason"] in ("stop", "length", None), choice


def fuzz(port, examples):
    """Sends requests, and waits until all rows are free.

    Returns the number of answers by status.
    """
    sessions = []
    statuses = collections.Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    @hypothesis.given(target=TARGETS, kind=TYPES, body=RAW)
    @hypothesis.settings(
        deadline=None, max_examples=examples, database=None, phases=[hypothesis.Phase.generate]
    )
    def send(target, kind, body):
        name = sessions[-1] if sessions else "none"
        method, path = target.replace("SESSION", name).split()
        body = body.replace(b"SESSION", name.encode())
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError):
            # So that the same request fails in the same way when it is sent again.
            connection.close()
            raise
        statuses[response.status] += 1
        check(method, path, response.status, content)
        if response.status == 201:
            sessions.append(json.loads(content)["id"])
        if (method, response.status) == ("DELETE", 200):
            sessions.remove(json.loads(content)["id"])

    send()
    connection.close()
    wait_idle(port)
    assert ask(port, "/readyz")[0] == 200
    kept = ask(port, "/v1/sessions")[1]["data"]  # Others have made room.
    assert len(kept) <= SESSIONS
    for session in kept:
        assert session["id"] in sessions
        assert not session["busy"], session
        assert ask(port, f"/v1/sessions/{session['id']}", method="DELETE")[0] == 200
    return statuses


@pytest.mark.nightly(part="long")
def test_many_requests_at_random():
    with in_its_own_process(num_sessions=SESSIONS, limits=FEW) as (port, process):
        # Afterwards the server has all that it keeps, such as the names of tokens.
        fuzz(port, 1000)
        before = resources(process)
        start = time.monotonic()
        statuses = fuzz(port, 10_000)
        print(dict(sorted(statuses.items())), f"{time.monotonic() - start:.0f} s;", end=" ")
        assert sum(statuses.values()) >= 10_000
        check_as_before(process, before)


# Its own list of statuses that reject a request lacks 413: a body beyond the limit is not compared
# with the schema.
SCHEMATHESIS = """
[checks.negative_data_rejection]
expected-statuses = ["400", "404", "405", "409", "413", "415", "422", "429", "5xx"]
"""


@pytest.mark.nightly(part="long")
def test_requests_made_from_its_schema(tmp_path):
    """Schemathesis makes them.

    Data that the schema allows may be rejected, such as an id that the vocabulary lacks or too many
    tokens.
    """
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    checks = "not_a_server_error,content_type_conformance,negative_data_rejection"
    program = Path(sys.executable).with_name("schemathesis")
    with in_its_own_process(num_sessions=SESSIONS, limits=FEW) as (port, process):
        command = [
            program,
            "run",
            f"http://127.0.0.1:{port}/openapi.json",
            "--workers=4",
            f"--checks={checks}",
        ]

        def send(examples):
            run = [*command, f"--max-examples={examples}"]
            ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            wait_idle(port)
            return ended.stdout

        # Afterwards the server has all that it keeps.
        send(50)
        before = resources(process)
        print(re.findall("[0-9,]+ generated", send(500)), end=" ")
        check_as_before(process, before)
