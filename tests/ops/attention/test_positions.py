"""Tests of distances, sinusoid codes and the relative shift."""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import positions


def test_key_distances_count_down_to_the_query_itself():
    np.testing.assert_array_equal(positions.key_distances(5), [4, 3, 2, 1, 0])


def test_clamp_shares_the_code_of_far_distances():
    np.testing.assert_array_equal(positions.key_distances(6, clamp_len=3), [3, 3, 3, 2, 1, 0])


def test_clamp_above_all_distances_changes_nothing():
    np.testing.assert_array_equal(positions.key_distances(4, clamp_len=9), positions.key_distances(4))


def test_sinusoids_match_the_formula(x64):
    distances = np.array([0, 1, 2, 7, 3000])
    expected = [oracles.sinusoid(s, 6) for s in distances]
    np.testing.assert_allclose(positions.sinusoids(jnp.asarray(distances), 6, jnp.float64), expected, atol=1e-12)


def test_bfloat16_codes_come_from_wider_angles():
    distances = np.arange(3000, 3010)
    expected = np.stack([oracles.sinusoid(s, 8) for s in distances])
    codes = positions.sinusoids(jnp.asarray(distances), 8, jnp.bfloat16)
    assert codes.dtype == jnp.bfloat16
    # Half a unit in bfloat16's last place below 1, and what float32 loses of an angle of 3000.
    np.testing.assert_allclose(codes.astype(np.float32), expected, rtol=0, atol=2**-9 + 3e-4)


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 5), (3, 3), (3, 7), (4, 6)])
def test_relative_shift_matches_its_definition(n_query, n_key):
    scores = np.random.default_rng(0).normal(size=(2, 5, n_query, n_key)).astype(np.float32)
    shifted = np.asarray(positions.relative_shift(jnp.asarray(scores)))
    assert shifted.shape == scores.shape
    for lead in np.ndindex(2, 5):
        expected = oracles.relative_shift(scores[lead])
        visible = ~np.isnan(expected)
        np.testing.assert_array_equal(shifted[lead][visible], expected[visible])


def test_relative_shift_of_the_picture():
    scores = jnp.asarray([[0, 1, 2], [10, 11, 12], [20, 21, 22]])
    expected = [[2, 0, 10], [11, 12, 0], [20, 21, 22]]  # Right of the diagonal: leftovers.
    np.testing.assert_array_equal(positions.relative_shift(scores), expected)
