"""Tests of what the benchmarks share: turns, ratios of times, and random tokens."""

import numpy as np
import pytest

from experiments.bench import timing
from experiments.bench.timing import Task

V = 500


def test_calls_are_interleaved_after_warm_up():
    order = []
    tasks = [Task(name, 8, lambda name=name: order.append(name)) for name in "ab"]
    timing.time_in_turns(tasks, warmup=1, calls=3)
    assert order == list("abababab")
    assert [len(task.seconds) for task in tasks] == [3, 3]


def test_the_speedup_is_the_ratio_of_throughputs_call_by_call():
    """Ours handles twice the peer's tokens in a call."""
    ours = Task("x", 16, lambda: None, seconds=[1.0, 2.0, 4.0])
    peer = Task("x", 8, lambda: None, seconds=[4.0, 5.0, 8.0])
    assert (ours.rates, ours.cells) == ([16.0, 8.0, 4.0], ["8", "4", "16"])
    assert ours.speedups(peer) == [8.0, 5.0, 4.0]


def test_probabilities_follow_the_power_law():
    p = timing.probabilities(V)
    assert p.sum() == pytest.approx(1)
    assert p[0] / p[9] == pytest.approx((12.7 / 3.7) ** 1.1)
    drawn = timing.draw_tokens(V, 20_000)
    np.testing.assert_allclose((drawn < 50).mean(), p[:50].sum(), atol=0.02)
