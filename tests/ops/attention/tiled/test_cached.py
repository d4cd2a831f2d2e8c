"""Tests of tiled attention over a KV cache: against the reference, which is tested against a loop over pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from support.cases import slow_but
from txl_jax.ops.attention import CachedVisibility, Visibility
from txl_jax.ops.attention.cached import cached_attention, table_length
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tiled.cached import tiled_cached_attention

B, H, L, E, R = 2, 4, 6, 5, 40
ALL_HEADS, ONE_HEAD = Tile(1000, 16), Tile(6, 16)  # Blocks of 16 keys: R is two and a half of them.
ONE_BLOCK = Tile(12, 64)


def draw(*, clamp_len=None, batch=B, n_head=H, n_query=L, width=E, capacity=R, dtype=jnp.float32, ring_dtype=None):
    """Returns queries, keys, values, ring, position queries, keys and scores."""
    rng = np.random.default_rng(0)
    n_position = table_length(segment_len=n_query, capacity=capacity, clamp_len=clamp_len)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    rows = (batch, n_head, n_query, width)
    query, key, value, position_query = normal(*rows), normal(*rows), normal(*rows), normal(*rows)
    ring = normal(batch, n_head, width, capacity), normal(batch, n_head, capacity, width)
    ring = tuple(part.astype(ring_dtype or dtype) for part in ring)
    positions = position_query, normal(n_head, width, n_position) * 0.3, normal(n_head, n_position)
    return query * width**-0.5, key, value, ring, positions


def visible(valid, *, write_index=0, window=None, n_query=L, capacity=R):
    return CachedVisibility(jnp.asarray(valid), jnp.asarray(write_index), n_query, capacity, window)


def difference(given, visibility, tile):
    """Returns the largest difference from the reference."""
    query, key, value, ring, position = given
    expected = jax.jit(cached_attention)(query, key, value, ring, position, visibility)
    found = jax.jit(tiled_cached_attention, static_argnames="tile")(
        query, key, value, ring, position, visibility, tile=tile
    )
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert jnp.all(jnp.isfinite(found))
    return jnp.max(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)))


VISIBLE = {  # Filled slots, window, where the next segment is written.
    "full": ([R, R], None, 0),
    "part-filled": ([R, 7], None, 18),
    "window": ([R, R], R, 36),
    "row-without-memory": ([33, 0], 34, 30),
    "empty": ([0, 0], None, 6),
    "window-within-segment": ([R, R], 4, 1),
}
TILES = (ALL_HEADS, ONE_HEAD, ONE_BLOCK)
CLAMPS = (None, 0, 1, 3, 20, 43, 60)  # 43: below the longest distance, above the ring.
QUICK = [
    *((ONE_HEAD, clamp_len, name) for clamp_len in CLAMPS for name in ("full", "part-filled", "empty")),
    *((ONE_HEAD, 20, name) for name in ("window", "row-without-memory", "window-within-segment")),
    *((tile, 20, "row-without-memory") for tile in (ALL_HEADS, ONE_BLOCK)),
]


@pytest.mark.parametrize(
    ("tile", "clamp_len", "name"), slow_but(QUICK, itertools.product(TILES, CLAMPS, VISIBLE)), ids=str
)
def test_it_equals_the_reference(tile, clamp_len, name):
    valid, window, write_index = VISIBLE[name]
    visibility = visible(valid, write_index=write_index, window=window)
    assert difference(draw(clamp_len=clamp_len), visibility, tile) <= 5e-6


@pytest.mark.parametrize("write_index", [0, 6, 12, 18, 24, 30, 36, 39])
def test_blocks_that_run_over_the_end_of_the_ring(write_index):
    assert difference(draw(), visible([R, R], write_index=write_index), ALL_HEADS) <= 5e-6


@pytest.mark.parametrize(
    ("clamp_len", "size"), slow_but([(8, 1), (13, 4), (20, 7)], itertools.product([8, 12, 13, 20], [1, 4, 7]))
)
def test_blocks_that_are_smaller_than_a_register(clamp_len, size):
    """They become 16 keys, which may be more than there are below the clamp."""
    assert difference(draw(clamp_len=clamp_len), visible([R, 9], write_index=18), Tile(12, size)) <= 5e-6


def test_more_slots_than_there_are_mean_all():
    """Two blocks of 32 keys cover 64 ages, of which the ring has 40."""
    given, tile = draw(), Tile(1000, 20)
    assert difference(given, visible([R + 30, R + 1], write_index=18), tile) <= 5e-6


@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "no-keys"])
@pytest.mark.parametrize("with_scores", [True, False], ids=["scores", "no-scores"])
@pytest.mark.parametrize("clamp_len", slow_but([20], [None, 20]))
def test_position_terms(with_keys, with_scores, clamp_len):
    *given, (position_query, key, score) = draw(clamp_len=clamp_len)
    position = (position_query, key if with_keys else None, score if with_scores else None)
    if not with_keys and not with_scores:
        position = None
    assert difference((*given, position), visible([R, 9], write_index=12, window=38), ONE_HEAD) <= 5e-6


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_query": 1, "capacity": 33},
        {"capacity": 0},
        {"width": 41, "n_query": 20, "capacity": 60},
        {"n_head": 3, "batch": 1, "capacity": 7},
        {"batch": 4, "n_head": 2, "n_query": 3, "capacity": 21},
        {"n_query": 50, "capacity": 50},
    ],
    ids=["one-token", "no-memory", "width-41", "ring-below-a-block", "rows-in-groups", "segment-above-a-block"],
)
@pytest.mark.parametrize("clamp_len", slow_but([9], [None, 9]))
def test_other_sizes(sizes, clamp_len):
    given = draw(clamp_len=clamp_len, **sizes)
    batch, capacity, n_query = sizes.get("batch", B), sizes.get("capacity", R), sizes.get("n_query", L)
    visibility = visible([capacity] * batch, write_index=capacity // 2, n_query=n_query, capacity=capacity)
    assert difference(given, visibility, Tile(12, 16)) <= 5e-6


@pytest.mark.parametrize(("dtype", "ring_dtype"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_narrow_types(dtype, ring_dtype):
    """A ring in bfloat16 is read as it is; weights in bfloat16 are rounded after another largest score."""
    given = draw(clamp_len=20, dtype=jnp.dtype(dtype), ring_dtype=jnp.dtype(ring_dtype))
    allowed = 5e-6 if dtype == "float32" else 2e-2
    assert difference(given, visible([R, 9], write_index=12), ONE_HEAD) <= allowed


def test_position_scores_match_a_loop_over_pairs(x64):
    given = draw(dtype=jnp.float64)
    query, key, value, ring, (position_query, _, score) = given
    write_index, valid, window = 18, [R, 9], 38
    stored_key, stored_value = (np.roll(part, -write_index, 2) for part in (ring[0].swapaxes(2, 3), ring[1]))
    mask = Visibility(jnp.asarray(valid), L, R, window).mask()
    expected = oracles.relative_attention(
        np.asarray(query) * E**0.5,
        np.concatenate([stored_key, key], axis=2),
        np.concatenate([stored_value, value], axis=2),
        position_key=np.zeros((H, R + L, E)),
        content_bias=np.zeros((H, E)),
        position_bias=np.zeros((H, E)),
        mask=mask,
        position_score=np.asarray(score) * E**0.5,
    )
    visibility = visible(valid, write_index=write_index, window=window)
    found = tiled_cached_attention(
        query, key, value, ring, (position_query, None, score), visibility, tile=Tile(12, 16)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_no_array_of_all_scores_is_made():
    given, visibility = draw(n_query=32, capacity=2048), visible([2048, 2048], n_query=32, capacity=2048)
    compute = jax.jit(tiled_cached_attention, static_argnames="tile")
    needed = compute.lower(*given, visibility, tile=Tile(32, 256)).compile().memory_analysis().temp_size_in_bytes
    assert needed < B * H * 32 * 2048 * 4 / 2
