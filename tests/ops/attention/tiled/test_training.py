"""Tiled attention against the reference: values and all gradients."""

import jax
import pytest

from support.attention_cases import CASES, assert_close, make, reference, tiled, value_and_gradients


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_reference(name):
    arrays, given, tile = make(CASES[name])
    expected = value_and_gradients(reference, arrays, **given)
    actual = jax.jit(lambda arrays: value_and_gradients(tiled, arrays, tile=tile, **given))(arrays)
    assert_close(actual, expected, 2e-6)
