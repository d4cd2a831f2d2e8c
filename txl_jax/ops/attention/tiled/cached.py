"""Attention over a KV cache, tile by tile: the twin of `ops.attention.cached`, which defines what is correct.

The ring is read by age, oldest first, in blocks of slots: where a block begins in the ring follows from the write
index, everything else about it is static. So the blocks that a window or the clamp cuts are known when the program is
made; they are written out, with what they need, and the others run in loops that need nothing:

    ages    A ......................... C ................ 1 | segment
    blocks  [window][far][far] .. [far][clamp][near] .. [near] [own]

A far block lies beyond the clamp for every query, and its position score is one number per query. Near blocks multiply
with the position keys of their own distances, and shift the product on the tile (`skew`). Softmax is online: the
largest score so far, the sum and the weighted values are rescaled after each block (Milakov and Gimelshein, 2018).

Loops are no loss on a CPU: written out, XLA computes in advance what does not depend on earlier blocks (slices of the
ring of all layers), in tens of megabytes of temporary memory; four layers of enwik8_12l in a program of their own spent
a third of their time on its first touch.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from txl_jax.ops.attention.cached import CachedVisibility, Position
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tiled.ring import Positions, Region, Stored, is_cut, regions


class _Partial(NamedTuple):
    """Softmax over the keys met so far; wide."""

    summed: jax.Array  # [B, H, L, E], weighted values.
    top: jax.Array  # [B, H, L, 1], largest score.
    total: jax.Array  # [B, H, L, 1], sum of the weights.


def tiled_cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    position: Position,
    visibility: CachedVisibility,
    *,
    tile: Tile,
) -> jax.Array:
    """Computes weighted sums of the values, as `cached.cached_attention` does, without gradients: [B, H, L, E].

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key: [B, H, L, E], of the segment.
      value: [B, H, L, E].
      ring: stored keys [B, H, E, R] and values [B, H, R, E], of any type.
      position: as of `cached.cached_attention`.
      visibility: which keys a query sees.
      tile: rows of scores (those of all heads and rows of the batch count) and keys of a block, about.
    """
    # The last block may run round the ring and read slots for the second time, at ages above R.
    visibility = dataclasses.replace(visibility, valid=jnp.minimum(visibility.valid, visibility.capacity))
    batch, n_head, n_query, _ = query.shape
    n_row, n_heads = _group(batch, n_head, n_query, tile.query)
    if (n_row, n_heads) == (batch, n_head):
        stored = Stored(*ring, (0, 0), (batch, n_head), visibility.write_index)
        return _attend(query, key, value, stored, position, visibility, tile.key)

    def step(index: jax.Array, attended: jax.Array) -> jax.Array:
        row, head = index % (batch // n_row) * n_row, index // (batch // n_row) * n_heads

        def part(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice(array, (row, head, 0, 0), (n_row, n_heads, *array.shape[2:]))

        def of_heads(table: jax.Array | None) -> jax.Array | None:
            return None if table is None else lax.dynamic_slice_in_dim(table, head, n_heads, axis=0)

        own_position = None if position is None else (part(position[0]), of_heads(position[1]), of_heads(position[2]))
        stored = Stored(*ring, (row, head), (n_row, n_heads), visibility.write_index)
        valid = lax.dynamic_slice_in_dim(visibility.valid, row, n_row)
        mine = _attend(
            part(query),
            part(key),
            part(value),
            stored,
            own_position,
            dataclasses.replace(visibility, valid=valid),
            tile.key,
        )
        return lax.dynamic_update_slice(attended, mine, (row, head, 0, 0))

    return lax.fori_loop(0, (batch // n_row) * (n_head // n_heads), step, jnp.zeros(value.shape, value.dtype))


def _group(batch: int, n_head: int, n_query: int, most: int) -> tuple[int, int]:
    """Returns rows of the batch and heads of a group: divisors, with at most about `most` queries in all."""
    n_heads = max(n for n in range(1, n_head + 1) if n_head % n == 0 and (n == 1 or n * n_query <= most))
    if n_heads < n_head:
        return 1, n_heads
    return max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * n_head * n_query <= most)), n_head


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    stored: Stored,
    position: Position,
    visibility: CachedVisibility,
    n_key: int,
) -> jax.Array:
    """Computes attention of a group of rows and heads, with blocks of about `n_key` keys: [B, H, L, E]."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    of_position = None if position is None else Positions(*position, wide)
    partial = _own(query, key, value, of_position, visibility, wide)

    def block(partial: _Partial, oldest: int | jax.Array, size: int, position_score: jax.Array | None) -> _Partial:
        return _add_block(partial, query, stored.read(oldest, size), position_score, oldest, visibility)

    far, near = regions(visibility, n_key, None if of_position is None else of_position.clamp)
    far_score = of_position.far() if of_position is not None and far.n_block else None
    partial = _fold(far, visibility, lambda partial, oldest: block(partial, oldest, far.size, far_score), partial)
    if of_position is not None and near.n_block:
        by_distance = of_position
        if near.n_block == 1:
            score = by_distance.tile_of_all(by_distance.all(), near.size)
            partial = block(partial, near.size, near.size, score)
        else:
            partial = _fold(
                near,
                visibility,
                lambda partial, oldest: block(partial, oldest, near.size, by_distance.tile(oldest, near.size)),
                partial,
            )
    return (partial.summed / partial.total).astype(value.dtype)


