"""Tests of the definition: values against a loop over pairs, gradients against four terms, codes of
distances, dropout.

Causal or with keys on both sides of a query, as in an encoder whose rows have padding behind them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from support.attention_arrays import NAMES, draw, shapes
from txl_jax.ops.attention import ProbabilityDropout, Visibility, attention
from txl_jax.ops.attention.distances import key_distances, sinusoids

B, H, L, M, E = 3, 2, 5, 4, 3
BOTH = {"causal": False}
CASES = {
    "whole memory": {"names": NAMES[:6]},
    "part-filled memory": {"valid": [0, 2, M]},
    "window": {"valid": [M, 2, 0], "window": 3},
    "no memory": {"mem_len": 0},
    "Shaw's terms": {"valid": [0, 2, M], "names": NAMES[:4]},
    "u and a score per distance": {"names": (*NAMES[:5], "position_score")},
    "no positions, window": {"valid": [M, 2, 0], "window": 4, "names": NAMES[:3]},
    "only a score per distance": {
        "valid": [0, 2, M],
        "window": 6,
        "names": (*NAMES[:3], "position_score"),
    },
    "both sides": BOTH | {"mem_len": 0},
    "both sides, memory": BOTH | {"valid": [M, 2, 0]},
    "both sides, memory, window, padding": BOTH
    | {"valid": [M, 2, 0], "window": 3, "lengths": [5, 0, 1]},
}
attend = functools.partial(attention, implementation="reference")


def make(*, mem_len=M, valid=None, names=NAMES, dtype=float, **options):
    """Returns the description of what is visible, its mask by the oracle, and arrays by name."""
    valid = [mem_len] * B if valid is None else valid
    mask = oracles.attention_mask(valid, segment_len=L, mem_len=mem_len, **options)
    options = options | {
        "lengths": jnp.asarray(options["lengths"]) if "lengths" in options else None
    }
    visibility = Visibility(valid=jnp.asarray(valid), segment_len=L, mem_len=mem_len, **options)
    return visibility, mask, draw(visibility, H, E, names=names, dtype=dtype)


def with_all_terms(arrays, visibility):
    return {name: np.zeros(shape) for name, shape in shapes(visibility, H, E).items()} | arrays


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


@pytest.mark.parametrize("name", CASES)
def test_values_match_a_loop_over_pairs_and_gradients_explicit_terms(name, x64):
    visibility, mask, arrays = make(**CASES[name])
    np.testing.assert_array_equal(visibility.mask(), mask)
    weights = np.random.default_rng(5).normal(size=(B, H, L, E))

    def with_gradients(function):
        return jax.jit(
            jax.grad(
                lambda arrays: (jnp.sum(weights * function(arrays)), function(arrays)), has_aux=True
            )
        )

    found, values = with_gradients(lambda arrays: attend(**arrays, visibility=visibility))(arrays)
    filled = functools.partial(with_all_terms, visibility=visibility)
    expected, _ = with_gradients(lambda arrays: four_terms(filled(arrays), mask))(arrays)
    given = filled(jax.tree.map(np.asarray, arrays))
    np.testing.assert_allclose(
        values, oracles.relative_attention(**given, mask=mask), rtol=0, atol=1e-13
    )
    for array in arrays:
        assert np.abs(expected[array]).max() > 0.1, array
        np.testing.assert_allclose(found[array], expected[array], rtol=0, atol=1e-12, err_msg=array)


@pytest.mark.parametrize(
    "name", ["window", "no positions, window", "both sides, memory, window, padding"]
)
def test_dropout_has_the_mask_of_a_loop_over_pairs(name, x64):
    visibility, mask, arrays = make(**CASES[name])
    given = with_all_terms(jax.tree.map(np.asarray, arrays), visibility)
    factor = oracles.dropout_factor((B, H, *mask.shape[1:]), rate=0.4, seed=9)
    expected = oracles.relative_attention(**given, mask=mask, factor=factor)
    found = jax.jit(lambda arrays: attend(**arrays, visibility=visibility, dropout=(0.4, 9)))(
        arrays
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["whole memory", "no positions, window"])
def test_bfloat16_scores_are_summed_in_float32(name):
    visibility, _, arrays = make(**CASES[name], dtype=jnp.bfloat16)
    values = jax.jit(lambda arrays: attend(**arrays, visibility=visibility))
    found, exact = (
        values(arrays),
        values({name: array.astype(jnp.float32) for name, array in arrays.items()}),
    )
    assert found.dtype == jnp.bfloat16
    # Inputs are exact in bfloat16. What is left are the roundings of q + u, probabilities and
    # output, 2**-9 each.
    error = np.abs(np.asarray(found, np.float32) - exact).max()
    assert 0 < error < 1.01 * 2 * 2.0**-9 * np.abs(arrays["value"].astype(jnp.float32)).max()
    assert f"f32[{B},{H},{L},{M + L}] = dot_general" in str(values.trace(arrays).jaxpr)


@pytest.mark.parametrize("causal", [True, False])
def test_more_slots_and_tokens_than_there_are_mean_all(causal):
    def seen(valid, lengths):
        return Visibility(
            jnp.asarray(valid), 3, 2, causal=causal, lengths=jnp.asarray(lengths)
        ).mask()

    np.testing.assert_array_equal(seen([9, -1], [9, -1]), seen([2, 0], [3, 0]))


# Distances and sinusoid codes


def test_distances_count_down_to_the_query_itself_and_on_to_keys_ahead():
    causal, both = (
        Visibility(jnp.zeros(1, jnp.int32), 3, 2, causal=causal) for causal in (True, False)
    )
    for clamp_len, expected in (
        (None, [4, 3, 2, 1, 0]),
        (3, [3, 3, 2, 1, 0]),
        (9, [4, 3, 2, 1, 0]),
    ):
        assert key_distances(5, clamp_len=clamp_len).tolist() == expected
        assert causal.distances(clamp_len=clamp_len).tolist() == expected
        assert both.distances(clamp_len=clamp_len).tolist() == [*expected, -1, -2]
    assert both.distances(clamp_len=1).tolist() == [1, 1, 1, 1, 0, -1, -1]


def test_sinusoids_in_bfloat16_come_from_wider_angles():
    # Negative: of keys ahead of a query.
    distances = np.array([0, 1, 2, -1, -2, *range(3000, 3010)])
    expected = np.stack([oracles.sinusoid(s, 8) for s in distances])
    codes = sinusoids(jnp.asarray(distances), 8, jnp.bfloat16)
    assert codes.dtype == jnp.bfloat16
    # Half a unit in bfloat16's last place, and what float32 loses of an angle of 3000.
    np.testing.assert_allclose(codes.astype(np.float32), expected, rtol=0, atol=2**-9 + 3e-4)


RATE = 0.15
LARGE = (2, 3, 512, 512)  # B, H, L, K.


def kept(seed=7, *, rate=RATE):
    """The mask of whole probabilities, bool [B, H, L, K]."""
    scaled = ProbabilityDropout(rate, jnp.uint32(seed), LARGE[1]).apply(jnp.ones(LARGE))
    np.testing.assert_allclose(np.unique(scaled), [0, 1 / (1 - rate)], rtol=1e-6)
    return np.asarray(scaled) > 0


@pytest.mark.parametrize(("seed", "rate"), [(0, RATE), (1, 0.5), (2**32 - 1, RATE)])
def test_the_share_that_is_kept_is_that_of_the_rate(seed, rate):
    """In all, and for the rows of queries and columns of keys, whose sums vary as those of
    independent draws.
    """
    mask = kept(seed, rate=rate)
    assert abs(mask.mean() - (1 - rate)) < 3 * np.sqrt(rate * (1 - rate) / mask.size)
    for axis in (2, 3):
        variance = mask.sum(axis).var() / (512 * rate * (1 - rate))
        assert abs(variance - 1) < 4 * np.sqrt(2 / (2 * 3 * 512)), axis


# The next row, head, query and key, and the next query and key.
@pytest.mark.parametrize(
    "step", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]
)
def test_neighbours_and_masks_of_other_seeds_are_not_correlated(step):
    mask = kept()
    here = mask[tuple(slice(None, -n or None) for n in step)]
    there = mask[tuple(slice(n, None) for n in step)]
    for a, b in ((here, there), *((mask, kept(other)) for other in (8, 7 + 2**31))):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)
