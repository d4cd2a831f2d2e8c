"""The relative shift of a tile in kernels (interpreted) against indices, and its transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from txl_jax.ops.attention.tpu.kernels import position_scores, skew, unskew, widen

SIZES = [(16, 256), (80, 384)]


def in_kernel(function, given, shape):
    def kernel(given_ref, out_ref):
        out_ref[...] = function(given_ref[...])

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(shape, jnp.float32), interpret=True)(given)


def table(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Interpreted, the rotation is a program of its own for each row.
@pytest.mark.parametrize(("n_query", "n_key", "rotate"), [*((*size, False) for size in SIZES), (24, 256, True)])
def test_each_pair_reads_the_column_of_its_distance(n_query, n_key, rotate):
    given = table(n_query, n_key + 128)
    row, column = np.arange(n_query)[:, None], np.arange(n_key)[None, :]
    expected = np.asarray(given)[row, n_query - 1 - row + column]
    np.testing.assert_array_equal(in_kernel(lambda x: skew(x, rotate), given, expected.shape), expected)


@pytest.mark.parametrize(("n_query", "n_key"), SIZES)
def test_unskew_is_the_transpose(n_query, n_key):
    given = table(n_query, n_key)
    out = jax.ShapeDtypeStruct((n_query, n_key + 128), jnp.float32)
    (expected,) = jax.linear_transpose(lambda x: skew(x, False), out)(given)
    np.testing.assert_array_equal(in_kernel(unskew, given, expected.shape), expected)


@pytest.mark.parametrize("n_query", [8, 144, 256])
def test_a_tile_is_skewed_in_strips(n_query):
    n_key, width = 128, 24
    query, keys = table(n_query, width), table(n_query + n_key + 128, width, seed=1)
    row, column = np.arange(n_query)[:, None], np.arange(n_key)[None, :]
    expected = np.asarray(query, np.float64) @ np.asarray(keys, np.float64).T
    got = position_scores(query, lambda at, size: keys[at : at + size], n_key=n_key, rotate=False)
    np.testing.assert_allclose(got, expected[row, n_query - 1 - row + column], atol=2e-5)


@pytest.mark.parametrize("width", [41, 160, 256])
def test_a_number_per_row_is_widened(width):
    rows = jnp.broadcast_to(table(8, 1), (8, 128))
    np.testing.assert_array_equal(widen(rows, width), np.repeat(rows[:, :1], width, axis=1))
