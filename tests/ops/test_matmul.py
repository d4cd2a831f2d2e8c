"""Tests of products of rows and a matrix, in each form of the matrix.

Products of int8 are compared with products in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.ops import matmul
from txl_jax.ops.matmul import Int8, multiply, multiply_by_rows, project, quantize

# Axes of a batch of matrices [batch, terms, columns] along which the numbers of a channel run. A
# channel has one step, the number that 1 in int8 stands for.
STEPS = {"steps by column": 1, "steps by row": 2}


# Compiled as a whole, which takes less time than each of its operations by itself.
quantized = jax.jit(quantize, static_argnames="axis")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def in_float64(matrix: Int8) -> np.ndarray:
    """The numbers that an int8 matrix stands for."""
    return np.asarray(matrix.values, np.float64) * np.asarray(matrix.scale, np.float64)


# One row, and more than `_MAX_STATES`: few rows have a form of their own, but only wide ones.
@pytest.mark.parametrize("rows", [1, 300])
def test_narrow_states_are_multiplied_into_a_wide_type(rows):
    """3 times 1 + 2**-7 has more bits than bfloat16 holds."""
    states = jnp.asarray(np.ones((rows, 3)), jnp.bfloat16)
    table = jnp.asarray(np.full((2, 3), 1 + 2**-7), jnp.bfloat16)

    narrow = project(states, table.T)
    wide = multiply_by_rows(states, table, jnp.dtype(jnp.float32))

    assert narrow.dtype == jnp.bfloat16
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, np.full((rows, 2), 3 * (1 + 2**-7), np.float32))


def test_each_channel_has_its_own_steps(x64):
    """Columns are the channels here, one of them zeros."""
    array = random(40, 6) * [1e-3, 1, 50, 0, 1, 1]
    largest = np.abs(array).max(axis=0)

    matrix = quantized(jnp.asarray(array), axis=0)

    assert matrix.values.dtype == jnp.int8
    assert matrix.scale.shape == (1, 6)
    np.testing.assert_allclose(matrix.scale[0], largest / 127, rtol=1e-12)

    # Numbers are rounded to the nearest step of largest / 127, and are not all exact.
    error = np.abs(matrix.dequantize(jnp.float64) - array).max(axis=0)
    is_used = largest > 0
    assert np.all(error <= largest / 254 * (1 + 1e-9))
    assert np.all(error[is_used] > largest[is_used] / 1000)


@pytest.mark.parametrize("axis", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("terms", [1, 36, 41])
def test_a_row_is_multiplied_as_numbers_of_its_own_type(terms, axis, x64):
    """The matrix is added in slabs, each of a few terms, as on a CPU.

    36 terms are 12 slabs of 3. 41 terms are 9 slabs of 5, the last of which repeats terms of the
    slab before, which must count once.
    """
    rows = random(3, 1, terms)
    matrix = quantized(jnp.asarray(random(3, terms, 9, seed=1)), axis=axis)
    expected = rows @ in_float64(matrix)
    jitted = jax.jit(multiply)

    wide = jitted(jnp.asarray(rows), matrix)
    narrow = jitted(jnp.asarray(rows, jnp.float32), matrix)

    np.testing.assert_allclose(wide, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(narrow, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("n_rows", [1, 5], ids=["one row", "five rows"])
def test_products_of_int8_keep_sixteen_bits_of_what_is_multiplied(axis, n_rows, x64, monkeypatch):
    """Compared with the product of the same int8 numbers in float64. Batched as in attention."""
    # A single row is multiplied as on a GPU or TPU. On a CPU it would not be rounded.
    monkeypatch.setattr(
        matmul, "row_product", lambda row, matrix, otherwise: otherwise(row, matrix)
    )
    rows = random(3, n_rows, 70)
    array = random(3, 70, 9, seed=1)
    matrix = quantized(jnp.asarray(array), axis=axis)

    # A new function, since `jit` has traced `multiply` without the patch.
    products = jax.jit(lambda rows, matrix: multiply(rows, matrix))(jnp.asarray(rows), matrix)

    expected = rows @ in_float64(matrix)
    # Each of 70 terms is off by at most half a step of the row, 1 / (2 * 254 * 127) of its largest.
    # The roundings of the terms are independent, so their sum stays far below the bound.
    bound = 70 * np.abs(rows).max() * np.abs(array).max() / (2 * 254 * 127)
    assert 0 < np.abs(products - expected).max() < bound / 4


def test_rows_of_zeros_give_zeros_and_nan_stays_nan():
    matrix = quantized(jnp.asarray(random(8, 3), jnp.float32), axis=0)
    rows = np.zeros((3, 8), np.float32)
    rows[1, 2] = np.nan
    rows[2] = 1.0

    products = np.asarray(jax.jit(multiply)(rows, matrix))

    assert np.all(products[0] == 0)
    assert np.all(np.isnan(products[1]))
    assert np.all(np.isfinite(products[2]))
