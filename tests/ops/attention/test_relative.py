"""Tests of relative attention: values against a loop over pairs, gradients against four explicit terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Dropout, Visibility, relative_attention

B, H, L, M, E = 2, 3, 4, 6, 5
CASES = {
    "full memory": {"valid": [M, M]},
    "part-filled memory": {"valid": [0, 4]},
    "window": {"valid": [M, 2], "window": 5},
}


def make_inputs(mem_len: int = M) -> dict[str, np.ndarray]:
    rng, n_key = np.random.default_rng(1), mem_len + L
    shapes = {
        "query": (B, H, L, E),
        "key": (B, H, n_key, E),
        "value": (B, H, n_key, E),
        "position_key": (H, n_key, E),
        "content_bias": (H, E),
        "position_bias": (H, E),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def make_visibility(*, valid, window=None, mem_len=M):
    return Visibility(jnp.asarray(valid), L, mem_len, window)


def call(inputs, visibility, **options):
    inputs = dict(inputs)
    positional = [inputs.pop(name) for name in ("query", "key", "value", "position_key")]
    return relative_attention(*positional, **inputs, visibility=visibility, **options)


def four_terms(inputs: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
    """The same from the four terms, with a position key gathered for every pair: [B, H, L, E]."""
    query, key = inputs["query"], inputs["key"]
    n_query, n_key = query.shape[2], key.shape[2]
    distance_LxK = (n_key - n_query) + np.arange(n_query)[:, None] - np.arange(n_key)[None, :]
    r_HxLxKxE = inputs["position_key"][:, n_key - 1 - np.maximum(distance_LxK, 0)]
    scores = (
        jnp.einsum("bhle,bhke->bhlk", query, key)
        + jnp.einsum("bhle,hlke->bhlk", query, r_HxLxKxE)
        + jnp.einsum("he,bhke->bhk", inputs["content_bias"], key)[:, :, None, :]
        + jnp.einsum("he,hlke->hlk", inputs["position_bias"], r_HxLxKxE)[None]
    )
    weights = jnp.where(mask[:, None], jnp.exp(scores / np.sqrt(E)), 0)
    return jnp.einsum("bhlk,bhke->bhle", weights / weights.sum(-1, keepdims=True), inputs["value"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_match_a_loop_over_pairs(case, x64):
    inputs, visibility = make_inputs(), make_visibility(**case)
    np.testing.assert_allclose(
        call(inputs, visibility), oracles.relative_attention(**inputs, mask=visibility.mask()), rtol=0, atol=1e-13
    )


def test_terms_may_be_missing_and_distances_may_have_scores(x64):
    """Shaw et al.: no u, no v; and as the original has it, u and a number per distance."""
    inputs, visibility = make_inputs(), make_visibility(**CASES["part-filled memory"])
    score = np.random.default_rng(3).normal(size=(H, M + L))
    for names in (("content_bias", "position_bias"), ("position_bias",)):
        zeros = {name: np.zeros((H, E)) for name in names}
        expected = oracles.relative_attention(**inputs | zeros, mask=visibility.mask(), position_score=score)
        found = call(inputs | dict.fromkeys(names) | {"position_score": jnp.asarray(score)}, visibility)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_values_without_memory(x64):
    inputs, visibility = make_inputs(mem_len=0), make_visibility(valid=[0, 0], mem_len=0)
    np.testing.assert_allclose(
        call(inputs, visibility), oracles.relative_attention(**inputs, mask=visibility.mask()), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_match_four_explicit_terms(case, x64):
    inputs = {name: jnp.asarray(value) for name, value in make_inputs().items()}
    visibility = make_visibility(**case)
    weights = np.random.default_rng(2).normal(size=(B, H, L, E))
    found = jax.jit(jax.grad(lambda inputs: jnp.sum(weights * call(inputs, visibility))))(inputs)
    expected = jax.jit(jax.grad(lambda inputs: jnp.sum(weights * four_terms(inputs, visibility.mask()))))(inputs)
    for name in inputs:
        assert np.abs(expected[name]).max() > 0.1, name
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12, err_msg=name)


def test_hidden_pairs_have_exactly_no_weight_and_no_gradient():
    inputs = {name: jnp.asarray(value, jnp.float32) for name, value in make_inputs().items()}
    visibility = make_visibility(valid=[M, 2])
    grads = jax.grad(lambda inputs: jnp.sum(call(inputs, visibility)[1] ** 2))(inputs)
    for name in ("key", "value"):
        assert np.all(grads[name][1, :, : M - 2] == 0), name
        assert np.all(grads[name][1, :, M - 2 :] != 0), name
        assert np.all(grads[name][0] == 0), name


def test_dropout_acts_on_the_probabilities(x64):
    inputs, visibility = make_inputs(), make_visibility(valid=[M, 3])
    factor = oracles.dropout_factor((B, H, L, M + L), rate=0.3, seed=5)
    found = call(inputs, visibility, dropout=Dropout(0.3, jnp.uint32(5), H))
    expected = oracles.relative_attention(**inputs, mask=visibility.mask(), factor=factor)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_bfloat16_scores_are_summed_in_float32():
    inputs = {name: jnp.asarray(value, jnp.bfloat16) for name, value in make_inputs().items()}
    visibility = make_visibility(valid=[M, M])
    found = call(inputs, visibility)
    exact = oracles.relative_attention(
        **{k: np.asarray(v, np.float64) for k, v in inputs.items()}, mask=visibility.mask()
    )
    assert found.dtype == jnp.bfloat16
    # Inputs are exact in bfloat16; what is left are roundings of q + u, q + v, probabilities and output.
    assert np.abs(np.asarray(found, np.float64) - exact).max() < 0.01
