"""Tests of the one entry to attention: it gives what the reference functions give, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

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


def test_position_terms_without_position_keys_are_refused(inputs):
    [bias] = arrays((H, E))
    with pytest.raises(AssertionError):
        attention(*inputs, content_bias=bias, visibility=VISIBILITY)
