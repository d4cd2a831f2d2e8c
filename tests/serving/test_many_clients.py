"""Tests many clients at once: every answer is the one that its request gets by itself, and the
server gives back its memory and files.
"""

import concurrent.futures
import dataclasses
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

LETTERS = "\n abcdefghijk"  # The tokens of the tiny vocabulary.
# The values of each parameter. What is repeated is drawn so much more often.
CHOICES = {
    "temperature": [0, 0.7, 1, 1],
    "top_p": [1, 1, 0.9],
    "n": [1, 1, 2],
    "stop": [None, None, "ab", ["cd", "\n\n"]],
    "logprobs": [None, None, 2],
    "echo": [False, True],
    "stream": [False, True],
}


def random_body(rng):
    """A request whose prompt is a text, two texts, or ids."""
    prompt = "".join(rng.choices(LETTERS, k=rng.randint(1, 60)))
    tokens = tiny_model.VOCABULARY.encode(prompt.encode()).tolist()
    body = {
        "prompt": rng.choice([prompt, [prompt, prompt[:3]], tokens]),
        "max_tokens": rng.randint(1, 60),
        "seed": rng.randrange(1 << 40),
    }
    for name, values in CHOICES.items():
        body[name] = rng.choice(values)
    return body


def in_session(body, session):
    """The request in a session: with one prompt and one sample."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    return body | {"session": session, "n": 1, "prompt": prompt}


def answer(port, body):
    status, content = ask(port, "/v1/completions", body)
    assert status == 200, content
    parts = events(content) if body["stream"] else [content]
    return joined(parts)


def new_session(port):
    status, session = ask(port, "/v1/sessions", {})
    assert status == 201, session
    return session["id"]


def leave(port, body):
    """Begins to read a long answer, and leaves."""
    with left(port, body | {"stream": True, "max_tokens": 4000, "stop": None}) as connection:
        connection.getresponse().read(100)


@dataclasses.dataclass
class Client:
    """A client that asks and keeps the answers, every tenth one in a session."""

    port: int
    number: int
    session: str | None = None
    asked: list[tuple[dict, list]] = dataclasses.field(default_factory=list)

    def talk(self, *, until):
        """Asks until the time is over. Every fifth client leaves now and then."""
        rng = random.Random(self.number)
        if self.number % 10 == 0:
            self.session = new_session(self.port)
        while True:
            body = random_body(rng)
            if self.session is not None:
                body = in_session(body, self.session)
            self.asked.append((body, answer(self.port, body)))
            if self.number % 5 == 0 and len(self.asked) % 10 == 1:
                leave(self.port, body)
                wait_until(lambda: not self.is_busy(), SECONDS)
            if time.monotonic() > until:
                return self

    def is_busy(self):
        """Whether its session is in use."""
        if self.session is None:
            return False
        status, session = ask(self.port, f"/v1/sessions/{self.session}")
        assert status == 200, session
        return session["busy"]

    def check(self):
        """Asks everything again, one request at a time.

        The requests of a session go to a new session.
        """
        assert self.asked
        if self.session is None:
            for body, expected in self.asked:
                assert answer(self.port, body) == expected, body
            return

        session = new_session(self.port)
        for body, expected in self.asked:
            assert answer(self.port, body | {"session": session}) == expected, body
        for name in (self.session, session):
            assert ask(self.port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


def run_clients(port, *, seconds):
    until = time.monotonic() + seconds
    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        talks = [threads.submit(Client(port, number).talk, until=until) for number in range(200)]
        clients = [talk.result() for talk in talks]
    wait_idle(port)
    return clients


@pytest.mark.nightly(part="long")
def test_200_clients_for_two_minutes():
    """Some use sessions, and a fifth leave in the middle.

    Then all requests are sent again, one after the other. Memory and open files are as before.
    """
    # There is a session for each client that uses one, and a place to wait for each choice.
    with in_its_own_process(num_sessions=64, limits=ServerLimits(waiting=2000)) as (port, process):
        # After the first clients the server has all that it keeps.
        for client in run_clients(port, seconds=5):
            client.check()
        before = resources(process)
        cancelled = metrics(port)['txl_choices_ended_total{reason="cancelled"}']
        clients = run_clients(port, seconds=120)
        figures = metrics(port)
        # Each fifth client has left at least once.
        assert figures['txl_choices_ended_total{reason="cancelled"}'] >= cancelled + 200 / 5
        for client in clients:
            client.check()
        print(sum(len(client.asked) for client in clients), "requests of 200 clients,", end=" ")
        print(f"{figures['txl_tokens_written_total']:.0f} tokens;", end=" ")
        check_as_before(process, before)
        assert metrics(port)["txl_sessions"] == 0
