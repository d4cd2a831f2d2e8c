"""Attention in TPU kernels, interpreted, against the reference: values and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.ops.attention import Visibility, dot_product_attention, relative_attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.attention import tpu_attention

TERMS = ("position_key", "content_bias", "position_bias")
SMALL = Tile(16, 128)


def visibility_of(segment_len, mem_len, *, valid=None, lengths=None, **options):
    valid = [mem_len] * 2 if valid is None else valid
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    return Visibility(jnp.asarray(valid, jnp.int32), segment_len, mem_len, lengths=lengths, **options)


def arrays_of(visibility, *, width, n_head=2, terms=TERMS, dtype=jnp.float32):
    rng, batch = np.random.default_rng(0), visibility.valid.shape[0]
    of_keys = (batch, n_head, visibility.n_keys, width)
    shapes = {
        "query": (batch, n_head, visibility.segment_len, width),
        "key": of_keys,
        "value": of_keys,
        "position_key": (n_head, visibility.n_positions, width),
        "content_bias": (n_head, width),
        "position_bias": (n_head, width),
        "position_score": (n_head, visibility.n_positions),
    }
    kept = {name: shape for name, shape in shapes.items() if name in ("query", "key", "value", *terms)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in kept.items()}


def dropout_of(rate, n_head=2):
    return Dropout(rate=rate, seed=jnp.uint32(5), n_head=n_head + 1, first_row=3, first_head=1)


def reference(arrays, visibility, dropout):
    if "position_key" not in arrays:
        return dot_product_attention(**arrays, visibility=visibility, dropout=dropout)
    biases = {name: arrays.get(name) for name in ("content_bias", "position_bias")}
    return relative_attention(**{**arrays, **biases}, visibility=visibility, dropout=dropout)


def in_kernels(arrays, visibility, dropout, *, tile=SMALL, kernel="mosaic_gather"):
    options = {"tile": tile, "kernel": kernel, "interpret": True}
    return tpu_attention(**arrays, visibility=visibility, dropout=dropout, **options)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, arrays, visibility, dropout):
    """Returns the attention and the gradients of its product with fixed numbers."""

    def product(arrays):
        out = function(arrays, visibility, dropout)
        fixed = np.random.default_rng(1).normal(size=out.shape)
        return jnp.sum(out.astype(jnp.float32) * jnp.asarray(fixed, jnp.float32)), out

    gradients, out = jax.grad(product, has_aux=True)(arrays)
    return {"out": out, **gradients}


def assert_equal(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.shape == expected[name].shape and array.dtype == expected[name].dtype, name
        got, want = (np.asarray(part, np.float64) for part in (array, expected[name]))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 0.1), err_msg=name)


CASES = {
    "uneven tiles, part-filled rows": {"lengths": (40, 100), "valid": [100, 5], "width": 16, "kernel": "mosaic_roll"},
    "two strips, dropout": {"lengths": (150, 30), "tile": Tile(160, 256), "width": 41, "rate": 0.3},
    "window, no row has its memory": {"lengths": (33, 120), "valid": [0, 0], "window": 9, "width": 8},
    "window and memory": {"lengths": (40, 130), "valid": [130, 60], "window": 70, "width": 8, "rate": 0.5},
    "one query": {"lengths": (1, 3), "width": 8},
    "one key": {"lengths": (1, 0), "width": 8},
    "wide heads": {"lengths": (24, 8), "width": 160, "tile": Tile(32, 128)},
    "u only": {"lengths": (20, 12), "width": 8, "terms": ("position_key", "content_bias")},
    "without positions": {"lengths": (40, 100), "valid": [70, 0], "width": 8, "terms": (), "rate": 0.2},
    "Shaw's scores": {"lengths": (40, 100), "width": 8, "terms": ("position_key", "position_score"), "rate": 0.2},
    "scores only": {"lengths": (20, 12), "width": 128, "terms": ("position_score",), "causal": False},
    "both directions, padding": {"lengths": (140, 0), "width": 8, "causal": False, "tokens": [131, 0], "rate": 0.1},
    "both directions, window, memory": {"lengths": (40, 100), "width": 8, "causal": False, "window": 20},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_equal_the_references(case):
    case = dict(case)
    n_query, n_memory = case.pop("lengths")
    rate, width, terms = case.pop("rate", None), case.pop("width"), case.pop("terms", TERMS)
    options = {name: case.pop(name) for name in ("tile", "kernel") if name in case}
    visibility = visibility_of(n_query, n_memory, lengths=case.pop("tokens", None), **case)
    arrays, dropout = arrays_of(visibility, width=width, terms=terms), None if rate is None else dropout_of(rate)
    expected = value_and_gradients(reference, arrays, visibility, dropout)
    found = value_and_gradients(functools.partial(in_kernels, **options), arrays, visibility, dropout)
    assert_equal(found, expected)


def test_a_query_that_sees_no_key_gets_zeros():
    visibility = visibility_of(20, 0, lengths=[20, 0], causal=False)
    found = value_and_gradients(in_kernels, arrays_of(visibility, width=8), visibility, None)
    for name in ("out", "query", "key", "value"):
        assert np.abs(found[name][0]).max() > 0.01 and np.all(found[name][1] == 0), name


def test_bfloat16():
    visibility = visibility_of(40, 100, valid=[100, 40])
    arrays = arrays_of(visibility, width=64, terms=(*TERMS, "position_score"), dtype=jnp.bfloat16)
    exact = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    expected = value_and_gradients(reference, exact, visibility, dropout_of(0.2))
    found = value_and_gradients(in_kernels, arrays, visibility, dropout_of(0.2))
    assert {array.dtype for array in found.values()} == {jnp.dtype(jnp.bfloat16)}
    assert_equal({name: array.astype(jnp.float32) for name, array in found.items()}, expected, 2e-2)


def test_tile_sizes_do_not_matter():
    visibility = visibility_of(33, 100, valid=[100, 11])
    arrays, dropout = arrays_of(visibility, width=8), dropout_of(0.4)
    first, other = (
        value_and_gradients(functools.partial(in_kernels, tile=tile), arrays, visibility, dropout)
        for tile in (SMALL, Tile(999, 999))
    )
    assert_equal(other, first, 2e-6)


def test_members_with_their_own_weights_seed_and_rate_are_vmapped():
    visibility = visibility_of(20, 24, valid=[24, 3])
    arrays = arrays_of(visibility, width=8)
    members = jax.tree.map(lambda array: jnp.stack([array, array[::-1] + 1]), arrays)
    seeds, rates = jnp.asarray([5, 6], jnp.uint32), jnp.asarray([0.1, 0.6])
    valid = jnp.asarray([[24, 3], [0, 9]])

    def of_member(function, arrays, valid, seed, rate):
        dropout = Dropout(rate=rate, seed=seed, n_head=2)
        return value_and_gradients(function, arrays, visibility.replace(valid=valid), dropout)

    found, expected = (
        jax.vmap(functools.partial(of_member, function))(members, valid, seeds, rates)
        for function in (in_kernels, reference)
    )
    assert_equal(found, expected)


def test_layers_are_scanned_and_computed_again():
    visibility = visibility_of(20, 0)
    arrays = arrays_of(visibility, width=8)

    def layers(function, arrays, visibility, dropout):
        @jax.checkpoint
        def layer(query, seed):
            out = function({**arrays, "query": query}, visibility, dropout.replace(seed=seed))
            return query + out, None

        return jax.lax.scan(layer, arrays["query"], jnp.arange(3, dtype=jnp.uint32))[0]

    found, expected = (
        value_and_gradients(functools.partial(layers, function), arrays, visibility, dropout_of(0.3))
        for function in (in_kernels, reference)
    )
    assert_equal(found, expected)
