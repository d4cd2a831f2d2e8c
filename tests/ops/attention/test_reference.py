"""Tests of the definition of attention.

Values are compared with a loop over pairs, gradients with the four terms written out, and the
positional encodings and dropout masks with loops.

Causal, or with keys on both sides of a query, as in an encoder whose rows have padding behind them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from support.attention_arrays import NAMES, draw_on_host, shapes
from txl_jax.ops.attention import ProbabilityDropout, Visibility, attention
from txl_jax.ops.attention.distances import key_distances, sinusoids

B = 3
H = 2
L = 5
M = 4
E = 3
# Arrays of a call: up to the biases u and v, up to the position keys, and without positions.
ALL_BUT_SCORE = NAMES[:6]
SHAW = NAMES[:4]
ABSOLUTE = NAMES[:3]

# Options of `make`. `valid` has the filled slots of each row of the batch.
CASES = {}
CASES["whole memory"] = {"names": ALL_BUT_SCORE}
CASES["part-filled memory"] = {"valid": [0, 2, M]}
CASES["window"] = {"valid": [M, 2, 0], "window": 3}
CASES["no memory"] = {"mem_len": 0}
CASES["Shaw's terms"] = {"valid": [0, 2, M], "names": SHAW}
CASES["u and a score per distance"] = {"names": (*NAMES[:5], "position_score")}
CASES["no positions, window"] = {"valid": [M, 2, 0], "window": 4, "names": ABSOLUTE}
CASES["only a score per distance"] = {
    "valid": [0, 2, M],
    "window": 6,
    "names": (*ABSOLUTE, "position_score"),
}

CASES["both sides"] = {"causal": False, "mem_len": 0}
CASES["both sides, memory"] = {"causal": False, "valid": [M, 2, 0]}
CASES["both sides, memory, window, padding"] = {
    "causal": False,
    "valid": [M, 2, 0],
    "window": 3,
    "lengths": [5, 0, 1],
}

attend = functools.partial(attention, implementation="reference")
# Compiled as a whole, which takes less time than each of its operations by itself.
mask_of = jax.jit(Visibility.mask)


def make(
    *,
    mem_len=M,
    valid=None,
    window=None,
    causal=True,
    lengths=None,
    names=NAMES,
    dtype=float,
):
    """Returns what is visible, its mask by the oracle, and arrays by name.

    Without `valid` the memory of each row is full.
    """
    if valid is None:
        valid = [mem_len] * B
    mask = oracles.attention_mask(
        valid, segment_len=L, mem_len=mem_len, window=window, causal=causal, lengths=lengths
    )
    visibility = Visibility(
        valid=np.asarray(valid, np.int32),
        segment_len=L,
        mem_len=mem_len,
        window=window,
        causal=causal,
        lengths=None if lengths is None else np.asarray(lengths, np.int32),
    )
    return visibility, mask, draw_on_host(visibility, H, E, names=names, dtype=dtype)


def with_all_terms(arrays, visibility):
    """The arrays, with zeros for those that are missing."""
    terms = dict(arrays)
    for name, shape in shapes(visibility, H, E).items():
        if name not in terms:
            terms[name] = np.zeros(shape)
    return terms


def four_terms(arrays, mask):
    """Attention from the four terms, with a position key gathered for every pair: [B, H, L, E]."""
    query = arrays["query"]
    key = arrays["key"]
    n_query = query.shape[2]
    n_key = key.shape[2]
    distance_LxK = (n_key - n_query) + np.arange(n_query)[:, None] - np.arange(n_key)[None, :]
    place_LxK = np.minimum(n_key - 1 - distance_LxK, arrays["position_key"].shape[1] - 1)
    r_HxLxKxE = arrays["position_key"][:, place_LxK]

    scores = jnp.einsum("bhle,bhke->bhlk", query, key)
    scores += jnp.einsum("bhle,hlke->bhlk", query, r_HxLxKxE)
    scores += jnp.einsum("he,bhke->bhk", arrays["content_bias"], key)[:, :, None, :]
    scores += jnp.einsum("he,hlke->hlk", arrays["position_bias"], r_HxLxKxE)[None]
    scores += arrays["position_score"][:, place_LxK][None]

    # A query that sees no key has the sum 0.
    weights = jnp.where(mask[:, None], jnp.exp(scores / np.sqrt(E)), 0)
    sums = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhlk,bhke->bhle", weights / jnp.where(sums == 0, 1, sums), arrays["value"])


@pytest.mark.parametrize("name", CASES)
def test_values_match_a_loop_over_pairs_and_gradients_explicit_terms(name, x64):
    visibility, mask, arrays = make(**CASES[name])
    np.testing.assert_array_equal(mask_of(visibility), mask)
    weights = np.random.default_rng(5).normal(size=(B, H, L, E))

    @jax.jit
    def values_and_gradients(arrays):
        values, pull_back = jax.vjp(lambda arrays: attend(**arrays, visibility=visibility), arrays)
        return values, pull_back(jnp.asarray(weights))[0]

    @jax.jit
    @jax.grad
    def gradients_of_four_terms(arrays):
        return jnp.sum(weights * four_terms(with_all_terms(arrays, visibility), mask))

    values, gradients = values_and_gradients(arrays)

    expected = oracles.relative_attention(**with_all_terms(arrays, visibility), mask=mask)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-13)
    expected_gradients = gradients_of_four_terms(arrays)
    for array in arrays:
        # Gradients of about 0 would match whatever is wrong.
        assert np.abs(expected_gradients[array]).max() > 0.1, array
        np.testing.assert_allclose(
            gradients[array], expected_gradients[array], rtol=0, atol=1e-12, err_msg=array
        )


@pytest.mark.parametrize(
    "name", ["window", "no positions, window", "both sides, memory, window, padding"]
)
def test_dropout_has_the_mask_of_a_loop_over_pairs(name, x64):
    visibility, mask, arrays = make(**CASES[name])
    factor = oracles.dropout_factor((B, H, *mask.shape[1:]), rate=0.4, seed=9)
    expected = oracles.relative_attention(
        **with_all_terms(arrays, visibility), mask=mask, factor=factor
    )

    values = jax.jit(lambda arrays: attend(**arrays, visibility=visibility, dropout=(0.4, 9)))

    np.testing.assert_allclose(values(arrays), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["whole memory", "no positions, window"])
def test_bfloat16_scores_are_summed_in_float32(name):
    visibility, _, arrays = make(**CASES[name], dtype=jnp.bfloat16)
    # The inputs are exact in bfloat16.
    wide = jax.tree.map(lambda array: np.asarray(array, np.float32), arrays)
    values = jax.jit(lambda arrays: attend(**arrays, visibility=visibility))

    narrow = values(arrays)
    exact = values(wide)

    assert narrow.dtype == jnp.bfloat16
    # Roundings are left, 2**-9 each, of q + u, probabilities and output. The last two may add up to
    # this bound, and 1.01 is for their product. The errors are at most 0.73 of it.
    error = np.abs(np.asarray(narrow, np.float32) - exact).max()
    assert 0 < error < 1.01 * 2 * 2.0**-9 * np.abs(wide["value"]).max()
    assert f"f32[{B},{H},{L},{M + L}] = dot_general" in str(values.trace(arrays).jaxpr)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_more_slots_and_tokens_than_there_are_mean_all(causal):
    """And fewer than none mean none."""

    def mask(valid, lengths):
        visibility = Visibility(
            jnp.asarray(valid),
            segment_len=3,
            mem_len=2,
            causal=causal,
            lengths=jnp.asarray(lengths),
        )
        return mask_of(visibility)

    np.testing.assert_array_equal(mask([9, -1], [9, -1]), mask([2, 0], [3, 0]))


# Distances and sinusoidal encodings


@pytest.mark.parametrize(
    ("clamp_len", "expected"),
    [
        pytest.param(None, [4, 3, 2, 1, 0], id="no clamp"),
        pytest.param(3, [3, 3, 2, 1, 0], id="clamp"),
        pytest.param(9, [4, 3, 2, 1, 0], id="clamp beyond all"),
    ],
)
def test_distances_count_down_to_the_query_itself_and_on_to_keys_ahead(clamp_len, expected):
    valid = jnp.zeros(1, jnp.int32)
    causal = Visibility(valid, segment_len=3, mem_len=2)
    both_sides = Visibility(valid, segment_len=3, mem_len=2, causal=False)

    assert key_distances(5, clamp_len=clamp_len).tolist() == expected
    assert causal.distances(clamp_len=clamp_len).tolist() == expected
    assert both_sides.distances(clamp_len=clamp_len).tolist() == [*expected, -1, -2]


def test_distances_ahead_of_a_query_are_clamped_too():
    valid = jnp.zeros(1, jnp.int32)
    both_sides = Visibility(valid, segment_len=3, mem_len=2, causal=False)

    assert both_sides.distances(clamp_len=1).tolist() == [1, 1, 1, 1, 0, -1, -1]


def test_sinusoids_in_bfloat16_come_from_wider_angles():
    # Negative distances are to keys ahead of a query.
    distances = np.array([0, 1, 2, -1, -2, *range(3000, 3010)])
    expected = np.stack([oracles.sinusoid(distance, 8) for distance in distances])

    codes = sinusoids(jnp.asarray(distances), 8, jnp.bfloat16)

    assert codes.dtype == jnp.bfloat16
    # Half a unit in bfloat16's last place, and what float32 loses of an angle of 3000.
    np.testing.assert_allclose(codes.astype(np.float32), expected, rtol=0, atol=2**-9 + 3e-4)


# Dropout on probabilities

RATE = 0.15
LARGE = (2, 3, 512, 512)  # B, H, L, K.


@jax.jit
def dropped_ones(seed, rate):
    """Probabilities of 1 after dropout, [B, H, L, K]."""
    return ProbabilityDropout(rate, seed, LARGE[1]).apply(jnp.ones(LARGE))


@functools.cache
def kept(seed=7, *, rate=RATE):
    """The mask of whole probabilities, bool [B, H, L, K]."""
    scaled = np.asarray(dropped_ones(jnp.uint32(seed), jnp.float32(rate)))
    np.testing.assert_allclose(np.unique(scaled), [0, 1 / (1 - rate)], rtol=1e-6)
    return scaled > 0


@pytest.mark.parametrize(("seed", "rate"), [(0, RATE), (1, 0.5), (2**32 - 1, RATE)])
def test_the_share_that_is_kept_is_that_of_the_rate(seed, rate):
    """In all, and for the rows of queries and the columns of keys.

    Their sums vary like sums of independent draws. Deviations may be 3 or 4 standard deviations.
    """
    mask = kept(seed, rate=rate)
    n_batch, n_head, length, _ = LARGE

    assert abs(mask.mean() - (1 - rate)) < 3 * np.sqrt(rate * (1 - rate) / mask.size)
    for axis in (2, 3):
        variance = mask.sum(axis).var() / (length * rate * (1 - rate))
        n_sum = n_batch * n_head * length
        assert abs(variance - 1) < 4 * np.sqrt(2 / n_sum), f"axis {axis}"


def assert_not_correlated(first, second):
    """Asserts a correlation below 4 standard deviations of independent masks' correlations."""
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(first.size)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(np.s_[:-1], np.s_[1:], id="next row"),
        pytest.param(np.s_[:, :-1], np.s_[:, 1:], id="next head"),
        pytest.param(np.s_[:, :, :-1], np.s_[:, :, 1:], id="next query"),
        pytest.param(np.s_[..., :-1], np.s_[..., 1:], id="next key"),
        pytest.param(np.s_[..., :-1, :-1], np.s_[..., 1:, 1:], id="next query and key"),
    ],
)
def test_neighbours_are_not_correlated(before, after):
    mask = kept()

    assert_not_correlated(mask[before], mask[after])


@pytest.mark.parametrize("seed", [8, 7 + 2**31], ids=["next seed", "another first bit"])
def test_masks_of_other_seeds_are_not_correlated(seed):
    # Without an argument the seed is 7.
    assert_not_correlated(kept(), kept(seed))
