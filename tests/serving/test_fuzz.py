"""Fuzzes the HTTP surface: no answer of 500, no hang, nothing left in rows, no memory and no file
left.
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

FEW, SESSIONS = ServerLimits(body_bytes=5000, tokens=100, new_tokens=20, choices=6), 3
# Halves of surrogate pairs among them.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
WRONG = JSON | st.sampled_from([-1, 0, 1, 2, 1e308, -0.0, "", [], {}, True, 1 << 65])
FIELDS = {
    "prompt": st.text("abcdefghijk \n", max_size=12)
    | st.lists(st.integers(0, 12), min_size=1, max_size=9),
    "max_tokens": st.integers(1, 20),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "n": st.integers(1, 3),
    "stop": st.text("abc", max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "model": st.just("tiny"),
}
SESSION = st.fixed_dictionaries(
    {"session": st.sampled_from(["SESSION", "SESSION", "0" * 32]), "n": st.just(1)}
)
RIGHT = st.fixed_dictionaries({}, optional=FIELDS)
IN_SESSION = st.builds(dict.__or__, RIGHT, SESSION)
MISTAKES = st.dictionaries(st.sampled_from([*FIELDS, "session", "prompts"]), WRONG, max_size=2)
ODD = st.builds(dict.__or__, RIGHT | IN_SESSION, MISTAKES)  # All right but one or two fields.
BODIES = st.sampled_from([RIGHT, IN_SESSION, ODD, ODD, st.dictionaries(TEXT, JSON, max_size=4)])
RAW = BODIES.flatmap(lambda bodies: bodies.map(lambda body: json.dumps(body).encode())) | st.binary(
    max_size=300
)
ONE = "/v1/sessions/SESSION"
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
        parts = events(content.decode()) if content.startswith(b"data: ") else [json.loads(content)]
        reasons = {choice["finish_reason"] for part in parts for choice in part["choices"]}
        assert reasons <= {"stop", "length", None}


def fuzz(port, examples):
    """Sends requests, and waits until all rows are free; returns the number of answers of each
    status.
    """
    sessions, statuses = [], collections.Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    @hypothesis.given(target=TARGETS, kind=TYPES, body=RAW)
    @hypothesis.settings(
        deadline=None, max_examples=examples, database=None, phases=[hypothesis.Phase.generate]
    )
    def send(target, kind, body):
        name = sessions[-1] if sessions else "none"
        method, path = target.replace("SESSION", name).split()
        try:
            connection.request(
                method, path, body.replace(b"SESSION", name.encode()), {"Content-Type": kind}
            )
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
    found = ask(port, "/v1/sessions")[1]["data"]
    names = {each["id"] for each in found}  # Others have made room.
    assert (
        names <= {*sessions} and len(names) <= SESSIONS and not any(each["busy"] for each in found)
    )
    for name in names:
        assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200
    return statuses


@pytest.mark.nightly(part="long")
def test_many_requests_at_random():
    with in_its_own_process(num_sessions=SESSIONS, limits=FEW) as (port, process):
        fuzz(port, 1000)
        before, start = resources(process), time.monotonic()
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
    """By schemathesis.

    Data that the schema allows may be refused: an id that the vocabulary lacks, too many tokens.
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
            found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert found.returncode == 0, found.stdout + found.stderr
            wait_idle(port)
            return found.stdout

        send(50)
        before = resources(process)
        print(re.findall("[0-9,]+ generated", send(500)), end=" ")
        check_as_before(process, before)
