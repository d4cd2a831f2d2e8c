"""Tests of attention that sees keys on both sides of a query, as in an encoder whose rows have padding behind them.

The oracle is a loop over pairs; its position keys have distances of both signs. Kernels have such tests of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Implementation, Tile, Visibility, attention, sinusoids

B, H, L, M, E = 3, 2, 5, 4, 3
NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")
CASES = {
    "whole rows": {},
    "padded rows": {"lengths": [5, 3, 1]},
    "a row without tokens": {"lengths": [4, 0, 5]},
    "window": {"window": 2},
    "window and padded rows": {"window": 2, "lengths": [5, 2, 0]},
    "memory": {"mem_len": M, "valid": [M, 2, 0]},
    "memory, window and padded rows": {"mem_len": M, "valid": [M, 2, 0], "window": 3, "lengths": [5, 0, 1]},
}


def make(*, mem_len=0, valid=(0,) * B, window=None, lengths=None):
    """Returns the description, its mask by the oracle, and arrays by name."""
    options = {"mem_len": mem_len, "window": window, "causal": False}
    mask = oracles.attention_mask(valid, segment_len=L, lengths=lengths, **options)
    rows = {"valid": jnp.asarray(valid), "lengths": None if lengths is None else jnp.asarray(lengths)}
    visibility = Visibility(segment_len=L, **rows, **options)
    rng, n_key, n_position = np.random.default_rng(4), visibility.n_keys, visibility.n_keys + L - 1
    shapes = [(B, H, L, E), *[(B, H, n_key, E)] * 2, (H, n_position, E), *[(H, E)] * 2, (H, n_position)]
    return visibility, mask, {name: rng.normal(size=shape) for name, shape in zip(NAMES, shapes, strict=True)}


def hidden_queries(mask):
    """Returns the queries that see no key, bool [B, H, L]."""
    return ~mask.any(-1)[:, None].repeat(H, 1)


@pytest.fixture(name="case", params=CASES.values(), ids=CASES)
def _case(request):
    return make(**request.param)


@pytest.fixture(name="attend", params=[Implementation("reference"), Implementation("tiled", tile=Tile(2, 4))], ids=str)
def _attend(request):
    """Returns `attention` by one implementation."""
    return functools.partial(attention, implementation=request.param)


def test_the_mask_and_the_distances_are_those_of_a_loop(case):
    visibility, mask, _ = case
    np.testing.assert_array_equal(visibility.mask(), mask)
    distances = np.asarray(visibility.distances())
    assert (distances[0], distances[-1], len(distances)) == (visibility.n_keys - 1, 1 - L, visibility.n_positions)
    np.testing.assert_array_equal(visibility.distances(clamp_len=2), np.clip(distances, -2, 2))


def test_values_match_a_loop_over_pairs(attend, case, x64):
    visibility, mask, arrays = case
    expected = oracles.relative_attention(**arrays, mask=mask)
    found = jax.jit(lambda arrays: attend(**arrays, visibility=visibility))(arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    assert np.all(np.asarray(found)[hidden_queries(mask)] == 0)


def test_dropout_has_the_mask_of_a_loop_over_pairs(attend, x64):
    visibility, mask, arrays = make(**CASES["memory, window and padded rows"])
    factor = oracles.dropout_factor((B, H, *mask.shape[1:]), rate=0.4, seed=9)
    expected = oracles.relative_attention(**arrays, mask=mask, factor=factor)
    found = jax.jit(lambda arrays: attend(**arrays, visibility=visibility, dropout=(0.4, 9)))(arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_gradients_match_differences_of_the_loop(attend, case, x64):
    """Central differences of the oracle, at one entry of each array; all gradients are finite."""
    visibility, mask, arrays = case
    factors = np.random.default_rng(5).normal(size=(B, H, L, E))
    step = jax.jit(jax.grad(lambda arrays: jnp.sum(factors * attend(**arrays, visibility=visibility))))
    found = step({name: jnp.asarray(array) for name, array in arrays.items()})
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        where = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = {**arrays, name: arrays[name].copy()}
            moved[name][where] += sign * 1e-5
            ends.append(np.sum(factors * oracles.relative_attention(**moved, mask=mask)))
        assert abs(gradient[where]) > 0.01, name
        np.testing.assert_allclose(gradient[where], (ends[0] - ends[1]) / 2e-5, rtol=1e-7, err_msg=name)


def test_padding_has_no_part_in_values_and_gradients(attend, x64):
    """A row with padding is the row without it."""
    rng, n_token = np.random.default_rng(6), 3
    arrays = {name: jnp.asarray(rng.normal(size=(1, H, L, E))) for name in NAMES[:3]}
    position_key = jnp.asarray(rng.normal(size=(H, 2 * L - 1, E)))
    padded = Visibility(jnp.zeros(1, jnp.int32), L, 0, causal=False, lengths=jnp.asarray([n_token]))
    short = Visibility(jnp.zeros(1, jnp.int32), n_token, 0, causal=False)

    def of_tokens(arrays, visibility, position_key):
        return jnp.sum(attend(**arrays, position_key=position_key, visibility=visibility)[:, :, :n_token] ** 2)

    step = jax.jit(jax.grad(of_tokens))
    grads = step(arrays, padded, position_key)
    cut = {name: array[:, :, :n_token] for name, array in arrays.items()}
    between = position_key[:, L - n_token : L + n_token - 1]  # The distances n - 1, .., -(n - 1).
    expected = step(cut, short, between)
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient[:, :, :n_token], expected[name], rtol=0, atol=1e-13, err_msg=name)
        assert np.all(gradient[:, :, n_token:] == 0), name


def test_sinusoids_of_the_two_sides_differ():
    """Sines change their sign with the distance, cosines do not."""
    visibility = Visibility(jnp.zeros(1, jnp.int32), L, 0, causal=False)
    sines, cosines = np.split(np.asarray(sinusoids(visibility.distances(), 6, jnp.float32)), 2, axis=1)
    np.testing.assert_allclose(sines, -sines[::-1], atol=1e-6)
    np.testing.assert_allclose(cosines, cosines[::-1], atol=1e-6)
    assert np.abs(sines[: L - 1]).min() > 0.001


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_query_that_sees_no_key_gets_zeros_in_every_type(attend, dtype):
    visibility, mask, arrays = make(window=2, lengths=[5, 2, 0])
    arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}

    @jax.jit
    def values_and_gradients(arrays):
        output, pull_back = jax.vjp(lambda arrays: attend(**arrays, visibility=visibility), arrays)
        return output, pull_back(jnp.ones_like(output))[0]

    output, gradients = values_and_gradients(arrays)
    hidden = hidden_queries(mask)
    assert hidden.sum() == H * (2 + 5)
    assert output.dtype == dtype
    assert np.all(np.asarray(output)[hidden] == 0) and np.all(np.asarray(gradients["query"])[hidden] == 0)
    assert all(np.isfinite(np.asarray(gradient, np.float32)).all() for gradient in gradients.values())
