"""Tests the engine without HTTP: many completions at once against each by itself, stop strings,
failures, and sessions.
"""

import asyncio
import dataclasses
import itertools
import statistics
import time
from unittest import mock

import numpy as np
import pytest

from support import tiny_model
from support.serving import engine, ids, make_store, refused, run, submit, submit_all
from txl_jax.config import GenerateConfig
from txl_jax.serving.app import _Server
from txl_jax.serving.engine import Completion, Prompt, ServerLimits
from txl_jax.serving.sessions import EMPTY

NOTHING = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def made():
    with engine() as started:
        yield started


LIMITS = [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3}]


def varied_prompts(count):
    """Prompts of different lengths, seeds, limits and kinds of answers."""
    rng = np.random.default_rng(4)
    prompts = []
    # Some prompts have more tokens than a segment (64), and most answers more than a call (5).
    for number in range(count):
        seed = int(rng.integers(1 << 62))
        tokens = ids(int(rng.integers(1, 90)), seed=number)
        prompt = Prompt(
            tokens,
            max_tokens=int(rng.integers(1, 24)),
            seed=seed,
            logprobs=number % 3 == 0,
            echo=number % 2 == 0,
            **LIMITS[number % 4],
        )
        prompts.append(prompt)
    return prompts


@dataclasses.dataclass(frozen=True)
class Content:
    """What a completion has brought when it has ended."""

    tokens: list[int]
    prompt: list[int]
    text: str
    end: str
    nats: list[float]  # The prompt's and the tokens', if they were asked for.


def content(result):
    nats = []
    for piece in result.pieces:
        if piece.scores:
            nats += piece.scores.nats.tolist()
    return Content(result.tokens(), result.tokens(prompt=True), result.text, result.end, nats)


def begin(made, session=None):
    """Begins a request in a session, or in a new one."""
    if session is None:
        session = made.store.create("me")
    return made.store.begin(session.name, "me")


def is_idle(made):
    return made.num_busy == made.num_waiting == 0


def test_many_completions_get_what_each_gets_alone(made):
    prompts = varied_prompts(14)  # More than there are rows.

    results = [submit(made, prompt)[1] for prompt in prompts]
    together = [content(result.wait()) for result in results]

    for prompt, answer in zip(prompts, together, strict=True):
        assert answer == content(run(made, prompt)), prompt
        assert len(answer.tokens) == prompt.max_tokens, prompt
    assert is_idle(made)


# Nothing to read before the first draw, or two segments of 64 tokens and one more token.
@pytest.mark.parametrize("length", [1, 130])
def test_a_prompt_is_read_once_for_all_its_samples(made, length):
    """Six samples in four rows are the library's samples.

    The prompt has the same scores as with one sample.
    """
    prompt = Prompt(ids(length), 12, n=6, seed=3, logprobs=True, echo=True)
    before = made.counters.read

    _, results = submit_all(made, prompt)
    samples = [content(result.wait()) for result in results]

    n_read = length - 1  # The last token is read by the call that draws the next one.
    assert made.counters.read == before + n_read
    model = tiny_model.make()
    generator = model.components.generator(model.components.prepare_params(model.params))
    settings = GenerateConfig(length=12, samples=6, seed=3, top_k=None)
    expected = np.concatenate([*generator.tokens(prompt.tokens, settings)], axis=1)
    assert [sample.tokens for sample in samples] == expected.tolist()

    alone = content(run(made, dataclasses.replace(prompt, n=1)))
    assert samples[0] == alone
    for number, sample in enumerate(samples):
        assert sample.prompt == alone.prompt, f"sample {number}"
        assert sample.nats[:n_read] == alone.nats[:n_read], f"sample {number}"


def test_reading_yields_to_rows_that_write(made, monkeypatch):
    """Two segments of a tenth of a second are read between two calls that write.

    A third segment would exceed the engine's limit of 0.25 s. The segments are of three prompts in
    turn.
    """
    read = made.step.read
    write = made.step.write
    # The rows that are read between two writes.
    rounds = [[]]

    def slow_read(weights, cache, row, *arguments, **options):
        rounds[-1].append(row)
        time.sleep(0.1)
        return read(weights, cache, row, *arguments, **options)

    def counted_write(*arguments):
        rounds.append([])
        return write(*arguments)

    completion, result = submit(made, Prompt(ids(2), 4000))
    result.next()
    monkeypatch.setattr(made.step, "read", slow_read)
    monkeypatch.setattr(made.step, "write", counted_write)
    # Each prompt has at least three segments.
    readers = [submit(made, Prompt(ids(200, seed=seed), 1))[1] for seed in range(3)]
    for reader in readers:
        reader.wait()
    made.cancel([completion])
    refused(499, result.wait)

    for rows in rounds:
        assert len(set(rows)) == len(rows), rounds
    assert max(len(rows) for rows in rounds) == 2
    order = list(itertools.chain(*rounds))
    in_turn = list(dict.fromkeys(order))
    assert len(in_turn) == 3
    assert order[:9] == in_turn * 3


