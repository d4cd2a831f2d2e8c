"""Tests of the cached attention kernel for TPUs, interpreted, against the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import slow_but
from txl_jax.ops.attention import CachedVisibility, cached_attention
from txl_jax.ops.attention.cached import table_length
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.cached import tpu_cached_attention

B, H = 2, 2
SMALL = Tile(128, 128)
_reference = jax.jit(cached_attention)
_interpreted = jax.jit(functools.partial(tpu_cached_attention, interpret=True), static_argnames="tile")


def make_arguments(
    *,
    segment_len=32,
    capacity=384,
    width=16,
    n_head=H,
    clamp_len=None,
    position=True,
    dtype="float32",
    cache_dtype=None,
):
    """Returns the arrays of a call, all random."""
    rng = np.random.default_rng(0)

    def draw(*shape, scale=1.0, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    query, key, value, position_query = (draw(B, n_head, segment_len, width, scale=scale) for scale in (0.5, 1, 1, 0.5))
    stored = cache_dtype or dtype
    ring = draw(B, n_head, width, capacity, dtype=stored), draw(B, n_head, capacity, width, dtype=stored)
    n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=clamp_len)
    position_key = draw(n_head, width, n_position)
    return query, key, value, ring, (position_query, position_key, None) if position else None


def check(arguments, *, write_index, valid, window=None, tile=SMALL, tolerance=2e-5):
    segment_len, capacity = arguments[0].shape[2], arguments[3][0].shape[3]
    visibility = CachedVisibility(
        jnp.asarray(valid, jnp.int32), jnp.asarray(write_index, jnp.int32), segment_len, capacity, window
    )
    expected = np.asarray(_reference(*arguments, visibility), np.float64)
    result = _interpreted(*arguments, visibility, tile=tile)
    assert result.dtype == arguments[2].dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=tolerance, atol=tolerance)


# 130: a block whose nearest pair alone is below the clamp.
@pytest.mark.parametrize(
    ("clamp_len", "window"),
    slow_but([(None, 290), (0, None), (130, None)], itertools.product([None, 0, 30, 130], [None, 290])),
)
def test_it_equals_the_reference_wherever_the_ring_begins(clamp_len, window):
    arguments = make_arguments(clamp_len=clamp_len)
    for write_index, valid in itertools.product([0, 160, 256, 383], [[384, 100], [0, 384]]):
        check(arguments, write_index=write_index, valid=valid, window=window)


@pytest.mark.parametrize(
    ("segment_len", "capacity", "width", "n_head", "tile"),
    [
        (80, 400, 64, 4, Tile(128, 256)),  # The last block of the ring is not whole.
        (41, 123, 41, 3, SMALL),  # Nothing is a multiple of anything.
        (2, 10, 8, 2, SMALL),
        (150, 300, 16, 1, SMALL),  # Two blocks of queries, the second not whole.
        (300, 300, 16, 1, Tile(256, 256)),  # Two strips of each, two blocks of own keys.
        (300, 0, 16, 1, SMALL),  # No ring.
        (128, 400, 128, 2, Tile(128, 384)),  # Values of the ring by rows.
        (16, 128, 256, 1, SMALL),
    ],
)
@pytest.mark.parametrize("clamp_len", slow_but([90], [None, 90]))
def test_it_serves_all_sizes(segment_len, capacity, width, n_head, tile, clamp_len):
    arguments = make_arguments(
        segment_len=segment_len, capacity=capacity, width=width, n_head=n_head, clamp_len=clamp_len
    )
    for write_index in sorted({0, capacity // 2, max(capacity - 1, 0)}):
        check(arguments, write_index=write_index, valid=[capacity, capacity // 3], tile=tile)


def test_position_keys_of_longer_distances_than_there_are_change_nothing():
    query, key, value, ring, (position_query, position_key, _) = make_arguments()
    more = jnp.concatenate([jnp.full((H, 16, 70), 3.0), position_key], axis=2)
    check((query, key, value, ring, (position_query, more, None)), write_index=160, valid=[384, 100])


@pytest.mark.parametrize("window", [None, 1, 100])
def test_it_serves_contents_alone(window):
    check(make_arguments(position=False), write_index=160, valid=[384, 100], window=window)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_reads_a_ring_in_bfloat16(dtype):
    arguments = make_arguments(dtype=dtype, cache_dtype="bfloat16", capacity=400, segment_len=80, clamp_len=90)
    check(arguments, write_index=160, valid=[400, 90], tolerance=2e-2 if dtype == "bfloat16" else 2e-5)
