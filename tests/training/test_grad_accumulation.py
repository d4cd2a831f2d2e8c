"""Tests that a batch that goes through the model in parts of its rows gives the numbers that it gives as a whole."""

import pytest

from support import tiny_run
from support.cases import full_but
from txl_jax.config import LossPart

EXACT = {"model__dropout__rate": 0.0, "model__dtype": "float64"}


@pytest.fixture(autouse=True)
def double(x64):
    """Sums of parts round otherwise, which Adam's first updates blow up in float32."""


CHANGES = [
    {"train__loss": LossPart.HALF},
    {"regularization__activation_l2": 2.0, "regularization__temporal_l2": 1.0},
    {"model__cutoffs": (4, 9), "model__div_val": 2},
]


@pytest.mark.parametrize("changes", full_but(CHANGES[1:2], CHANGES), ids=str)
def test_all_parts_together_are_the_whole_batch(changes):
    """Losses, gradient norms, parameters, moments and every row of the memory, past an epoch's end."""
    whole = tiny_run.train(tiny_run.STEPS, **EXACT, **changes)
    found = tiny_run.train(tiny_run.STEPS, **EXACT, **changes, train__grad_accum_steps=tiny_run.B)
    tiny_run.assert_close(found, whole, atol=1e-11)


@pytest.mark.full
def test_rows_without_weight_count_for_no_part():
    """One part's rows all have weight 0: what the others give is the mean over their tokens."""
    segments = tiny_run.text().segments(0, 1)
    segments.weights[:, 0] = 0
    both = [tiny_run.compiled(**EXACT, train__grad_accum_steps=parts)[:2] for parts in (tiny_run.B, 1)]
    found, expected = (tiny_run.call(made, step, tiny_run.state(made), segments) for made, step in both)
    tiny_run.assert_close(found, expected, atol=1e-11)
