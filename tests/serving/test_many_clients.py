"""Tests many clients at once: every answer is the one that its request gets alone, nothing is left
behind.
"""

import concurrent.futures
import random
import time

import pytest

from support import tiny_model
from support.http_server import (
    ask,
    check_as_before,
    events,
    in_its_own_process,
    joined,
    left,
    metrics,
    resources,
    wait_idle,
)
from support.serving import SECONDS
from support.waiting import wait_until
from txl_jax.serving.engine import ServerLimits

LETTERS = "\n abcdefghijk"
STOPS = (None, None, "ab", ["cd", "\n\n"])


def bodies(rng):
    while True:
        prompt = "".join(rng.choices(LETTERS, k=rng.randint(1, 60)))
        tokens = tiny_model.VOCABULARY.encode(prompt.encode()).tolist()
        yield {
            "prompt": rng.choice([prompt, [prompt, prompt[:3]], tokens]),
            "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0, 0.7, 1, 1]),
            "top_p": rng.choice([1, 1, 0.9]),
            "n": rng.choice([1, 1, 2]),
            "seed": rng.randrange(1 << 40),
            "stop": rng.choice(STOPS),
            "logprobs": rng.choice([None, None, 2]),
            "echo": rng.choice([False, True]),
            "stream": rng.choice([False, True]),
        }


def answer(port, body):
    status, found = ask(port, "/v1/completions", body)
    assert status == 200, found
    return joined(events(found) if body["stream"] else [found])


def talk(port, number, *, until):
    """Asks until the time is over, every tenth client in a session.

    Returns its name, and what was asked and found.
    """
    asked, session = [], ask(port, "/v1/sessions", {})[1]["id"] if number % 10 == 0 else None
    for body in bodies(random.Random(number)):
        if session:
            prompt = body["prompt"][0] if isinstance(body["prompt"][0], str) else body["prompt"]
            body |= {"session": session, "n": 1, "prompt": prompt}
        asked.append((body, answer(port, body)))
        if number % 5 == 0 and len(asked) % 10 == 1:
            with left(
                port, body | {"stream": True, "max_tokens": 4000, "stop": None}
            ) as connection:
                connection.getresponse().read(100)
            wait_until(
                lambda: not (session and ask(port, f"/v1/sessions/{session}")[1]["busy"]), SECONDS
            )
        if time.monotonic() > until:
            return session, asked
    raise AssertionError


def check(port, clients):
    """Asks everything again, one request at a time; a session's requests go to a new session."""
    for session, asked in clients:
        new = ask(port, "/v1/sessions", {})[1]["id"] if session else None
        assert asked
        for body, found in asked:
            assert answer(port, body | ({"session": new} if session else {})) == found, body
        for name in filter(None, (session, new)):
            assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


def run_clients(port, *, seconds):
    until = time.monotonic() + seconds
    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        clients = list(threads.map(lambda number: talk(port, number, until=until), range(200)))
    wait_idle(port)
    return clients


@pytest.mark.nightly(part="long")
def test_200_clients_for_two_minutes():
    """Sessions among them; a fifth leave in the middle.

    Then all again alone; memory and open files are as before.
    """
    with in_its_own_process(num_sessions=64, limits=ServerLimits(waiting=2000)) as (port, process):
        check(port, run_clients(port, seconds=5))
        before = resources(process)
        cancelled = metrics(port)['txl_choices_ended_total{reason="cancelled"}']
        clients = run_clients(port, seconds=120)
        figures = metrics(port)
        assert figures['txl_choices_ended_total{reason="cancelled"}'] >= cancelled + 40
        check(port, clients)
        print(sum(len(asked) for _, asked in clients), "requests of 200 clients,", end=" ")
        print(f"{figures['txl_tokens_written_total']:.0f} tokens;", end=" ")
        check_as_before(process, before)
        assert metrics(port)["txl_sessions"] == 0
