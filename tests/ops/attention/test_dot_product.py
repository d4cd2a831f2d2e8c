"""Tests of plain attention: values against a loop over pairs, gradients against explicit weights, and its type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Dropout, Visibility, dot_product_attention

B, H, L, M, E = 2, 3, 4, 6, 5
CASES = {
    "no memory": {"valid": [0, 0], "mem_len": 0},
    "part-filled memory": {"valid": [0, 4], "mem_len": M},
    "window": {"valid": [M, 2], "mem_len": M, "window": 5},
}


def make_case(*, valid, mem_len, window=None):
    """(query, key, value), visibility."""
    rng, n_key = np.random.default_rng(1), mem_len + L
    arrays = [rng.normal(size=(B, H, n, E)) for n in (L, n_key, n_key)]
    return arrays, Visibility(jnp.asarray(valid), L, mem_len, window)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_match_a_loop_over_pairs(case, x64):
    arrays, visibility = make_case(**case)
    without_positions = np.zeros(arrays[1].shape[1:]), np.zeros((H, E)), np.zeros((H, E))
    expected = oracles.relative_attention(*arrays, *without_positions, visibility.mask())
    np.testing.assert_allclose(dot_product_attention(*arrays, visibility=visibility), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_match_explicit_weights(case, x64):
    arrays, visibility = make_case(**case)
    arrays = [jnp.asarray(array) for array in arrays]
    factors = np.random.default_rng(2).normal(size=(B, H, L, E))

    def explicit(query, key, value):
        weights = jnp.where(
            visibility.mask()[:, None], jnp.exp(jnp.einsum("bhle,bhke->bhlk", query, key) / np.sqrt(E)), 0
        )
        return jnp.einsum("bhlk,bhke->bhle", weights / weights.sum(-1, keepdims=True), value)

    def gradients(attention):
        return jax.jit(jax.grad(lambda arrays: jnp.sum(factors * attention(*arrays))))(arrays)

    found = gradients(lambda *arrays: dot_product_attention(*arrays, visibility=visibility))
    for a, b in zip(found, gradients(explicit), strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_dropout_acts_on_the_probabilities(x64):
    arrays, visibility = make_case(**CASES["window"])
    without_positions = np.zeros(arrays[1].shape[1:]), np.zeros((H, E)), np.zeros((H, E))
    factor = oracles.dropout_factor((B, H, L, M + L), rate=0.3, seed=5)
    expected = oracles.relative_attention(*arrays, *without_positions, visibility.mask(), factor=factor)
    found = dot_product_attention(*arrays, visibility=visibility, dropout=Dropout(0.3, jnp.uint32(5), H))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_bfloat16_scores_are_summed_in_float32():
    arrays, visibility = make_case(**CASES["part-filled memory"])
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    found = dot_product_attention(*arrays, visibility=visibility)
    exact = dot_product_attention(*(array.astype(jnp.float32) for array in arrays), visibility=visibility)
    assert found.dtype == jnp.bfloat16
    # Inputs are exact in bfloat16; what is left are the roundings, by one part in 2**9, of probabilities and output.
    error = np.abs(np.asarray(found, np.float32) - exact).max()
    assert 0 < error < 1.01 * 2 * 2.0**-9 * np.abs(arrays[2].astype(jnp.float32)).max()
    products = str(jax.make_jaxpr(lambda *arrays: dot_product_attention(*arrays, visibility=visibility))(*arrays))
    assert f"f32[{B},{H},{L},{M + L}] = dot_general" in products