def broken(function, *, call):
    """The function, which raises at its n-th call."""
    calls = itertools.count(1)

    def call_or_raise(*arguments, **options):
        if next(calls) == call:
            raise ValueError("a bug")
        return function(*arguments, **options)

    return call_or_raise


# What is called for one row alone: its memory is put into the cache, its prompt is read, its memory
# is taken out, and its client gets a piece.
@pytest.mark.parametrize("place", ["put", "read", "take", "sink"])
def test_what_fails_in_one_row_ends_its_request_alone(made, place, monkeypatch, caplog):
    """Its neighbour gets its text, and its session is as before and can be used."""
    neighbour = Prompt(ids(5), 400, seed=1)
    expected = content(run(made, neighbour))
    _, result_of_neighbour = submit(made, neighbour)
    result_of_neighbour.next()
    # A session with a memory, which is put into a row when it continues.
    session = made.store.create("me")
    run(made, Prompt(ids(5), 1), begin(made, session))
    state = session.state

    prompt = Prompt(ids(300, seed=2), 20)
    completion, [result] = submit_all(made, prompt, begin(made, session), start=False)
    if place == "sink":
        completion.sink = broken(completion.sink, call=1)
    else:
        monkeypatch.setattr(made.step, place, broken(getattr(made.step, place), call=1))
    made.submit([completion])
    refused(500, result.wait)

    assert "a bug" in caplog.text
    assert session.state is state
    assert not session.busy
    assert content(result_of_neighbour.wait()) == expected
    assert is_idle(made)
    monkeypatch.undo()
    assert run(made, Prompt(ids(5), 5), begin(made, session)).end == "length"


@pytest.mark.full
def test_a_row_that_reads_is_not_overwritten_by_those_that_write():
    """With a memory that is longer than the segments, so that the first slots are seen while more
    is read.
    """
    reader = Prompt(ids(190, seed=1), 0, logprobs=True, echo=True)
    with engine(tiny_model.make(eval__mem_len=200)) as made:
        expected = content(run(made, reader))
        _, writer = submit(made, Prompt(ids(2), 400))
        writer.next()
        assert content(run(made, reader)) == expected
        assert not writer.pieces[-1].end, "the row still writes"
        writer.wait()


def test_a_session_goes_on_as_if_it_were_one_text(made):
    session = made.store.create("me")
    first = ids(50)
    second = ids(20, seed=9)

    written = run(made, Prompt(first, 17, temperature=0.0), begin(made, session)).tokens()
    assert session.state.tokens == 50 + 17
    assert not session.busy
    scored = run(made, Prompt(second, 0, logprobs=True, echo=True), begin(made, session))
    assert scored.tokens(prompt=True) == second.tolist()
    end = run(made, Prompt(NOTHING, 9, temperature=0.0), begin(made, session)).tokens()
    assert session.state.tokens == 50 + 17 + 20 + 9

    text = np.concatenate([first, written, second]).astype(np.int32)
    whole = run(made, Prompt(text, 9, temperature=0.0, logprobs=True, echo=True))
    assert end == whole.tokens()
    nats = scored.scores(prompt=True).nats
    np.testing.assert_allclose(nats, whole.scores(prompt=True).nats[-20:], rtol=1e-4)


def test_a_stop_string_ends_text_and_memory(made):
    """At the token that completes it, in the middle of a call of 5 tokens."""
    free = run(made, Prompt(ids(9), 40, seed=2))
    stop = free.text[17:19]
    n_text = free.text.index(stop)
    n_token = n_text + 2  # Each letter is a token.
    session = begin(made)

    prompt = Prompt(ids(9), 40, seed=2, stop=("never there", stop), logprobs=True)
    result = run(made, prompt, session)

    assert result.end == "stop"
    assert result.text == free.text[:n_text]
    assert result.tokens() == free.tokens()[:n_token]
    assert len(result.scores().nats) == n_token
    assert session.state.tokens == 9 + n_token
    assert session.state.pending == free.tokens()[n_token - 1]

    end = run(made, Prompt(NOTHING, 6, temperature=0.0), begin(made, session)).tokens()
    whole = np.concatenate([ids(9), result.tokens()]).astype(np.int32)
    assert end == run(made, Prompt(whole, 6, temperature=0.0)).tokens()


def test_a_late_completion_leaves_its_session(made):
    """A request that takes too long fails, and its session is as before."""
    session = begin(made)
    _, result = submit(made, Prompt(ids(30), 4000), session, seconds=0.05)
    refused(504, result.wait)
    assert session.state is EMPTY
    assert not session.busy


