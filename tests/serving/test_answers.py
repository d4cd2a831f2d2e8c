"""Tests how answers are written: what they cost, in pieces, with names that are kept, only while
somebody waits.
"""

import concurrent.futures
import importlib.resources
import json
import re
import types

import numpy as np
import pytest

from support import tiny_model
from support.http_server import ask, left, server
from support.serving import SECONDS, gate, ids, refused
from support.waiting import wait_until
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.errors import RequestError
from txl_jax.inference.decode import Scores
from txl_jax.serving import completion, protocol
from txl_jax.serving.engine import Piece, Prompt, ServerLimits
from txl_jax.serving.sessions import SessionStore

LIMITS = ServerLimits(tokens=50_000, new_tokens=4000)
LARGE = {"prompt": ids(600).tolist(), "n": 4, "max_tokens": 0, "echo": True, "logprobs": 5}


class Counting(ByteVocabulary):
    """Bytes as tokens, which counts how often it decodes."""

    def decode(self, tokens):
        calls.append(len(np.ravel(tokens)))
        return super().decode(tokens)


calls: list[int] = []


@pytest.fixture
def vocabulary():
    calls.clear()
    return Counting(bytes(range(256)))


def pieces(count, *, size=64):
    """Pieces of random bytes, most of them no characters by themselves, with scores but for the
    first token.
    """
    random = np.random.default_rng(0)
    found = [Piece("", np.asarray([97], np.int32), None, is_prompt=True)]
    for _ in range(count):
        tokens = random.integers(0, 256, size).astype(np.int32)
        top_logprobs = -random.random((size, 5)).astype(np.float32)
        top_logprobs[0, 3:] = -np.inf
        top_tokens = random.integers(0, 256, (size, 5)).astype(np.int32)
        scores = Scores(random.random(size).astype(np.float32), top_logprobs, top_tokens)
        found.append(Piece('a "text"\n', tokens, scores))
    return [*found[:-1], found[-1]._replace(end="length")]


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_in_pieces_is_the_one_at_once(vocabulary, logprobs, echo):
    prompt = Prompt(np.asarray([97, 195], np.int32), max_tokens=9, echo=echo)
    given = pieces(5)
    expected = protocol.ChoiceWriter(2, prompt, vocabulary, logprobs).json_of(given)
    writer = protocol.ChoiceWriter(2, prompt, vocabulary, logprobs)
    assert writer.whole(given, lambda: None) == json.dumps(expected).encode()
    assert writer.written == 5 * 64


def test_a_token_is_decoded_once(vocabulary, monkeypatch):
    names = protocol.TokenNames(vocabulary)
    prompt = Prompt(np.asarray([97], np.int32), max_tokens=9)
    for index in range(3):
        writer = protocol.ChoiceWriter(index, prompt, vocabulary, 5, names=names, text="a")
        writer.whole(pieces(20), lambda: None)
    assert len(calls) <= 256

    monkeypatch.setattr(protocol, "_MOST_NAMES", 10)
    names = protocol.TokenNames(vocabulary)
    assert [names.of(token) for token in range(256)] == [names.of(token) for token in range(256)]
    assert names.of(255) == (b"\xff", "bytes:\\xff") and names.of(97) == (b"a", "a")
    assert len(names._kept) == 10


def test_a_prompt_is_decoded_once_for_all_samples(vocabulary):
    made = types.SimpleNamespace(vocabulary=vocabulary, limits=ServerLimits())
    body = protocol.CompletionBody.model_validate(
        {"prompt": [97] * 1000, "n": 100, "max_tokens": 1}
    )
    run = completion.CompletionRun(made, body, model="tiny", names=protocol.TokenNames(vocabulary))
    assert len(run._writers) == 100 and calls == [1000]