def _own(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position: Positions | None,
    visibility: CachedVisibility,
    wide: jnp.dtype,
) -> _Partial:
    """Computes the softmax over the segment's own keys, of which a query sees at least its own."""
    scores = jnp.einsum("bhle,bhke->bhlk", query, key, preferred_element_type=wide)
    if position is not None:
        scores += position.own()
    scores = jnp.where(visibility.own_mask()[:, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    summed = jnp.einsum("bhlk,bhke->bhle", weights.astype(value.dtype), value, preferred_element_type=wide)
    return _Partial(summed, top, jnp.sum(weights, axis=-1, keepdims=True))


def _add_block(
    partial: _Partial,
    query: jax.Array,
    stored: tuple[jax.Array, jax.Array],
    position_score: jax.Array | None,
    oldest: int | jax.Array,
    visibility: CachedVisibility,
) -> _Partial:
    """Adds a block of slots, whose ages begin with `oldest`, to the softmax."""
    key, value = (part.astype(query.dtype) for part in stored)
    n_query, n_key = query.shape[2], key.shape[3]
    scores = jnp.einsum("bhle,bhek->bhlk", query, key, preferred_element_type=partial.top.dtype)
    if position_score is not None:
        scores += position_score
    age = oldest - jnp.arange(n_key, dtype=jnp.int32)
    unseen = age[None, :] > visibility.valid[:, None]
    scores += jnp.where(unseen, -jnp.inf, 0).astype(scores.dtype)[:, None, None, :]
    if visibility.window is not None and is_cut(oldest, n_query, visibility.window):
        row = jnp.arange(n_query, dtype=jnp.int32)
        scores = jnp.where((row[:, None] + age[None, :] < visibility.window)[None, None], scores, -jnp.inf)
    top = jnp.maximum(partial.top, jnp.max(scores, axis=-1, keepdims=True))
    weights, rescale = jnp.exp(scores - top), jnp.exp(partial.top - top)
    summed = jnp.einsum("bhlk,bhke->bhle", weights.astype(value.dtype), value, preferred_element_type=top.dtype)
    return _Partial(
        summed=partial.summed * rescale + summed,
        top=top,
        total=partial.total * rescale + jnp.sum(weights, axis=-1, keepdims=True),
    )


def _fold(
    region: Region,
    visibility: CachedVisibility,
    add: Callable[[_Partial, int | jax.Array], _Partial],
    partial: _Partial,
) -> _Partial:
    """Adds the blocks of a region; those that are not cut in a loop, which begins where any row has valid slots."""
    for index in range(region.n_cut):
        partial = add(partial, region.oldest(index))
    if region.n_cut == region.n_block:
        return partial
    n_valid = (jnp.max(visibility.valid) - region.youngest + region.size) // region.size  # Blocks with valid slots.
    first = jnp.clip(region.n_block - n_valid, region.n_cut, region.n_block)
    return lax.fori_loop(first, region.n_block, lambda index, partial: add(partial, region.oldest(index)), partial)
