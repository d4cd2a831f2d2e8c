"""Tests that a session costs the same per token, and as much memory, at its end as at its beginning."""

import statistics
import time

import numpy as np
import pytest

from support.serving import engine, ids, run
from txl_jax.serving.requests import Choice, Sampling


@pytest.mark.nightly(part="long")
def test_a_session_of_100_000_tokens():
    """200 requests of 500 tokens, 400 of which are read; the last 60 in turn with the first of new sessions."""
    sizes, seconds = set(), {"beginning": [], "end": []}
    with engine() as made:

        def ask(session, number):
            choice = Choice(ids(400, seed=number), 100, Sampling(seed=number), logprobs=True, echo=True)
            start = time.process_time()
            result = run(made, choice, made.store.begin(session.name, "me"))
            taken = time.process_time() - start
            sizes.add(sum(ring.nbytes for ring in (*session.state.rings.keys, *session.state.rings.values)))
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
        print(f"processor time per token {first:.0f} us at first, {last:.0f} us at last; {sizes} bytes of memory")
        assert session.state.tokens == 100_000 and len(sizes) == 1 and last < 1.15 * first