# A body, and the tokens that it counts: a prompt of 10 tokens, and 3 to write.
SIZES = [
    ({}, 10 + 3),
    ({"n": 4}, 10 + 4 * 3),
    ({"echo": True}, 10 + 3),
    ({"n": 4, "echo": True}, 4 * (10 + 3)),
    ({"prompt": [[1] * 10, [1] * 20], "n": 2, "echo": True}, 2 * (10 + 3) + 2 * (20 + 3)),
    ({"logprobs": 0}, 10 + 2 * 3),
    ({"logprobs": 1}, 10 + 2 * 3),
    ({"logprobs": 5}, 10 + 6 * 3),
    ({"n": 4, "echo": True, "logprobs": 5}, 6 * 4 * (10 + 3)),
    ({"n": 4, "echo": True, "logprobs": 1, "max_tokens": 0}, 2 * 4 * 10),
]


@pytest.mark.parametrize(("changes", "size"), SIZES)
def test_what_is_written_counts(changes, size):
    body = protocol.CompletionBody.model_validate({"prompt": [1] * 10, "max_tokens": 3} | changes)
    assert protocol.prompts_of(body, tiny_model.VOCABULARY, ServerLimits(tokens=size))
    error = refused(
        400, protocol.prompts_of, body, tiny_model.VOCABULARY, ServerLimits(tokens=size - 1)
    )
    assert (error.code, error.param) == ("too_many_tokens", "prompt") and f"got {size}" in str(
        error
    )


@pytest.fixture(scope="module")
def running():
    with server(limits=LIMITS) as found:
        yield found


@pytest.fixture
def written(monkeypatch):
    """Counts the pieces that are written."""
    found = []
    json_of = protocol.ChoiceWriter.json_of
    monkeypatch.setattr(
        protocol.ChoiceWriter, "json_of", lambda *given: found.append(1) or json_of(*given)
    )
    return found


def test_a_large_answer_is_not_written_for_a_client_that_has_left(running, written):
    port, made = running
    before = made.counters.ended["length"]
    with gate(protocol.ChoiceWriter, "json_of", call=3) as (reached, through):
        with left(port, LARGE):
            assert reached.wait(SECONDS)
        wait_until(lambda: '{status="499"} 1.0' in ask(port, "/metrics")[1])
        through.set()
        wait_until(lambda: not completion._WRITERS._work_queue.qsize())
    assert ask(port, "/v1/completions", LARGE | {"n": 1})[0] == 200
    assert made.counters.ended["length"] == before + 5, "the model had done its work"
    assert len(written) < 3 + 1 + 20, "40 pieces of the first answer, 10 of the second"


def test_a_large_answer_is_not_written_when_its_time_is_over(running, written, monkeypatch):
    port, _ = running
    late = 0
    monotonic = completion.time.monotonic
    clock = types.SimpleNamespace(monotonic=lambda: monotonic() + late, time=completion.time.time)
    monkeypatch.setattr(completion, "time", clock)
    pieces_written = gate(protocol.ChoiceWriter, "json_of", call=3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pieces_written as (reached, through):
        found = pool.submit(ask, port, "/v1/completions", LARGE)
        assert reached.wait(SECONDS)
        late = LIMITS.seconds
        through.set()
        status, answer = found.result(SECONDS)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert len(written) == 3


def test_a_large_answer_is_cut_off_with_the_server(written):
    pieces_written = gate(protocol.ChoiceWriter, "json_of", call=3)
    with (
        server(limits=LIMITS) as (port, made),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pieces_written as (reached, through),
    ):
        found = pool.submit(ask, port, "/v1/completions", LARGE)
        assert reached.wait(SECONDS)
        made.cut_off()
        through.set()
        status, answer = found.result(SECONDS)
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert len(written) == 3


def test_the_page_knows_what_the_server_answers():
    """A lost session is forgotten, so that the next text begins anew.

    One in use is waited for, but not forever.
    """
    page = importlib.resources.files("txl_jax.serving").joinpath("page.html").read_text()
    with pytest.raises(RequestError) as raised:
        SessionStore(limit=1, limit_per_owner=1, seconds=1).get("5f00", "")
    assert (
        re.search(r'if \(error\.code === "(\w+)"\) session = null;', page)[1] == raised.value.code
    )
    milliseconds = int(re.search(r"const BUSY_MILLISECONDS = (\d+);", page)[1])
    assert 1000 < milliseconds <= 30_000
    assert "if (response.status !== 409 || Date.now() > until) return checked(response);" in page
