"""Tests of the definition, of tiles and of `stored`: values against a loop over pairs, gradients against four terms.

Causal or with keys on both sides of a query, as in an encoder whose rows have padding behind them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from support.cases import nightly_but
from txl_jax.ops.attention import Implementation, Tile, Visibility, attention

B, H, L, M, E = 3, 2, 5, 4, 3
NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")
BOTH = {"causal": False}
CASES = {
    "whole memory": {"names": NAMES[:6]},
    "part-filled memory": {"valid": [0, 2, M]},
    "window": {"valid": [M, 2, 0], "window": 3},
    "no memory": {"mem_len": 0},
    "Shaw's terms": {"valid": [0, 2, M], "names": NAMES[:4]},
    "u and a score per distance": {"names": (*NAMES[:5], "position_score")},
    "no positions": {"valid": [0, 2, M], "names": NAMES[:3]},
    "no positions, window": {"valid": [M, 2, 0], "window": 4, "names": NAMES[:3]},
    "only a score per distance": {"valid": [0, 2, M], "window": 6, "names": (*NAMES[:3], "position_score")},
    "both sides": BOTH | {"mem_len": 0},
    "both sides, window, padding": BOTH | {"mem_len": 0, "window": 2, "lengths": [5, 2, 0]},
    "both sides, memory": BOTH | {"valid": [M, 2, 0]},
    "both sides, memory, window, padding": BOTH | {"valid": [M, 2, 0], "window": 3, "lengths": [5, 0, 1]},
}
REFERENCE, TILED = Implementation("reference"), Implementation("tiled", tile=Tile(2, 4))
PATHS = (REFERENCE, TILED, Implementation("stored"))
of_each = pytest.mark.parametrize("implementation", PATHS, ids=str)


def make(*, mem_len=M, valid=None, names=NAMES, dtype=float, **options):
    """Returns the description of what is visible, its mask by the oracle, and arrays by name."""
    valid = [mem_len] * B if valid is None else valid
    mask = oracles.attention_mask(valid, segment_len=L, mem_len=mem_len, **{"window": None} | options)
    options = options | {"lengths": jnp.asarray(options["lengths"]) if "lengths" in options else None}
    visibility = Visibility(valid=jnp.asarray(valid), segment_len=L, mem_len=mem_len, **options)
    n_key, n_position = visibility.n_keys, visibility.n_positions
    shapes = [(B, H, L, E), *[(B, H, n_key, E)] * 2, (H, n_position, E), *[(H, E)] * 2, (H, n_position)]
    rng = np.random.default_rng(4)
    arrays = {name: rng.normal(size=shape) for name, shape in zip(NAMES, shapes, strict=True)}
    return visibility, mask, {name: jnp.asarray(arrays[name], dtype) for name in names}


def with_all_terms(arrays, n_position):
    """Fills in the terms that are not given with zeros."""
    zeros = {"position_key": (H, n_position, E), "content_bias": (H, E), "position_bias": (H, E)}
    zeros["position_score"] = (H, n_position)
    return {name: np.zeros(shape) for name, shape in zeros.items()} | arrays


def four_terms(arrays, mask):
    """Attention from the four terms, with a position key gathered for every pair: [B, H, L, E]."""
    query, key = arrays["query"], arrays["key"]
    n_query, n_key = query.shape[2], key.shape[2]
    distance_LxK = (n_key - n_query) + np.arange(n_query)[:, None] - np.arange(n_key)[None, :]
    place_LxK = np.minimum(n_key - 1 - distance_LxK, arrays["position_key"].shape[1] - 1)
    r_HxLxKxE = arrays["position_key"][:, place_LxK]
    scores = (
        jnp.einsum("bhle,bhke->bhlk", query, key)
        + jnp.einsum("bhle,hlke->bhlk", query, r_HxLxKxE)
        + jnp.einsum("he,bhke->bhk", arrays["content_bias"], key)[:, :, None, :]
        + jnp.einsum("he,hlke->hlk", arrays["position_bias"], r_HxLxKxE)[None]
        + arrays["position_score"][:, place_LxK][None]
    )
    weights = jnp.where(mask[:, None], jnp.exp(scores / np.sqrt(E)), 0)
    sums = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhlk,bhke->bhle", weights / jnp.where(sums == 0, 1, sums), arrays["value"])


@pytest.mark.parametrize(
    ("implementation", "name"),
    nightly_but(
        [
            *((REFERENCE, name) for name in CASES),
            *((implementation, name) for implementation in PATHS[1:] for name in ("whole memory", list(CASES)[-1])),
        ],
        [(implementation, name) for implementation in PATHS for name in CASES],
    ),
    ids=str,
)
def test_values_match_a_loop_over_pairs_and_gradients_explicit_terms(implementation, name, x64):
    visibility, mask, arrays = make(**CASES[name])
    np.testing.assert_array_equal(visibility.mask(), mask)
    weights = np.random.default_rng(5).normal(size=(B, H, L, E))

    def with_gradients(function):
        return jax.jit(jax.grad(lambda arrays: (jnp.sum(weights * function(arrays)), function(arrays)), has_aux=True))

    attend = functools.partial(attention, visibility=visibility, implementation=implementation)
    found, values = with_gradients(lambda arrays: attend(**arrays))(arrays)
    expected, _ = with_gradients(lambda arrays: four_terms(with_all_terms(arrays, visibility.n_positions), mask))(
        arrays
    )
    given = with_all_terms(jax.tree.map(np.asarray, arrays), visibility.n_positions)
    np.testing.assert_allclose(values, oracles.relative_attention(**given, mask=mask), rtol=0, atol=1e-13)
    for array in arrays:
        assert np.abs(expected[array]).max() > 0.1, array
        np.testing.assert_allclose(found[array], expected[array], rtol=0, atol=1e-12, err_msg=array)
    # What sees nothing or is not seen has exactly no value and no gradient.
    blind, unseen = (~mask.any(axis)[:, None].repeat(H, 1) for axis in (2, 1))
    assert not np.any(values[blind]) and not np.any(found["query"][blind])
    assert not np.any(found["key"][unseen]) and not np.any(found["value"][unseen])


@of_each
@pytest.mark.parametrize("name", ["window", "no positions", "both sides, memory, window, padding"])
def test_dropout_has_the_mask_of_a_loop_over_pairs(implementation, name, x64):
    visibility, mask, arrays = make(**CASES[name])
    given = with_all_terms(jax.tree.map(np.asarray, arrays), visibility.n_positions)
    factor = oracles.dropout_factor((B, H, *mask.shape[1:]), rate=0.4, seed=9)
    expected = oracles.relative_attention(**given, mask=mask, factor=factor)
    attend = functools.partial(attention, visibility=visibility, implementation=implementation, dropout=(0.4, 9))
    found = jax.jit(lambda arrays: attend(**arrays))(arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@of_each
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_query_that_sees_no_key_gets_zeros_in_narrow_types(implementation, dtype):
    visibility, mask, arrays = make(**CASES["both sides, window, padding"], dtype=dtype)
    attend = functools.partial(attention, visibility=visibility, implementation=implementation)

    @jax.jit
    def values_and_gradients(arrays):
        output, pull_back = jax.vjp(lambda arrays: attend(**arrays), arrays)
        return output, pull_back(jnp.ones_like(output))[0]

    output, gradients = values_and_gradients(arrays)
    blind = ~mask.any(2)[:, None].repeat(H, 1)
    assert output.dtype == dtype and blind.sum() == H * (2 + 5)
    assert not np.any(np.asarray(output)[blind]) and not np.any(np.asarray(gradients["query"])[blind])
    assert all(np.isfinite(np.asarray(gradient, np.float32)).all() for gradient in gradients.values())


@pytest.mark.parametrize("name", ["whole memory", "no positions"])
def test_bfloat16_scores_are_summed_in_float32(name):
    visibility, _, arrays = make(**CASES[name], dtype=jnp.bfloat16)
    attend = jax.jit(lambda arrays: attention(**arrays, visibility=visibility, implementation=REFERENCE))
    found, exact = attend(arrays), attend({name: array.astype(jnp.float32) for name, array in arrays.items()})
    assert found.dtype == jnp.bfloat16
    # Inputs are exact in bfloat16. What is left are the roundings of q + u, probabilities and output, 2**-9 each.
    error = np.abs(np.asarray(found, np.float32) - exact).max()
    assert 0 < error < 1.01 * 2 * 2.0**-9 * np.abs(arrays["value"].astype(jnp.float32)).max()
    assert f"f32[{B},{H},{L},{M + L}] = dot_general" in str(attend.trace(arrays).jaxpr)


@pytest.mark.parametrize("causal", [True, False])
def test_more_slots_and_tokens_than_there_are_mean_all(causal):
    def seen(valid, lengths):
        return Visibility(jnp.asarray(valid), 3, 2, causal=causal, lengths=jnp.asarray(lengths)).mask()

    np.testing.assert_array_equal(seen([9, -1], [9, -1]), seen([2, 0], [3, 0]))
