"""Tiled attention against the reference: values and all gradients."""

import jax
import pytest

from support.attention_cases import CASES, assert_close, make, reference, tiled, value_and_gradients
from support.cases import slow_but

# One of each kind; the others join two of them, or tile them otherwise.
QUICK = (
    "one tile",
    "part-filled, whole rows",
    "window",
    "window of one key",
    "clamped distances",
    "one query",
    "no memory",
    "odd head width",
    "all terms",
    "no positions",
    "dropout",
    "both sides, lengths",
)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_values_and_gradients_equal_the_reference(name):
    arrays, given, tile = make(CASES[name])
    expected = value_and_gradients(reference, arrays, **given)
    actual = jax.jit(lambda arrays: value_and_gradients(tiled, arrays, tile=tile, **given))(arrays)
    assert_close(actual, expected, 2e-6)
