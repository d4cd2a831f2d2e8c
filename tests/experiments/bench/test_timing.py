"""Tests of what the benchmarks share: turns, ratios of times, and random tokens."""

import numpy as np

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


def test_tokens_follow_the_power_law():
    p = (np.arange(V) + 3.7) ** -1.1
    counts = np.bincount(timing.draw_tokens(V, 100_000), minlength=V)
    np.testing.assert_allclose(np.cumsum(counts) / 100_000, np.cumsum(p) / p.sum(), atol=0.005)
