"""The relative shift of one tile, against indices, and its transpose."""

import jax
import numpy as np
import pytest

from txl_jax.ops.attention.tiled.skew import skew, unskew

SIZES = [(1, 5, 9), (3, 2, 4), (4, 7, 11), (5, 1, 5)]


@pytest.mark.parametrize(("n_query", "n_key", "width"), SIZES)
def test_each_pair_reads_the_column_of_its_distance_and_unskew_is_the_transpose(n_query, n_key, width):
    rng, row, column = np.random.default_rng(0), np.arange(n_query)[:, None], np.arange(n_key)[None, :]
    table, given = rng.normal(size=(2, n_query, width)), rng.normal(size=(2, n_query, n_key))
    found, pull_back = jax.vjp(lambda table: skew(table, n_key), table.astype(np.float32))
    np.testing.assert_array_equal(found, table[:, row, n_query - 1 - row + column].astype(np.float32))
    given = given.astype(np.float32)
    np.testing.assert_array_equal(unskew(given, width), pull_back(given)[0])


@pytest.mark.parametrize("function", [lambda table: skew(table, 5), lambda table: unskew(table[..., :5], 5)])
def test_too_few_columns_are_named(function):
    with pytest.raises(ValueError, match="5 columns"):
        function(np.zeros((3, 5)))


def test_last_columns_may_be_missing_where_distances_are_hidden():
    rng, n_query, n_key = np.random.default_rng(3), 4, 7
    whole = rng.normal(size=(2, n_query, n_query + n_key - 1)).astype(np.float32)
    visible = np.arange(n_key)[None, :] <= np.arange(n_query)[:, None] + n_key - n_query
    short = skew(whole[..., : n_key + 1], n_key)
    np.testing.assert_array_equal(np.where(visible, short, 0), np.where(visible, skew(whole, n_key), 0))
    given = np.where(visible, rng.normal(size=(2, n_query, n_key)), 0).astype(np.float32)
    back = unskew(given, n_query + n_key - 1)
    np.testing.assert_array_equal(unskew(given, n_key + 1), back[..., : n_key + 1])
