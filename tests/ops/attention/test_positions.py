"""Tests of distances, sinusoid codes, and the relative shift with its transpose."""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Visibility, positions


def test_distances_count_down_to_the_query_itself_and_on_to_keys_ahead():
    causal, both = (Visibility(jnp.zeros(1, jnp.int32), 3, 2, causal=causal) for causal in (True, False))
    for clamp_len, expected in ((None, [4, 3, 2, 1, 0]), (3, [3, 3, 2, 1, 0]), (9, [4, 3, 2, 1, 0])):
        assert positions.key_distances(5, clamp_len=clamp_len).tolist() == expected
        assert causal.distances(clamp_len=clamp_len).tolist() == expected
        assert both.distances(clamp_len=clamp_len).tolist() == [*expected, -1, -2]
    assert both.distances(clamp_len=1).tolist() == [1, 1, 1, 1, 0, -1, -1]


def test_sinusoids_match_the_formula_and_in_bfloat16_come_from_wider_angles(x64):
    distances = np.array([0, 1, 2, 7, 3000, -1, -2])  # Negative: of keys ahead of a query.
    expected = [oracles.sinusoid(s, 6) for s in distances]
    np.testing.assert_allclose(positions.sinusoids(jnp.asarray(distances), 6, jnp.float64), expected, atol=1e-12)
    distances = np.arange(3000, 3010, dtype=np.int32)
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
    for i, j in np.ndindex(n_query, n_key):
        distance = n_key - n_query + i - j
        if distance >= 0:  # Keys ahead of a query get anything.
            np.testing.assert_array_equal(shifted[..., i, j], scores[..., i, n_key - 1 - distance])


def test_skew_of_one_query_and_of_too_few_columns():
    table = np.arange(9.0)[None]
    np.testing.assert_array_equal(positions.skew(table, 5), table[:, :5])
    for function in (positions.skew, positions.unskew):
        with pytest.raises(ValueError, match="5 columns"):
            function(np.zeros((3, 5)), 5)
