"""Tests products of rows and a matrix in each of its forms; of int8 against products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.ops import matmul
from txl_jax.ops.matmul import multiply, multiply_by_rows, project, quantize


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("rows", [1, 300])
def test_narrow_states_are_multiplied_into_a_wide_type(rows):
    states, table = jnp.ones((rows, 3), jnp.bfloat16), jnp.full((2, 3), 1.0078125, jnp.bfloat16)
    assert project(states, table.T).dtype == jnp.bfloat16
    found = multiply_by_rows(states, table, jnp.dtype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((rows, 2), 3.0234375, np.float32))


def test_each_channel_has_its_own_steps(x64):
    array = random(40, 6) * [1e-3, 1, 50, 0, 1, 1]
    found = quantize(jnp.asarray(array), axis=0)
    most = np.abs(array).max(axis=0)
    assert found.values.dtype == jnp.int8 and found.scale.shape == (1, 6)
    np.testing.assert_allclose(found.scale[0], most / 127, rtol=1e-12)
    off = np.abs(found.dequantize(jnp.float64) - array).max(axis=0)
    assert np.all(off <= most / 254 * (1 + 1e-9)) and np.all(off[most > 0] > most[most > 0] / 1000)


@pytest.mark.parametrize("terms", [1, 36, 41])
def test_a_row_is_multiplied_as_numbers_of_its_own_type(terms, x64):
    """Whatever the number of terms is: those of the last slab that belong to the one before count
    once.
    """
    jitted = jax.jit(multiply)
    inputs, array = random(3, 1, terms), random(3, terms, 9, seed=1)
    for axis in (1, 2):
        matrix = quantize(jnp.asarray(array), axis=axis)
        expected = inputs @ np.asarray(matrix.dequantize(jnp.float64))
        np.testing.assert_allclose(
            jitted(jnp.asarray(inputs), matrix), expected, rtol=0, atol=1e-13
        )
        found = jitted(jnp.asarray(inputs, jnp.float32), matrix)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [1, 2])  # Each column has its own steps, or each row.
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_int8_keep_sixteen_bits_of_what_is_multiplied(axis, rows, x64, monkeypatch):
    """Beside the product with the same int8 numbers in float64; batched as in attention, one row as
    on a GPU or TPU.
    """
    monkeypatch.setattr(
        matmul, "row_product", lambda row, matrix, otherwise: otherwise(row, matrix)
    )
    inputs, array = random(3, rows, 70), random(3, 70, 9, seed=1)
    matrix = quantize(jnp.asarray(array), axis=axis)
    found = jax.jit(lambda *of: multiply(*of))(jnp.asarray(inputs), matrix)  # Traced anew.
    expected = inputs @ np.asarray(matrix.dequantize(jnp.float64))
    # Each of 70 terms is off by at most half a step of the row, 1 / (2 * 254 * 127) of its largest.
    bound = 70 * np.abs(inputs).max() * np.abs(array).max() ** axis / (2 * 254 * 127)
    assert 0 < np.abs(found - expected).max() < bound / 4


def test_rows_of_zeros_give_zeros_and_nan_stays_nan():
    matrix = quantize(jnp.asarray(random(8, 3), jnp.float32), axis=0)
    inputs = jnp.zeros((3, 8)).at[1, 2].set(jnp.nan).at[2].set(1.0)
    found = np.asarray(jax.jit(multiply)(inputs, matrix))
    assert np.all(found[0] == 0) and np.all(np.isnan(found[1])) and np.all(np.isfinite(found[2]))
