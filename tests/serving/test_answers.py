"""Tests how answers are written: in pieces, with each token decoded once, and only while a client
waits.
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

LIMITS = ServerLimits()
# An answer that takes time to write, although the model writes no token: four times the prompt with
# the scores of its tokens.
LARGE = {"prompt": ids(600).tolist(), "n": 4, "max_tokens": 0, "echo": True, "logprobs": 5}
# The pieces of each choice: the first token, nine segments of 64 tokens, one of 16, the remaining 7
# tokens, and the end.
LARGE_PIECES = 1 + 9 + 1 + 1 + 1
PIECE_TOKENS = 64  # Of each of `pieces` but the first.

calls: list[int] = []  # The number of tokens of each call of `Counting.decode`.


class Counting(ByteVocabulary):
    """Bytes as tokens, which counts how often it decodes."""

    def decode(self, tokens):
        calls.append(len(np.ravel(tokens)))
        return super().decode(tokens)


@pytest.fixture
def vocabulary():
    calls.clear()
    return Counting(bytes(range(256)))


def pieces(count):
    """Pieces of random bytes, few of which are characters by themselves.

    The first piece is a prompt's first token, which has no scores, as nothing precedes it.
    """
    size = PIECE_TOKENS
    random = np.random.default_rng(0)
    made = [Piece("", np.asarray([97], np.int32), None, is_prompt=True)]
    for _ in range(count):
        tokens = random.integers(0, 256, size).astype(np.int32)
        top_logprobs = -random.random((size, 5)).astype(np.float32)
        # Where fewer than five tokens are possible, the rest is filled up so.
        top_logprobs[0, 3:] = -np.inf
        top_tokens = random.integers(0, 256, (size, 5)).astype(np.int32)
        scores = Scores(random.random(size).astype(np.float32), top_logprobs, top_tokens)
        made.append(Piece('a "text"\n', tokens, scores))
    made[-1] = made[-1]._replace(end="length")
    return made


# Without logprobs, with each token's own alone, and with one or five of the most likely tokens.
@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_in_pieces_is_the_one_at_once(vocabulary, logprobs, echo):
    # The second byte of the prompt is the first half of a character.
    prompt = Prompt(np.asarray([97, 195], np.int32), max_tokens=9, echo=echo)
    choice = pieces(5)
    expected = protocol.ChoiceWriter(2, prompt, vocabulary, logprobs).json_of(choice)

    writer = protocol.ChoiceWriter(2, prompt, vocabulary, logprobs)
    answer = writer.whole(choice, lambda: None)

    assert answer == json.dumps(expected).encode()
    assert writer.written == 5 * PIECE_TOKENS


def test_a_token_is_decoded_once(vocabulary):
    """For all choices of an answer, which share the names of the 256 tokens."""
    names = protocol.TokenNames(vocabulary)
    prompt = Prompt(np.asarray([97], np.int32), max_tokens=9)
    for index in range(3):
        # With its text given, the prompt is not decoded here.
        writer = protocol.ChoiceWriter(index, prompt, vocabulary, 5, names=names, text="a")
        writer.whole(pieces(20), lambda: None)
    assert len(calls) <= 256


def test_few_names_of_tokens_are_kept(vocabulary, monkeypatch):
    monkeypatch.setattr(protocol, "_MOST_NAMES", 10)
    names = protocol.TokenNames(vocabulary)

    first = [names.of(token) for token in range(256)]
    second = [names.of(token) for token in range(256)]

    assert second == first
    assert first[97] == (b"a", "a")
    assert first[255] == (b"\xff", "bytes:\\xff")
    assert len(names._kept) == 10


def test_a_prompt_is_decoded_once_for_all_samples(vocabulary):
    # All that a run reads of its engine before it is submitted.
    idle_engine = types.SimpleNamespace(vocabulary=vocabulary, limits=ServerLimits())
    body = protocol.CompletionBody.model_validate(
        {"prompt": [97] * 1000, "n": 100, "max_tokens": 1}
    )
    names = protocol.TokenNames(vocabulary)
    run = completion.CompletionRun(idle_engine, body, model="tiny", names=names)
    assert len(run._writers) == 100
    assert calls == [1000]


TWO_PROMPTS = [[1] * 10, [1] * 20]


# What changes in a body with a prompt of 10 tokens and 3 to write, and the tokens that it counts.
@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 10 + 3),
        ({"n": 4}, 10 + 4 * 3),
        ({"echo": True}, 10 + 3),
        ({"n": 4, "echo": True}, 4 * (10 + 3)),
        ({"prompt": TWO_PROMPTS, "n": 2, "echo": True}, 2 * (10 + 3) + 2 * (20 + 3)),
        ({"logprobs": 0}, 10 + 2 * 3),
        ({"logprobs": 1}, 10 + 2 * 3),
        ({"logprobs": 5}, 10 + 6 * 3),
        ({"n": 4, "echo": True, "logprobs": 5}, 6 * 4 * (10 + 3)),
        ({"n": 4, "echo": True, "logprobs": 1, "max_tokens": 0}, 2 * 4 * 10),
    ],
    ids=str,
)
def test_what_is_written_counts(changes, size):
    """A token of the answer counts once, and with logprobs once more for each of its entries.

    It has at least one entry, its own logprob. With echo the prompt is a part of each answer.
    """
    body = protocol.CompletionBody.model_validate({"prompt": [1] * 10, "max_tokens": 3} | changes)
    enough = ServerLimits(tokens=size)
    too_few = ServerLimits(tokens=size - 1)

    assert protocol.prompts_of(body, tiny_model.VOCABULARY, enough)
    error = refused(400, protocol.prompts_of, body, tiny_model.VOCABULARY, too_few)

    assert error.code == "too_many_tokens"
    assert error.param == "prompt"
    assert f"got {size}" in str(error)


@pytest.fixture(scope="module")
def running():
    """The port of a server, and its engine."""
    with server(limits=LIMITS) as port_and_engine:
        yield port_and_engine


@pytest.fixture
def written(monkeypatch):
    """A list with an entry for each piece whose JSON is made."""
    entries = []
    json_of = protocol.ChoiceWriter.json_of

    def counted(writer, piece):
        entries.append(1)
        return json_of(writer, piece)

    monkeypatch.setattr(protocol.ChoiceWriter, "json_of", counted)
    return entries


def test_a_large_answer_is_not_written_for_a_client_that_has_left(running, written):
    port, made = running
    before = made.counters.ended["length"]
    with gate(protocol.ChoiceWriter, "json_of", call=3) as (reached, through):
        with left(port, LARGE):
            assert reached.wait(SECONDS)
        # The server counts the request once it has noticed that its client has left.
        wait_until(lambda: '{status="499"} 1.0' in ask(port, "/metrics")[1])
        through.set()
    status, answer = ask(port, "/v1/completions", LARGE | {"n": 1})

    assert status == 200, answer
    assert made.counters.ended["length"] == before + 4 + 1, "the model had done its work"
    assert len(written) == 3 + LARGE_PIECES, "three pieces of the first answer"


def test_a_large_answer_is_not_written_when_its_time_is_over(running, written, monkeypatch):
    port, _ = running
    # The clock that writing looks at is set forward by these seconds. The engine has its own, and
    # has ended the choices by then.
    late = 0
    monotonic = completion.time.monotonic
    clock = types.SimpleNamespace(monotonic=lambda: monotonic() + late, time=completion.time.time)
    monkeypatch.setattr(completion, "time", clock)
    pieces_written = gate(protocol.ChoiceWriter, "json_of", call=3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pieces_written as (reached, through):
        request = pool.submit(ask, port, "/v1/completions", LARGE)
        assert reached.wait(SECONDS)
        late = LIMITS.seconds
        through.set()
        status, answer = request.result(SECONDS)
    assert status == 504, answer
    assert answer["error"]["code"] == "timeout"
    assert len(written) == 3, "no piece after the one at which the time was over"


def test_a_large_answer_is_cut_off_with_the_server(written):
    pieces_written = gate(protocol.ChoiceWriter, "json_of", call=3)
    with (
        server(limits=LIMITS) as (port, made),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pieces_written as (reached, through),
    ):
        request = pool.submit(ask, port, "/v1/completions", LARGE)
        assert reached.wait(SECONDS)
        made.cut_off()
        through.set()
        status, answer = request.result(SECONDS)
    assert status == 503, answer
    assert answer["error"]["code"] == "unavailable"
    assert len(written) == 3, "no piece after the one at which it was cut off"


def test_the_page_knows_what_the_server_answers():
    """It forgets a lost session, so that the next text begins from scratch.

    It waits for a session that is in use, but not forever.
    """
    page = importlib.resources.files("txl_jax.serving").joinpath("page.html").read_text()
    with pytest.raises(RequestError) as raised:
        SessionStore(limit=1, limit_per_owner=1, seconds=1).get("no such session", "")
    forgets = re.search(r'if \(error\.code === "(\w+)"\) session = null;', page)
    assert forgets[1] == raised.value.code

    # The server frees the session of a stopped request after its call of the model, which takes
    # less than a second. The status of a session that is in use is 409.
    milliseconds = int(re.search(r"const BUSY_MILLISECONDS = (\d+);", page)[1])
    assert 1000 < milliseconds <= 30_000
    assert "if (response.status !== 409 || Date.now() > until) return checked(response);" in page
