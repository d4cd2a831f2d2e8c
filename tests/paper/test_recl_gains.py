"""Tests of the relative effective context length, on losses made by hand."""

import math

import numpy as np
import pytest

from txl_jax.paper import recl_gains

LENGTHS = range(100, 1000, 100)


def losses(*stops: int, worse: float = 0.0) -> dict[int, np.ndarray]:
    """Losses of one model per stop, which fall by 0.02 nats a hundred tokens up to it, at positions of 4 and 2 nats.

    `worse`: how much the last model's losses are above the others'.
    """
    hard = np.array([4.0, 2.0, 4.0, 2.0, 2.0, 2.0, 4.0, 2.0, 2.0, 2.0])
    found = {}
    for length in LENGTHS:
        rows = [hard - 0.02 * (min(length, stop) - LENGTHS[0]) / 100 for stop in stops]
        rows[-1] = rows[-1] + worse
        found[length] = np.stack(rows)
    return found


@pytest.mark.parametrize(("ratio", "first"), [(0.1, 300), (0.5, 300), (1.0, 300), (1.0, None)])
def test_a_model_whose_gain_stops_at_a_known_length_or_never(ratio, first):
    of_models = recl_gains.gains(losses(first or 5000, 700), ratio=ratio)
    assert [recl_gains.effective_length(steps) for steps in of_models] == [first, 700]


def test_gains_are_those_of_the_perplexity_under_the_baseline():
    [steps, _] = recl_gains.gains(losses(300, 700), ratio=0.1)
    # The one hardest position of ten has 4 nats at 100 tokens and 3.98 at 200, for both.
    assert steps[0].perplexity == pytest.approx(math.exp(4) - math.exp(3.98))
    assert steps[0].relative == pytest.approx(1 - math.exp(-0.02))
    assert (steps[0].context, steps[0].longer) == (100, 200)


def test_a_model_that_is_worse_everywhere_gains_nothing():
    """All must improve over the same baseline: here the better model's, which the other never reaches."""
    better, worse = recl_gains.gains(losses(700, 700, worse=1.0), ratio=1.0)
    assert recl_gains.effective_length(better) == 700
    assert recl_gains.effective_length(worse) == 100
    assert all(step.relative == 0 for step in worse)


def test_the_baseline_is_taken_anew_at_each_length():
    """The first model stops at 300; behind it the second goes on, and from 300 on its gains count in full."""
    found = losses(300, 300)
    for length in LENGTHS:
        found[length][1] += 0.005 - 0.02 * max(length - 400, 0) / 100
    _, steps = recl_gains.gains(found, ratio=1.0)
    assert steps[3].context == 400
    assert steps[3].relative == pytest.approx(1 - math.exp(-0.015), rel=1e-6)  # From 0.005 above to 0.015 below.
    assert steps[4].relative == pytest.approx(1 - math.exp(-0.02), rel=1e-6)


def test_the_hardest_positions():
    baseline = np.array([1.0, 5.0, 3.0, 5.0, 2.0])
    assert recl_gains.hardest(baseline, 0.4).tolist() == [1, 3]
    assert recl_gains.hardest(baseline, 0.2).tolist() == [1]
    assert recl_gains.hardest(baseline, 0.01).tolist() == [1]
    assert recl_gains.hardest(baseline, 1.0).tolist() == [0, 1, 2, 3, 4]


def test_groups_and_lengths_that_compare_nothing_are_refused():
    found = losses(300, 700)
    alone = {length: rows[:1] for length, rows in found.items()}
    cases = (alone, 1, r"\b1 model\b"), ({100: found[100]}, 1, r"\blengths\b.*\[100\]"), (found, 0, r"\bratio\b.*\b0\b")
    for given, ratio, pattern in cases:
        with pytest.raises(ValueError, match=pattern):
            recl_gains.gains(given, ratio=ratio)
