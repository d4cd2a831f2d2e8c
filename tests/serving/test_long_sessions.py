"""Tests that a session costs the same per token, and as much memory, at its end as at its beginning."""

import statistics
import time

import numpy as np
import pytest

from support.serving import engine, ids, run
from txl_jax.serving.requests import Choice, Sampling


def state_bytes(session):
    return sum(ring.nbytes for ring in (*session.state.rings.keys, *session.state.rings.values))


@pytest.mark.slow
def test_a_session_of_100_000_tokens():
    """200 requests of 500 tokens, 400 of which are read; processor time of the first and last 50."""
    with engine() as made:
        session, seconds, sizes = made.store.create("me"), [], set()
        for number in range(200):
            start = time.process_time()
            choice = Choice(ids(400, seed=number), 100, Sampling(seed=number), logprobs=True, echo=True)
            result = run(made, choice, made.store.begin(session.name, "me"))
            seconds.append(time.process_time() - start)
            sizes.add(state_bytes(session))
            assert np.all(np.isfinite(result.scores().nats))
        first, last = statistics.median(seconds[1:51]), statistics.median(seconds[-50:])
        print(
            f"{session.state.tokens} tokens; {first / 500 * 1e6:.0f} us of processor time per token at the beginning, "
            f"{last / 500 * 1e6:.0f} us at the end; {sizes.pop()} bytes of memory"
        )
        assert session.state.tokens == 100_000 and not sizes and last < 1.15 * first
