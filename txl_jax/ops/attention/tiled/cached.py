"""Attention over a KV cache, tile by tile.

The definition is `ops.attention.reference.cached_attention`; tests/ops/attention/test_cached.py
compares with it wherever the ring begins.

The ring is read by age, oldest first, in blocks of slots: where a block begins in the ring follows
from the write index, everything else about it is static. So the blocks that a window or the clamp
cuts are known when the program is made. They are written out, with what they need, and the others
run in loops that need nothing:

    ages    A ......................... C ................ 1 | segment
    blocks  [window][far][far] .. [far][clamp][near] .. [near] [own]

A far block is beyond the clamp for every query, and its position score is one number per query.
Near blocks multiply with the position keys of their own distances, and shift the product on the
tile (`skew`). Softmax is online: the largest score so far, the sum and the weighted values are
rescaled after each block (Milakov and Gimelshein, 2018).

Loops are no loss on a CPU: written out, XLA computes in advance what does not depend on earlier
blocks (slices of the ring of all layers), in tens of megabytes of temporary memory; four layers of
enwik8_12l in a program of their own spent a third of their time on its first touch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from txl_jax.ops.attention.distances import relative_shift, skew
from txl_jax.ops.attention.masks import CachedVisibility
from txl_jax.ops.attention.problem import CachedOperands, Tile
from txl_jax.ops.attention.reference import position_scores
from txl_jax.ops.attention.tiled.training import Softmax
from txl_jax.ops.matmul import product, wide_type

# float32 numbers of the widest register of a CPU; several blocks are multiples of it.
_REGISTER = 16


def tiled_cached_attention(
    operands: CachedOperands, visibility: CachedVisibility, *, tile: Tile
) -> jax.Array:
    """Computes weighted sums of the values, without gradients: [B, H, L, E].

    `tile` is about how many rows of scores (over all heads and rows of the batch) and keys a block
    has.
    """
    # The last block may run round the ring and read slots for the second time, at ages above R.
    visibility = dataclasses.replace(
        visibility, valid=jnp.minimum(visibility.valid, visibility.capacity)
    )
    ring, (batch, n_head, n_query, _) = operands.ring, operands.query.shape
    n_row, n_heads = _group(batch, n_head, n_query, tile.query)
    if (n_row, n_heads) == (batch, n_head):
        slots = _Ring(*ring, (0, 0), (batch, n_head), visibility.write_index)
        return _attend(operands, slots, visibility, tile.key)

    def step(index: jax.Array, attended: jax.Array) -> jax.Array:
        row, head = index % (batch // n_row) * n_row, index // (batch // n_row) * n_heads

        def part(array: jax.Array) -> jax.Array:
            if array.ndim < 4:  # Tables of heads.
                return lax.dynamic_slice_in_dim(array, head, n_heads, axis=0)
            return lax.dynamic_slice(array, (row, head, 0, 0), (n_row, n_heads, *array.shape[2:]))

        slots = _Ring(*ring, (row, head), (n_row, n_heads), visibility.write_index)
        own_visibility = dataclasses.replace(
            visibility, valid=lax.dynamic_slice_in_dim(visibility.valid, row, n_row)
        )
        mine = _attend(
            jax.tree.map(part, operands._replace(ring=(None, None))),
            slots,
            own_visibility,
            tile.key,
        )
        return lax.dynamic_update_slice(attended, mine, (row, head, 0, 0))

    return lax.fori_loop(
        0, (batch // n_row) * (n_head // n_heads), step, jnp.zeros_like(operands.value)
    )


def _group(batch: int, n_head: int, n_query: int, most: int) -> tuple[int, int]:
    """Returns how many rows of the batch and how many heads are in a group.

    They are divisors of `batch` and `n_head`, and a group has at most about `most` queries in all.
    """
    n_heads = max(
        n for n in range(1, n_head + 1) if n_head % n == 0 and (n == 1 or n * n_query <= most)
    )
    if n_heads < n_head:
        return 1, n_heads
    return max(
        n
        for n in range(1, batch + 1)
        if batch % n == 0 and (n == 1 or n * n_head * n_query <= most)
    ), n_head


def _attend(
    operands: CachedOperands, slots: "_Ring", visibility: CachedVisibility, n_key: int
) -> jax.Array:
    """Computes the attention of a group of rows and heads, [B, H, L, E].

    Blocks have about `n_key` keys each.
    """
    query, key, value, _, position = operands
    wide = wide_type(query)
    by_distance = None if position is None else _Positions(*position)

    # The segment's own keys, of which a query sees at least its own.
    scores = product("bhle,bhke->bhlk", query, key)
    if by_distance is not None:
        scores += by_distance.own()
    scores = jnp.where(visibility.own_mask()[:, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    summed = product("bhlk,bhke->bhle", weights.astype(value.dtype), value)
    partial = Softmax(summed, top, jnp.sum(weights, axis=-1, keepdims=True))

    def block(
        partial: Softmax, oldest: int | jax.Array, size: int, position_score: jax.Array | None
    ) -> Softmax:
        """Adds `size` slots, of the ages from `oldest` down, to the softmax."""
        older_key, older_value = (part.astype(query.dtype) for part in slots.read(oldest, size))
        scores = product("bhle,bhek->bhlk", query, older_key)
        if position_score is not None:
            scores += position_score
        age = oldest - jnp.arange(size, dtype=jnp.int32)
        unseen = age[None, :] > visibility.valid[:, None]
        scores += jnp.where(unseen, -jnp.inf, 0).astype(wide)[:, None, None, :]
        if visibility.window is not None and _is_cut(oldest, query.shape[2], visibility.window):
            row = jnp.arange(query.shape[2], dtype=jnp.int32)
            scores = jnp.where(
                (row[:, None] + age[None, :] < visibility.window)[None, None], scores, -jnp.inf
            )
        return partial.add(
            scores,
            lambda weights: product("bhlk,bhke->bhle", weights.astype(query.dtype), older_value),
        )

    far, near = _regions(visibility, n_key, None if by_distance is None else by_distance.clamp)
    far_score = by_distance.far() if by_distance is not None and far.n_block else None
    partial = _fold(
        far,
        visibility,
        lambda partial, oldest: block(partial, oldest, far.size, far_score),
        partial,
    )
    if by_distance is not None and near.n_block == 1:
        partial = block(partial, near.size, near.size, by_distance.tile_of_all(near.size))
    elif by_distance is not None and near.n_block:

        def add_near(partial: Softmax, oldest: int | jax.Array) -> Softmax:
            return block(partial, oldest, near.size, by_distance.tile(oldest, near.size))

        partial = _fold(near, visibility, add_near, partial)
    return (partial.summed / partial.total).astype(value.dtype)


class _Region(NamedTuple):
    """Blocks of one kind, oldest first, each with `size` ages from `oldest` down. Static."""

    n_block: int
    size: int
    youngest: int
    n_cut: int  # Blocks at its beginning that are cut by the window or the clamp.

    def oldest(self, index: Any) -> Any:
        """Returns the largest age of a block."""
        return self.youngest + (self.n_block - index) * self.size - 1


def _fold(
    region: _Region,
    visibility: CachedVisibility,
    add: Callable[[Softmax, int | jax.Array], Softmax],
    partial: Softmax,
) -> Softmax:
    """Adds the blocks of a region to the softmax.

    Uncut blocks are added in a loop, which begins where any row has valid slots.
    """
    for index in range(region.n_cut):
        partial = add(partial, region.oldest(index))
    if region.n_cut == region.n_block:
        return partial
    # Blocks with valid slots.
    n_valid = (jnp.max(visibility.valid) - region.youngest + region.size) // region.size
    first = jnp.clip(region.n_block - n_valid, region.n_cut, region.n_block)
    return lax.fori_loop(
        first, region.n_block, lambda index, partial: add(partial, region.oldest(index)), partial
    )


def _regions(
    visibility: CachedVisibility, n_key: int, clamp: int | None
) -> tuple[_Region, _Region]:
    """Returns the blocks beyond the clamp for all queries, and the others.

    Without positions (None) all are beyond.
    """
    n_query, window = visibility.segment_len, visibility.window
    n_age = visibility.capacity if window is None else min(visibility.capacity, window - 1)
    if clamp is None:
        clamp = 0
    n_near = min(n_age, max(clamp - 1, 0)) if clamp < n_age + n_query - 1 else n_age
    near = _region(1, n_near, n_key, visibility, clamp)
    youngest_far = 1 + near.n_block * near.size
    return _region(youngest_far, n_age - youngest_far + 1, n_key, visibility, None), near


def _region(
    youngest: int, n_age: int, n_key: int, visibility: CachedVisibility, clamp: int | None
) -> _Region:
    """Returns blocks of about `n_key` keys for the ages from `youngest` up.

    If `clamp` is None, the clamp does not cut the blocks.
    """
    if n_age <= 0:
        return _Region(0, 0, youngest, 0)
    n_block = max(1, round(n_age / n_key))
    size = n_age
    if n_block > 1:
        size = -(-n_age // n_block)
        # One block has these ages only, as `tile_of_all` needs it.
        size = min(-(-size // _REGISTER) * _REGISTER, n_age)
        n_block = -(-n_age // size)
    whole = _Region(n_block, size, youngest, 0)

    n_query, n_cut = visibility.segment_len, 0
    for oldest in map(whole.oldest, range(n_block)):
        n_cut += (clamp is not None and oldest + n_query - 1 > clamp) or _is_cut(
            oldest, n_query, visibility.window
        )
    return whole._replace(n_cut=n_cut)


def _is_cut(oldest: int | jax.Array, n_query: int, window: int | None) -> bool:
    """Returns whether a window hides pairs of a block. A loop's blocks are whole."""
    return window is not None and isinstance(oldest, int) and oldest + n_query - 1 >= window


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Position scores of a group of heads, by distance."""

    query: jax.Array  # [B, H, L, E]
    key: Any  # [H, E, P], or None.
    score: Any  # [H, P], or None.

    @property
    def clamp(self) -> int:
        """P - 1, the largest distance that has its own scores."""
        return (self.score if self.key is None else self.key).shape[-1] - 1

    def tile(self, oldest: int | jax.Array, n_key: int) -> jax.Array:
        """Computes the scores of the ages from `oldest` down: [B or 1, H, L, n]."""
        n_query = self.query.shape[2]
        largest, n_column = oldest + n_query - 1, n_key + n_query - 1
        return skew(self._scores(lambda table: _columns(table, largest, n_column)), n_key)

    def own(self) -> jax.Array:
        """Computes the scores of the segment's own keys: [B or 1, H, L, L].

        Future keys get leftovers.
        """
        n_query = self.query.shape[2]
        return relative_shift(self._scores(lambda table: _columns(table, n_query - 1, n_query)))

    def far(self) -> jax.Array:
        """Computes the scores of all distances from the clamp on: [B or 1, H, L, 1]."""
        return self._scores(lambda table: table[..., :1])

    def tile_of_all(self, oldest: int) -> jax.Array:
        """Computes the scores of the ages from `oldest` down to 1: [B or 1, H, L, n].

        The method requires `oldest` to be at most P - 1.

        It multiplies with all position keys and shifts the product: rows of P columns read as rows
        of P - 1, from P - 1
        - n on. What a query has beyond the clamp falls into the row before, and is replaced, so
          that no position key is copied.
        """
        scores = self._scores(lambda table: table)
        *lead, n_query, n_position = scores.shape
        first = self.clamp - oldest
        if first + 1 >= n_query:  # No query reaches beyond the clamp.
            return skew(scores[..., first + 1 - n_query : -1], oldest)
        line = scores.reshape(*lead, n_query * n_position)[
            ..., first : first + n_query * (n_position - 1)
        ]
        shifted = line.reshape(*lead, n_query, n_position - 1)[..., :oldest]
        distance = jnp.arange(n_query)[:, None] + (oldest - jnp.arange(oldest))[None, :]
        return jnp.where((distance > self.clamp)[None, None], scores[..., :1], shifted)

    def _scores(self, select: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Computes the scores of a selection of distances, [B, H, L, W].

        The result is [1, H, L, W] without keys.
        """
        key, score = (None if table is None else select(table) for table in (self.key, self.score))
        return position_scores(self.query, key, score, equation="hne,hep->hnp")


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A group of rows and heads of a ring."""

    key: jax.Array  # [B, H, E, R]
    value: jax.Array  # [B, H, R, E]
    start: tuple[int | jax.Array, int | jax.Array]  # The first row and head.
    size: tuple[int, int]  # Rows and heads.
    write_index: jax.Array  # The oldest slot.

    def read(self, oldest: int | jax.Array, n_key: int) -> tuple[jax.Array, jax.Array]:
        """Returns keys [b, h, E, n] and values [b, h, n, E] of the ages from `oldest` down."""
        capacity = self.key.shape[3]
        slot = (self.write_index - oldest) % capacity

        def at(slot: int | jax.Array) -> tuple[jax.Array, jax.Array]:
            row, head, none, slot = (
                jnp.asarray(index, jnp.int32) for index in (*self.start, 0, slot)
            )
            key = lax.dynamic_slice(
                self.key, (row, head, none, slot), (*self.size, self.key.shape[2], n_key)
            )
            value = lax.dynamic_slice(
                self.value, (row, head, slot, none), (*self.size, n_key, self.value.shape[3])
            )
            return key, value

        def over_the_end() -> tuple[jax.Array, jax.Array]:
            (key, value), (key_on, value_on), shift = (
                at(capacity - n_key),
                at(0),
                slot - (capacity - n_key),
            )
            # Keys lie along their last axis: without the barrier XLA would test every number for
            # where it comes from.
            key = lax.optimization_barrier(jnp.concatenate([key, key_on], axis=3))
            value = jnp.concatenate([value, value_on], axis=2)
            key = lax.dynamic_slice_in_dim(key, shift, n_key, axis=3)
            return key, lax.dynamic_slice_in_dim(value, shift, n_key, axis=2)

        return lax.cond(slot > capacity - n_key, over_the_end, lambda: at(slot))


def _columns(table: jax.Array, largest: int | jax.Array, n_column: int) -> jax.Array:
    """Returns the columns of `n_column` distances from `largest` down: [..., P] -> [..., W].

    Those above the clamp, P - 1, are its own; only an `int` may be above it.
    """
    clamp = table.shape[-1] - 1
    if not isinstance(largest, int):
        return lax.dynamic_slice_in_dim(table, clamp - largest, n_column, axis=-1)
    n_beyond = min(max(largest - clamp, 0), n_column)
    first = clamp - largest + n_beyond
    inside = table[..., first : first + n_column - n_beyond]
    if not n_beyond:
        return inside
    beyond = jnp.broadcast_to(table[..., :1], (*table.shape[:-1], n_beyond))
    return jnp.concatenate([beyond, inside], axis=-1)
