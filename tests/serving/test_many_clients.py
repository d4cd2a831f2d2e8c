"""Tests many clients at once: every answer is the one that its request gets alone, nothing is left behind."""

import http.client
import json
import random
import threading
import time

import pytest

from support import tiny_model
from support.http_server import ask, metrics, served, wait_idle
from support.serve_tiny import in_its_own_process, resident_mib
from support.serving import SECONDS, engine, make_store
from txl_jax.serving.app import Settings
from txl_jax.serving.requests import Limits

LETTERS = "\n abcdefghijk"
STOPS = (None, None, "ab", ["cd", "\n\n"])


def bodies(rng, *, longest):
    """Request after request, of mixed kinds."""
    while True:
        prompt = "".join(rng.choices(LETTERS, k=rng.randint(1, longest)))
        body = {
            "prompt": rng.choice(
                [prompt, [prompt, prompt[:3]], tiny_model.VOCABULARY.encode(prompt.encode()).tolist()]
            ),
            "max_tokens": rng.randint(1, longest),
            "temperature": rng.choice([0, 0.7, 1, 1]),
            "top_p": rng.choice([1, 1, 0.9]),
            "n": rng.choice([1, 1, 2]),
            "seed": rng.randrange(1 << 40),
            "stop": rng.choice(STOPS),
            "logprobs": rng.choice([None, None, 2]),
            "echo": rng.choice([False, True]),
            "stream": rng.choice([False, True]),
        }
        yield body


def answer(port, body):
    """The choices of a response, streamed or whole: texts, reasons, tokens and logprobs."""
    if not body["stream"]:
        status, found = ask(port, "/v1/completions", body)
        assert status == 200, found
        return [flat([choice]) for choice in found["choices"]]
    status, text = ask(port, "/v1/completions", body)
    assert status == 200 and text.endswith("data: [DONE]\n\n"), text[-300:]
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    count = 1 + max(choice["index"] for event in events for choice in event["choices"])
    of_each = [[] for _ in range(count)]
    for event in events:
        for choice in event["choices"]:
            of_each[choice["index"]].append(choice)
    return [flat(each) for each in of_each]


def flat(parts):
    """The parts of one choice as one."""
    text = "".join(part["text"] for part in parts)
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    joined = {name: [item for part in logprobs for item in part[name]] for name in ("tokens", "token_logprobs")}
    return text, parts[-1]["finish_reason"], joined


def leave(port, body):
    """Begins a long stream and goes away."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    given = json.dumps(body | {"stream": True, "max_tokens": 4000, "stop": None})
    connection.request("POST", "/v1/completions", given, {"Content-Type": "application/json"})
    connection.getresponse().read(100)
    connection.sock.close()
    connection.close()


class Client(threading.Thread):
    """A client that asks until the time is over, some in a session; it keeps what it asked and got."""

    def __init__(self, port, number, until, *, longest, leaves):
        super().__init__()
        self.port, self.until, self.leaves = port, until, leaves
        self.rng, self.longest = random.Random(number), longest
        self.in_session = number % 10 == 0
        self.asked, self.session, self.error = [], None, None

    def run(self):
        try:
            self.ask_on()
        except BaseException as error:
            self.error = error
            raise

    def ask_on(self):
        if self.in_session:
            self.session = ask(self.port, "/v1/sessions", {})[1]["id"]
        for body in bodies(self.rng, longest=self.longest):
            if self.in_session:
                prompt = body["prompt"][0] if isinstance(body["prompt"][0], str) else body["prompt"]
                body |= {"session": self.session, "n": 1, "prompt": prompt}
            self.asked.append((body, answer(self.port, body)))
            if self.leaves and len(self.asked) == 1:
                leave(self.port, body)
                while self.session and ask(self.port, f"/v1/sessions/{self.session}")[1]["busy"]:
                    time.sleep(0.02)
            if time.monotonic() > self.until:
                return


def check(port, clients):
    """Asks everything again, one request at a time; a session's requests go to a new session."""
    for client in clients:
        assert client.error is None and client.asked
        session = ask(port, "/v1/sessions", {})[1]["id"] if client.in_session else None
        for body, found in client.asked:
            again = body | ({"session": session} if session else {})
            assert answer(port, again) == found, body
        for name in filter(None, (session, client.session)):
            assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


def run_clients(port, *, count, seconds, longest, num_leaving):
    until = time.monotonic() + seconds
    clients = [Client(port, n, until, longest=longest, leaves=n % 20 < num_leaving) for n in range(count)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    wait_idle(port)
    return clients


def test_clients_at_once_get_what_each_gets_alone():
    with engine(store=make_store(limit=8), start=False) as made, served(made, Settings("tiny")) as port:
        clients = run_clients(port, count=12, seconds=0, longest=12, num_leaving=2)
        check(port, clients)
        assert made.store.num_sessions == 0 and sum(len(client.asked) for client in clients) == 12


@pytest.mark.slow
def test_200_clients_for_two_minutes(tmp_path):
    """Sessions among them; ten leave in the middle. Then all again alone; the server's memory is as before."""
    limits = Limits(waiting=2000)
    with in_its_own_process(tmp_path, num_sessions=64, limits=limits) as (port, process):
        for client in run_clients(port, count=200, seconds=5, longest=60, num_leaving=1):
            if client.session:
                assert ask(port, f"/v1/sessions/{client.session}", method="DELETE")[0] == 200
        before, cancelled = resident_mib(process), metrics(port)['txl_choices_ended_total{reason="cancelled"}']
        clients = run_clients(port, count=200, seconds=120, longest=60, num_leaving=1)
        figures = metrics(port)
        assert figures['txl_choices_ended_total{reason="cancelled"}'] >= cancelled + 10
        check(port, clients)
        after = resident_mib(process)
        print(sum(len(client.asked) for client in clients), "requests of 200 clients,", end=" ")
        print(f"{figures['txl_tokens_written_total']:.0f} tokens; the server's memory {before} MiB, then {after} MiB")
        assert after <= 1.05 * before and all(client.asked for client in clients)
        assert metrics(port)["txl_sessions"] == 0
