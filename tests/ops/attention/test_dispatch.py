"""Tests of the one entry to attention: it gives what the reference functions give, bit for bit.

Position scores without position keys, which no other test of attention has, are compared with a loop here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Visibility, attention, dot_product_attention, relative_attention

B, H, L, M, E = 2, 3, 4, 6, 5
VISIBILITY = Visibility(jnp.asarray([M, 2]), L, M, 7)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.fixture(name="inputs")
def _inputs():
    return arrays((B, H, L, E), (B, H, M + L, E), (B, H, M + L, E))


def test_without_position_keys_it_is_dot_product_attention(inputs):
    expected = dot_product_attention(*inputs, visibility=VISIBILITY)
    np.testing.assert_array_equal(attention(*inputs, visibility=VISIBILITY), expected)


def test_with_position_keys_it_is_relative_attention(inputs):
    key, score, u, v = arrays((H, M + L, E), (H, M + L), (H, E), (H, E))
    terms = {"content_bias": u, "position_bias": v, "position_score": score}
    expected = relative_attention(*inputs, key, **terms, visibility=VISIBILITY)
    found = attention(*inputs, key, **terms, visibility=VISIBILITY)
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - attention(*inputs, visibility=VISIBILITY)).max() > 0.01


@pytest.mark.parametrize("valid", [[M, 2], [0, M]])
def test_position_scores_alone_match_a_loop_over_pairs(valid, x64):
    rng, visibility = np.random.default_rng(1), Visibility(jnp.asarray(valid), L, M, 7)
    inputs = [rng.normal(size=(B, H, n, E)) for n in (L, M + L, M + L)]
    score, without = rng.normal(size=(H, M + L)), (np.zeros((H, M + L, E)), np.zeros((H, E)), np.zeros((H, E)))
    expected = oracles.relative_attention(*inputs, *without, mask=visibility.mask(), position_score=score)
    found = attention(*inputs, position_score=jnp.asarray(score), visibility=visibility)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_position_scores_alone_are_those_beside_position_keys_of_zeros(x64):
    """Values and gradients, those of the scores included."""
    rng = np.random.default_rng(1)
    inputs = [jnp.asarray(rng.normal(size=(B, H, n, E))) for n in (L, M + L, M + L)]
    weights, score = rng.normal(size=(B, H, L, E)), jnp.asarray(rng.normal(size=(H, M + L)))

    def weighted_sum(inputs, score, position_key=None):
        return jnp.sum(weights * attention(*inputs, position_key, position_score=score, visibility=VISIBILITY))

    step = jax.value_and_grad(weighted_sum, argnums=(0, 1))
    found, expected = step(inputs, score), step(inputs, score, jnp.zeros((H, M + L, E)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert np.abs(found[1][1]).max() > 0.01


@pytest.mark.parametrize("name", ["content_bias", "position_bias"])
def test_biases_without_position_keys_are_refused(inputs, name):
    [bias, score] = arrays((H, E), (H, M + L))
    with pytest.raises(ValueError, match=rf"{name}\b.*\bposition_key\b"):
        attention(*inputs, **{name: bias}, position_score=score, visibility=VISIBILITY)
