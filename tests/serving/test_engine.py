"""Tests the engine without HTTP: many completions against each by itself, stop strings,
completions that are ended, old sessions.
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


def choices(count):
    rng = np.random.default_rng(4)
    limits = [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3}]
    for number in range(count):
        kept = {"logprobs": number % 3 == 0, "echo": number % 2 == 0}
        drawn = {"seed": int(rng.integers(1 << 62)), **limits[number % 4]}
        yield Prompt(
            ids(int(rng.integers(1, 90)), seed=number), int(rng.integers(1, 24)), **drawn, **kept
        )


def content(result):
    scores = [
        each for piece in result.pieces if piece.scores for each in piece.scores.nats.tolist()
    ]
    return result.tokens(), result.tokens(prompt=True), result.text, result.end, scores


def begin(made, session=None):
    return made.store.begin((session or made.store.create("me")).name, "me")


def test_many_completions_get_what_each_gets_alone(made):
    given = [*choices(14)]
    together = [submit(made, choice)[1] for choice in given]
    found = [content(result.wait()) for result in together]
    assert found == [content(run(made, choice)) for choice in given]
    assert [len(each[0]) for each in found] == [choice.max_tokens for choice in given]
    assert made.num_busy == made.num_waiting == 0


@pytest.mark.parametrize("length", [1, 130])
def test_a_prompt_is_read_once_for_all_its_samples(made, length):
    """Six of them in four rows, which draw what the library draws; scores of the prompt are those
    of one alone.
    """
    prompt = Prompt(ids(length), 12, n=6, seed=3, logprobs=True, echo=True)
    before = made.counters.read
    results = [result.wait() for result in submit_all(made, prompt)[1]]
    assert made.counters.read == before + length - 1
    model = tiny_model.make()
    generator = model.components.generator(model.components.prepare_params(model.params))
    settings = GenerateConfig(length=12, samples=6, seed=3, top_k=None)
    drawn = np.concatenate([*generator.tokens(prompt.tokens, settings)], axis=1)
    assert [result.tokens() for result in results] == drawn.tolist()
    alone = content(run(made, dataclasses.replace(prompt, n=1)))
    assert content(results[0]) == alone
    assert all(result.tokens(prompt=True) == alone[1] for result in results)
    assert all(content(result)[4][: length - 1] == alone[4][: length - 1] for result in results)


def test_reading_yields_to_rows_that_write(made, monkeypatch):
    """Two segments of a tenth of a second are read between two calls that write, of three prompts
    in turn.
    """
    calls, read, write = [], made.step.read, made.step.write

    def slow_read(weights, cache, number, *given, **named):
        calls.append(number)
        time.sleep(0.1)
        return read(weights, cache, number, *given, **named)

    def counted_write(*given):
        calls.append(None)
        return write(*given)

    writer = submit(made, Prompt(ids(2), 4000))
    writer[1].next()
    monkeypatch.setattr(made.step, "read", slow_read)
    monkeypatch.setattr(made.step, "write", counted_write)
    readers = [submit(made, Prompt(ids(200, seed=seed), 1))[1] for seed in range(3)]
    for reader in readers:
        reader.wait()
    made.cancel(writer[:1])
    refused(499, writer[1].wait)
    rounds = [
        [*group]
        for is_read, group in itertools.groupby(calls, lambda call: call is not None)
        if is_read
    ]
    assert max(map(len, rounds)) == 2 and all(len({*each}) == len(each) for each in rounds)
    order = list(dict.fromkeys(itertools.chain(*rounds)))
    assert [*itertools.chain(*rounds)][:9] == order * 3


def broken(function, *, call):
    """The function, which raises at its n-th call."""
    calls = itertools.count(1)

    def call_or_raise(*arguments, **named):
        if next(calls) == call:
            raise ValueError("a bug")
        return function(*arguments, **named)

    return call_or_raise


@pytest.mark.parametrize("place", ["put", "read", "take", "sink"])
def test_what_fails_in_one_row_ends_its_request_alone(made, place, monkeypatch, caplog):
    neighbour = Prompt(ids(5), 400, seed=1)
    alone = content(run(made, neighbour))
    beside = submit(made, neighbour)[1]
    beside.next()
    session = made.store.create("me")
    run(made, Prompt(ids(5), 1), begin(made, session))
    state, prompt = session.state, Prompt(ids(300, seed=2), 20)
    completion, [result, *_] = submit_all(made, prompt, begin(made, session), start=False)
    if place == "sink":
        completion.sink = broken(completion.sink, call=1)
    else:
        monkeypatch.setattr(made.step, place, broken(getattr(made.step, place), call=1))
    made.submit([completion])
    refused(500, result.wait)
    assert "a bug" in caplog.text and session.state is state and not session.busy
    assert content(beside.wait()) == alone and made.num_busy == made.num_waiting == 0
    monkeypatch.undo()
    assert run(made, Prompt(ids(5), 5), begin(made, session)).end == "length"


@pytest.mark.full
def test_a_row_that_reads_is_not_overwritten_by_those_that_write():
    """With a memory that is longer than the segments, so that the first slots are seen while more
    is read.
    """
    with engine(tiny_model.make(eval__mem_len=200)) as made:
        reader = Prompt(ids(190, seed=1), 0, logprobs=True, echo=True)
        alone = content(run(made, reader))
        writer = submit(made, Prompt(ids(2), 400))[1]
        writer.next()
        assert content(run(made, reader)) == alone and not writer.pieces[-1].end
        writer.wait()


def test_a_session_goes_on_as_if_it_were_one_text(made):
    session, first, second = made.store.create("me"), ids(50), ids(20, seed=9)
    written = run(made, Prompt(first, 17, temperature=0.0), begin(made, session)).tokens()
    assert session.state.tokens == 67 and not session.busy
    scored = run(made, Prompt(second, 0, logprobs=True, echo=True), begin(made, session))
    assert scored.tokens(prompt=True) == second.tolist()
    more = run(made, Prompt(NOTHING, 9, temperature=0.0), begin(made, session)).tokens()
    whole = np.concatenate([first, written, second]).astype(np.int32)
    alone = run(made, Prompt(whole, 9, temperature=0.0, logprobs=True, echo=True))
    assert more == alone.tokens() and session.state.tokens == 96
    np.testing.assert_allclose(
        scored.scores(prompt=True).nats, alone.scores(prompt=True).nats[-20:], rtol=1e-4
    )


def test_a_stop_string_ends_text_and_memory(made):
    """At the token that completes it, in the middle of a call."""
    free = run(made, Prompt(ids(9), 40, seed=2))
    stop = free.text[17:19]
    at = free.text.index(stop)
    session = begin(made)
    result = run(
        made, Prompt(ids(9), 40, seed=2, stop=("never there", stop), logprobs=True), session
    )
    assert result.end == "stop" and result.text == free.text[:at]
    assert result.tokens() == free.tokens()[: at + 2] and len(result.scores().nats) == at + 2
    assert session.state.tokens == 9 + at + 2 and session.state.pending == free.tokens()[at + 1]
    more = run(made, Prompt(NOTHING, 6, temperature=0.0), begin(made, session)).tokens()
    whole = np.concatenate([ids(9), result.tokens()]).astype(np.int32)
    assert more == run(made, Prompt(whole, 6, temperature=0.0)).tokens()


def test_a_late_completion_leaves_its_session(made):
    session = begin(made)
    refused(504, submit(made, Prompt(ids(30), 4000), session, seconds=0.05)[1].wait)
    assert session.state is EMPTY and not session.busy


def test_too_many_completions_are_refused_and_the_end_is_answered():
    with engine(limits=ServerLimits(waiting=2)) as made:
        # However long one waits.
        refused(400, made.submit, [Completion(Prompt(ids(5), 1, n=7), print, 0)])
        results = [submit(made, Prompt(ids(5), 4000))[1] for _ in range(6)]
        refused(429, submit, made, Prompt(ids(5), 1))
        results[0].next()
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
        assert made.failed and not made.ready and "the device is gone" in caplog.text
        assert errors[0] is not errors[1]
        assert asyncio.run(_Server(made, "tiny", ()).health(None)).status_code == 503


def test_sessions_expire_after_their_last_use():
    now = [1000.0]
    store = make_store(seconds=60, clock=lambda: now[0])
    old, used, busy = (store.create("a") for _ in range(3))
    store.begin(busy.name, "a")
    now[0] += 50
    store.release(store.begin(used.name, "a"))
    now[0] += 50
    refused(404, store.get, old.name, "a")
    assert {each.name for each in store.of_owner("a")} == {used.name, busy.name}
    now[0] += 100
    store.release(busy)
    assert store.get(busy.name, "a") is busy


def test_the_session_idle_longest_makes_room_first_its_owners():
    now = itertools.count(1000)
    store = make_store(limit=4, limit_per_owner=3, clock=lambda: next(now))
    mine = [store.create("a") for _ in range(2)]
    other = [store.create("b") for _ in range(2)]
    store.begin(mine[0].name, "a")
    mine.append(store.create("a"))  # No place in all: the oldest that no request uses.
    refused(404, store.get, mine[1].name, "a")
    store.get(other[0].name, "b")
    mine.append(store.create("a"))
    refused(404, store.get, other[1].name, "b")
    mine.append(store.create("a"))  # No place for this owner.
    refused(404, store.get, mine[2].name, "a")
    assert len(store.of_owner("a")) == 3 and store.num_sessions == 4 and store.num_evicted == 3
    for session in mine[3:]:
        store.begin(session.name, "a")
    refused(429, store.create, "a")
    assert store.num_bytes == 0


@pytest.mark.nightly(part="long")
def test_a_session_of_100_000_tokens():
    """200 requests of 500 tokens, 400 of which are read; the last 60 in turn with the first of new
    sessions.
    """
    sizes, seconds = set(), {"beginning": [], "end": []}
    with engine() as made:

        def ask(session, number):
            choice = Prompt(ids(400, seed=number), 100, seed=number, logprobs=True, echo=True)
            start = time.process_time()
            result = run(made, choice, begin(made, session))
            taken = time.process_time() - start
            sizes.add(
                sum(
                    ring.nbytes for ring in (*session.state.rings.keys, *session.state.rings.values)
                )
            )
            assert np.all(np.isfinite(result.scores().nats))
            return taken

        session = made.store.create("me")
        for number in range(200):
            taken = ask(session, number)
            if number >= 140:
                new = made.store.create("me")
                seconds["beginning"].append(ask(new, number))
                seconds["end"].append(taken)
                made.store.delete(new.name, "me")
        first, last = (statistics.median(each) / 500 * 1e6 for each in seconds.values())
        print(
            f"processor time per token {first:.0f} us at first, {last:.0f} us at last; "
            f"{sizes} bytes of memory"
        )
        assert session.state.tokens == 100_000 and len(sizes) == 1 and last < 1.15 * first