def test_too_many_completions_are_refused_and_the_end_is_answered():
    with engine(limits=ServerLimits(waiting=2)) as made:
        sink = mock.Mock()
        # Seven samples never fit into four rows and two places to wait.
        refused(400, made.submit, [Completion(Prompt(ids(5), 1, n=7), sink, until=0)])
        sink.assert_not_called()
        results = [submit(made, Prompt(ids(5), 4000))[1] for _ in range(6)]
        refused(429, submit, made, Prompt(ids(5), 1))
        results[0].next()
        # Some completions have rows by now, and others wait for one.
        made.stop()
        for result in results:
            refused(503, result.wait)
        refused(503, submit, made, Prompt(ids(5), 1))


def test_a_failed_engine_says_so_with_a_new_exception_each_time(monkeypatch, caplog):
    with engine() as made:
        run(made, Prompt(ids(3), 1))
        monkeypatch.setattr(
            made.step, "write", mock.Mock(side_effect=OSError("the device is gone"))
        )
        refused(503, run, made, Prompt(ids(3), 1))
        errors = [refused(503, submit, made, Prompt(ids(3), 1)) for _ in range(2)]
        assert made.failed
        assert not made.ready
        assert "the device is gone" in caplog.text
        assert errors[0] is not errors[1]
        health = _Server(made, "tiny", ()).health(None)  # It does not look at its request.
        assert asyncio.run(health).status_code == 503


def test_sessions_expire_after_their_last_use():
    now = [1000.0]  # The clock, which the test sets forward.
    store = make_store(seconds=60, clock=lambda: now[0])
    old = store.create("a")
    used = store.create("a")
    busy = store.create("a")
    store.begin(busy.name, "a")
    now[0] += 50
    store.release(store.begin(used.name, "a"))
    now[0] += 50
    refused(404, store.get, old.name, "a")
    assert {session.name for session in store.of_owner("a")} == {used.name, busy.name}
    now[0] += 100
    # Its time begins when the request ends.
    store.release(busy)
    assert store.get(busy.name, "a") is busy


def test_the_session_idle_longest_makes_room_first_its_owners():
    """The store has place for four sessions, three for each owner."""
    now = itertools.count(1000)  # Each look at the clock is a second later.
    store = make_store(limit=4, limit_per_owner=3, clock=lambda: next(now))
    mine = [store.create("a") for _ in range(2)]
    other = [store.create("b") for _ in range(2)]
    store.begin(mine[0].name, "a")
    mine.append(store.create("a"))  # No place in all: the oldest that no request uses.
    refused(404, store.get, mine[1].name, "a")
    store.get(other[0].name, "b")  # Which is then idle for less long than `other[1]`.
    mine.append(store.create("a"))
    refused(404, store.get, other[1].name, "b")
    mine.append(store.create("a"))  # No place for this owner.
    refused(404, store.get, mine[2].name, "a")
    assert len(store.of_owner("a")) == 3
    assert store.num_sessions == 4
    assert store.num_evicted == 3

    for session in mine[3:]:
        store.begin(session.name, "a")
    refused(429, store.create, "a")
    assert store.num_bytes == 0, "sessions that have read nothing have no memory"


def seconds_of(made, session, number):
    """Processor time of a request of 500 tokens in a session, 400 of which are read."""
    prompt = Prompt(ids(400, seed=number), 100, seed=number, logprobs=True, echo=True)
    start = time.process_time()
    result = run(made, prompt, begin(made, session))
    seconds = time.process_time() - start
    assert np.all(np.isfinite(result.scores().nats))
    return seconds


def bytes_of(session):
    rings = session.state.rings
    return sum(ring.nbytes for ring in (*rings.keys, *rings.values))


@pytest.mark.nightly(part="long")
def test_a_session_of_100_000_tokens():
    """200 requests of 500 tokens. The last 60 alternate with the first requests of new sessions."""
    sizes = set()
    at_first = []
    at_last = []
    with engine() as made:
        session = made.store.create("me")
        for number in range(200):
            seconds = seconds_of(made, session, number)
            sizes.add(bytes_of(session))
            if number >= 140:
                at_last.append(seconds)
                new_session = made.store.create("me")
                at_first.append(seconds_of(made, new_session, number))
                sizes.add(bytes_of(new_session))
                made.store.delete(new_session.name, "me")

    first = statistics.median(at_first) / 500 * 1e6
    last = statistics.median(at_last) / 500 * 1e6
    print(
        f"processor time per token {first:.0f} us at first, {last:.0f} us at last; "
        f"{sizes} bytes of memory"
    )
    assert session.state.tokens == 100_000
    # Neither memory nor time grow with the session. The times are measured ones.
    assert len(sizes) == 1
    assert last < 1.15 * first
