"""Tiled attention under jax's transformations and in other types; and that it never holds the scores."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.attention_cases import CASES, assert_close, make, reference, tiled, value_and_gradients
from support.float64 import enable_x64
from txl_jax.ops.attention import Visibility
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tiled import tiled_attention

TILE = Tile(5, 11)


@pytest.mark.parametrize("name", ["uneven tiles", "all terms", "both sides, lengths", "dropout"])
def test_bfloat16(name):
    # Both round: bfloat16 has 8 bits, and gradients are sums of many products.
    arrays, given, tile = make(CASES[name], jnp.bfloat16)
    exact = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
    expected = value_and_gradients(reference, exact, **given)
    actual = jax.jit(lambda arrays: value_and_gradients(tiled, arrays, tile=tile, **given))(arrays)
    assert {array.dtype for array in jax.tree.leaves(actual)} == {jnp.dtype(jnp.bfloat16)}
    assert_close(jax.tree.map(lambda array: array.astype(jnp.float32), actual), expected, 2e-2)


def test_float64():
    with enable_x64(True):
        arrays, given, tile = make(CASES["all terms"], jnp.float64)
        expected = value_and_gradients(reference, arrays, **given)
        actual = jax.jit(lambda arrays: value_and_gradients(tiled, arrays, tile=tile, **given))(arrays)
        assert_close(actual, expected, 1e-13)


def test_members_of_an_ensemble_are_a_leading_axis():
    arrays, given, tile = make(CASES["dropout"])
    visibility = given["visibility"]
    members = jax.tree.map(lambda array: jnp.stack([array, array * 0.5, -array]), arrays)
    valid = jnp.asarray([visibility.valid, visibility.valid - 3, visibility.valid - 9])
    seeds, rates = jnp.arange(3, dtype=jnp.uint32), jnp.asarray([0.1, 0.0, 0.6])

    def member(function):
        def of(arrays, valid, seed, rate):
            described = {
                "visibility": visibility.replace(valid=valid),
                "dropout": Dropout(rate=rate, seed=seed, n_head=7),
            }
            return value_and_gradients(function, arrays, **described)

        return of

    actual = jax.jit(jax.vmap(member(lambda arrays, **g: tiled(arrays, tile=tile, **g))))(members, valid, seeds, rates)
    for i in range(3):
        one = jax.tree.map(lambda array, i=i: array[i], (members, valid, seeds, rates))
        assert_close(jax.tree.map(lambda array, i=i: array[i], actual), member(reference)(*one), 2e-6)


def test_inside_scan_and_checkpoint():
    arrays, given, tile = make(CASES["uneven tiles"])

    def layers(function, **options):
        def layer(query, _):
            return query + function({**arrays, "query": query}, **given, **options), None

        def result(query):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), query, None, length=2)[0] ** 2)

        return jax.jit(jax.value_and_grad(result))(arrays["query"])

    assert_close(layers(tiled, tile=tile), layers(reference), 4e-6)


def test_dropout_masks_are_those_of_the_reference():
    # Equal values, one key per query and value: what is left is the mask, divided by 1 - rate.
    arrays, given, tile = make({"tile": TILE, "rate": 0.4, "L": 20, "M": 5, "names": ("query", "key", "value")})
    arrays = {name: jnp.zeros_like(array) for name, array in arrays.items()}
    arrays["value"] = jnp.broadcast_to(jnp.arange(25.0)[None, None, :, None] ** 2, arrays["value"].shape)
    np.testing.assert_allclose(tiled(arrays, tile=tile, **given), reference(arrays, **given), rtol=2e-6)


def test_queries_without_keys_get_zeros():
    arrays, given, tile = make(CASES["both sides, lengths"])
    arrays = jax.tree.map(lambda array: array * 30, arrays)
    result, gradients = value_and_gradients(tiled, arrays, tile=tile, **given)
    np.testing.assert_array_equal(result[3], 0)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(gradients[name][3], 0)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(gradients))


@pytest.mark.parametrize("causal", [True, False])
def test_the_scores_are_never_held(causal):
    batch, n_head, length, width = 2, 3, 96, 8
    visibility = Visibility(jnp.full(batch, length, jnp.int32), length, length, causal=causal)
    n_keys, n_positions = visibility.n_keys, visibility.n_positions
    shapes = [(batch, n_head, length, width), *[(batch, n_head, n_keys, width)] * 2, (n_head, n_positions, width)]
    arrays = [jnp.zeros(shape) for shape in shapes]

    def gradients(*arrays):
        return jax.grad(
            lambda *a: jnp.sum(tiled_attention(*a, visibility=visibility, tile=Tile(16, 48))), (0, 1, 2, 3)
        )(*arrays)

    compiled = jax.jit(gradients).lower(*arrays).compile()
    sizes = [np.prod([int(n) for n in found.split(",")]) for found in re.findall(r"\[([\d,]+)\]", compiled.as_text())]
    assert max(sizes) <= batch * n_head * max(n_keys, n_positions) * width
    assert max(sizes) < batch * n_head * length * n_keys / 4
