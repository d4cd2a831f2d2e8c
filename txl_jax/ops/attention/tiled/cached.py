"""Attention over a KV cache, tile by tile.

The definition is `ops.attention.reference.cached_attention`; tests/ops/attention/test_cached.py
compares with it wherever the ring begins.

The ring is read by age, oldest first, in blocks of slots. Where a block begins in the ring depends
on the write index, and everything else about it is static. So it is known at compile time which
blocks a window or the clamp cuts. These are unrolled, with the code that only they need. The others
run in loops without it:

    ages    A ......................... C ................ 1 | segment
    blocks  [window][far][far] .. [far][clamp][near] .. [near] [own]

A far block is beyond the clamp for every query, and its position score is one number per query.
Near blocks multiply with the position keys of their own distances, and shift the product on the
tile (`skew`). Softmax is online: the largest score so far, the sum and the weighted values are
rescaled after each block (Milakov and Gimelshein, 2018).

Loops are not slower on a CPU. If they were unrolled, XLA would first compute everything that does
not depend on earlier blocks (slices of the ring of all layers), in tens of megabytes of temporary
memory. A program of four layers of enwik8_12l spent a third of its time on touching this memory for
the first time.

Letters as in `txl_jax.ops.attention`, and: A the oldest age, C the clamp, b rows and h heads of a
group, n keys of a block, W distances.
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
from txl_jax.ops.attention.tiled.training import OnlineSoftmax, largest_divisor
from txl_jax.ops.matmul import product, wide_type

# float32 numbers of the widest register of a CPU. If a region has more than one block, the size of
# its blocks is a multiple of it.
_REGISTER = 16


def tiled_cached_attention(
    operands: CachedOperands, visibility: CachedVisibility, *, tile: Tile
) -> jax.Array:
    """Computes weighted sums of the values, without gradients: [B, H, L, E].

    `tile` is about how many rows of scores (over all heads and rows of the batch) and keys a block
    has.
    """
    # The last block may wrap around the ring and read slots again, at ages above R.
    valid = jnp.minimum(visibility.valid, visibility.capacity)
    visibility = dataclasses.replace(visibility, valid=valid)

    ring_key, ring_value = operands.ring
    batch, n_head, n_query, _ = operands.query.shape
    group_rows, group_heads = _group_sizes(batch, n_head, n_query, tile.query)
    # A single group needs no loop.
    if (group_rows, group_heads) == (batch, n_head):
        slots = _RingPart(ring_key, ring_value, (0, 0), (batch, n_head), visibility.write_index)
        return _attend(operands, slots, visibility, tile.key)

    groups_per_batch = batch // group_rows

    def step(index: jax.Array, attended: jax.Array) -> jax.Array:
        row = index % groups_per_batch * group_rows
        head = index // groups_per_batch * group_heads

        def part(array: jax.Array) -> jax.Array:
            # Tables of heads have no rows.
            if array.ndim < 4:
                return lax.dynamic_slice_in_dim(array, head, group_heads, axis=0)
            sizes = (group_rows, group_heads, *array.shape[2:])
            return lax.dynamic_slice(array, (row, head, 0, 0), sizes)

        # The ring is not cut here. Its blocks are read where they are needed.
        group_operands = jax.tree.map(part, operands._replace(ring=(None, None)))
        slots = _RingPart(
            ring_key, ring_value, (row, head), (group_rows, group_heads), visibility.write_index
        )
        valid = lax.dynamic_slice_in_dim(visibility.valid, row, group_rows)
        group_visibility = dataclasses.replace(visibility, valid=valid)
        group_attended = _attend(group_operands, slots, group_visibility, tile.key)
        return lax.dynamic_update_slice(attended, group_attended, (row, head, 0, 0))

    n_group = groups_per_batch * (n_head // group_heads)
    return lax.fori_loop(0, n_group, step, jnp.zeros_like(operands.value))


def _group_sizes(batch: int, n_head: int, n_query: int, max_queries: int) -> tuple[int, int]:
    """Returns how many rows of the batch and how many heads are in a group.

    They are divisors of `batch` and `n_head`. A group has at most `max_queries` queries, summed
    over its rows and heads, but at least one head of one row. A group of multiple rows has all
    heads.
    """
    group_heads = largest_divisor(n_head, max_queries // n_query)
    if group_heads < n_head:
        return 1, group_heads
    return largest_divisor(batch, max_queries // (n_head * n_query)), n_head


def _attend(
    operands: CachedOperands, slots: "_RingPart", visibility: CachedVisibility, n_key: int
) -> jax.Array:
    """Computes the attention of a group of rows and heads, [b, h, L, E].

    Blocks have about `n_key` keys each.
    """
    positions = None
    if operands.position is not None:
        position_query, position_key, position_score = operands.position
        positions = _DistanceScores(position_query, position_key, position_score)
    attention = _GroupAttention(
        query=operands.query,
        key=operands.key,
        value=operands.value,
        positions=positions,
        slots=slots,
        visibility=visibility,
    )
    softmax = attention.own()

    # Without positions all blocks are far.
    clamp = None if positions is None else positions.clamp
    far, near = _regions(visibility, n_key, clamp)

    # All far blocks have the same position score.
    far_score = None
    if positions is not None and far.n_block:
        far_score = positions.far()

    def add_far(softmax: OnlineSoftmax, oldest: int | jax.Array) -> OnlineSoftmax:
        return attention.add(softmax, oldest, far.size, far_score)

    softmax = _fold(far, visibility, add_far, softmax)

    # Near blocks have position scores of their own distances. A single block has all of them.
    if positions is not None and near.n_block == 1:
        score = positions.tile_of_all(near.size)
        softmax = attention.add(softmax, near.size, near.size, score)
    elif positions is not None and near.n_block:

        def add_near(softmax: OnlineSoftmax, oldest: int | jax.Array) -> OnlineSoftmax:
            score = positions.tile(oldest, near.size)
            return attention.add(softmax, oldest, near.size, score)

        softmax = _fold(near, visibility, add_near, softmax)
    return (softmax.summed / softmax.total).astype(operands.value.dtype)


@dataclasses.dataclass(frozen=True)
class _GroupAttention:
    """Attention of a group of rows and heads, block by block."""

    query: jax.Array  # [b, h, L, E]
    key: jax.Array  # [b, h, L, E], of the segment.
    value: jax.Array  # [b, h, L, E], of the segment.
    positions: "_DistanceScores | None"  # None without positions.
    slots: "_RingPart"
    visibility: CachedVisibility  # Of the group's rows.

    def own(self) -> OnlineSoftmax:
        """Returns the softmax over the segment's keys. A query sees at least its own key."""
        scores = product("bhle,bhke->bhlk", self.query, self.key)
        if self.positions is not None:
            scores += self.positions.own()
        scores = jnp.where(self.visibility.own_mask()[:, None], scores, -jnp.inf)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        exp_scores = jnp.exp(scores - highest)
        summed = product("bhlk,bhke->bhle", exp_scores.astype(self.value.dtype), self.value)
        return OnlineSoftmax(summed, highest, jnp.sum(exp_scores, axis=-1, keepdims=True))

    def add(
        self,
        softmax: OnlineSoftmax,
        oldest: int | jax.Array,
        size: int,
        position_score: jax.Array | None,
    ) -> OnlineSoftmax:
        """Adds `size` slots, of the ages from `oldest` down, to the softmax."""
        query = self.query
        key, value = self.slots.read(oldest, size)
        scores = product("bhle,bhek->bhlk", query, key.astype(query.dtype))
        if position_score is not None:
            scores += position_score

        # Empty slots are hidden in their row, and slots beyond the window from a query.
        age = oldest - jnp.arange(size, dtype=jnp.int32)
        is_empty = age[None, :] > self.visibility.valid[:, None]
        hidden = jnp.where(is_empty, -jnp.inf, 0).astype(wide_type(query))
        scores += hidden[:, None, None, :]
        n_query = query.shape[2]
        window = self.visibility.window
        if window is not None and _is_cut(oldest, n_query, window):
            row = jnp.arange(n_query, dtype=jnp.int32)
            is_near = row[:, None] + age[None, :] < window
            scores = jnp.where(is_near[None, None], scores, -jnp.inf)

        highest = softmax.highest_with(scores)
        exp_scores = jnp.exp(scores - highest)
        summed = product(
            "bhlk,bhke->bhle", exp_scores.astype(query.dtype), value.astype(query.dtype)
        )
        return softmax.add(highest, exp_scores, summed)


class _Region(NamedTuple):
    """Blocks of one kind, oldest first, each with `size` ages from `oldest` down. Static."""

    n_block: int  # Number of blocks, or 0 without blocks of this kind.
    size: int  # Slots of a block.
    youngest: int  # The smallest age.
    n_cut: int  # Blocks at its beginning that are cut by the window or the clamp.

    def oldest(self, index: Any) -> Any:
        """Returns the largest age of a block."""
        return self.youngest + (self.n_block - index) * self.size - 1


def _fold(
    region: _Region,
    visibility: CachedVisibility,
    add: Callable[[OnlineSoftmax, int | jax.Array], OnlineSoftmax],
    softmax: OnlineSoftmax,
) -> OnlineSoftmax:
    """Adds the blocks of a region to the softmax.

    Blocks that are cut are written out. The others are added in a loop, which begins where any row
    has valid slots.
    """
    for index in range(region.n_cut):
        softmax = add(softmax, region.oldest(index))
    if region.n_cut == region.n_block:
        return softmax

    def add_block(index: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        return add(softmax, region.oldest(index))

    # Blocks with valid slots.
    n_valid = (jnp.max(visibility.valid) - region.youngest + region.size) // region.size
    first = jnp.clip(region.n_block - n_valid, region.n_cut, region.n_block)
    return lax.fori_loop(first, region.n_block, add_block, softmax)


def _regions(
    visibility: CachedVisibility, n_key: int, clamp: int | None
) -> tuple[_Region, _Region]:
    """Returns the blocks beyond the clamp for all queries, and the others.

    Without positions the clamp is None, and all blocks are beyond it.
    """
    n_query = visibility.segment_len
    n_age = visibility.capacity
    if visibility.window is not None:
        n_age = min(n_age, visibility.window - 1)
    if clamp is None:
        clamp = 0

    # If the oldest slot is beyond the clamp for the last query, ages from the clamp on are far.
    n_near = n_age
    if clamp < n_age + n_query - 1:
        n_near = min(n_age, max(clamp - 1, 0))
    near = _region(1, n_near, n_key, visibility, clamp)
    youngest_far = 1 + near.n_block * near.size
    far = _region(youngest_far, n_age - youngest_far + 1, n_key, visibility, None)
    return far, near


def _region(
    youngest: int, n_age: int, n_key: int, visibility: CachedVisibility, clamp: int | None
) -> _Region:
    """Returns blocks of about `n_key` keys for `n_age` ages from `youngest` up.

    If `clamp` is None, the clamp does not cut the blocks.
    """
    if n_age <= 0:
        return _Region(n_block=0, size=0, youngest=youngest, n_cut=0)

    # A single block has exactly these ages, as `tile_of_all` requires.
    n_block = max(1, round(n_age / n_key))
    size = n_age
    if n_block > 1:
        size = -(-n_age // n_block)
        size = min(-(-size // _REGISTER) * _REGISTER, n_age)
        n_block = -(-n_age // size)
    region = _Region(n_block, size, youngest, n_cut=0)

    # The oldest blocks are cut, if any are.
    n_query = visibility.segment_len
    n_cut = 0
    for index in range(n_block):
        oldest = region.oldest(index)
        is_clamped = clamp is not None and oldest + n_query - 1 > clamp
        if is_clamped or _is_cut(oldest, n_query, visibility.window):
            n_cut += 1
    return region._replace(n_cut=n_cut)


def _is_cut(oldest: int | jax.Array, n_query: int, window: int | None) -> bool:
    """Returns whether a window hides pairs of a block.

    It does not if the age is an array, because a loop has whole blocks only.
    """
    return window is not None and isinstance(oldest, int) and oldest + n_query - 1 >= window


@dataclasses.dataclass(frozen=True)
class _DistanceScores:
    """Position scores of a group of heads, by distance."""

    query: jax.Array  # [b, h, L, E]
    key: Any  # [h, E, P], or None.
    score: Any  # [h, P], or None.

    @property
    def clamp(self) -> int:
        """Returns P - 1, the largest distance that has its own scores."""
        table = self.score if self.key is None else self.key
        return table.shape[-1] - 1

    def tile(self, oldest: int | jax.Array, n_key: int) -> jax.Array:
        """Computes the scores of the ages from `oldest` down: [b or 1, h, L, n]."""
        n_query = self.query.shape[2]
        largest = oldest + n_query - 1
        n_column = n_key + n_query - 1
        scores = self._scores(lambda table: _columns(table, largest, n_column))
        return skew(scores, n_key)

    def own(self) -> jax.Array:
        """Computes the scores of the segment's own keys: [b or 1, h, L, L].

        Pairs whose key is after the query get scores of other pairs.
        """
        n_query = self.query.shape[2]
        return relative_shift(self._scores(lambda table: _columns(table, n_query - 1, n_query)))

    def far(self) -> jax.Array:
        """Computes the scores of all distances from the clamp on: [b or 1, h, L, 1]."""
        return self._scores(lambda table: table[..., :1])

    def tile_of_all(self, oldest: int) -> jax.Array:
        """Computes the scores of the ages from `oldest` down to 1: [b or 1, h, L, n].

        `oldest` must be at most P - 1.

        The method multiplies with all position keys, so that none is copied, and shifts the
        product. Rows of P columns are read as rows of P - 1, from column P - 1 - n on. Scores that
        a query needs from beyond the clamp are then read from the row before, and replaced.
        """
        scores = self._scores(lambda table: table)
        *lead, n_query, n_position = scores.shape
        first = self.clamp - oldest
        if first + 1 >= n_query:
            # No query reaches beyond the clamp.
            return skew(scores[..., first + 1 - n_query : -1], oldest)

        line = scores.reshape(*lead, n_query * n_position)
        line = line[..., first : first + n_query * (n_position - 1)]
        shifted = line.reshape(*lead, n_query, n_position - 1)[..., :oldest]

        age = oldest - jnp.arange(oldest)
        distance = jnp.arange(n_query)[:, None] + age[None, :]
        return jnp.where((distance > self.clamp)[None, None], scores[..., :1], shifted)

    def _scores(self, select: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Computes the scores of the distances that `select` cuts out of a table [.., P].

        Returns:
          Scores [b, h, L, W], or [1, h, L, W] without keys.
        """
        key = None if self.key is None else select(self.key)
        score = None if self.score is None else select(self.score)
        return position_scores(self.query, key, score, equation="hne,hep->hnp")


@dataclasses.dataclass(frozen=True)
class _RingPart:
    """A group of rows and heads of a ring."""

    key: jax.Array  # [B, H, E, R]
    value: jax.Array  # [B, H, R, E]
    start: tuple[int | jax.Array, int | jax.Array]  # The first row and head.
    size: tuple[int, int]  # b rows and h heads.
    write_index: jax.Array  # The oldest slot.

    def read(self, oldest: int | jax.Array, n_key: int) -> tuple[jax.Array, jax.Array]:
        """Returns keys [b, h, E, n] and values [b, h, n, E] of the ages from `oldest` down."""
        capacity = self.key.shape[3]
        slot = (self.write_index - oldest) % capacity
        last = capacity - n_key

        def over_the_end() -> tuple[jax.Array, jax.Array]:
            key, value = self._read_slots(last, n_key)
            first_key, first_value = self._read_slots(0, n_key)
            # Keys are along their last axis: without the barrier XLA would test every number for
            # where it comes from.
            key = lax.optimization_barrier(jnp.concatenate([key, first_key], axis=3))
            value = jnp.concatenate([value, first_value], axis=2)
            key = lax.dynamic_slice_in_dim(key, slot - last, n_key, axis=3)
            return key, lax.dynamic_slice_in_dim(value, slot - last, n_key, axis=2)

        return lax.cond(slot > last, over_the_end, lambda: self._read_slots(slot, n_key))

    def _read_slots(self, slot: int | jax.Array, n_key: int) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of `n_key` slots from `slot` on, as `read` does."""
        first_row, first_head = self.start
        # An index has one dtype.
        row = jnp.asarray(first_row, jnp.int32)
        head = jnp.asarray(first_head, jnp.int32)
        zero = jnp.asarray(0, jnp.int32)
        slot = jnp.asarray(slot, jnp.int32)
        width = self.key.shape[2]
        key = lax.dynamic_slice(self.key, (row, head, zero, slot), (*self.size, width, n_key))
        value = lax.dynamic_slice(self.value, (row, head, slot, zero), (*self.size, n_key, width))
        return key, value


def _columns(table: jax.Array, largest: int | jax.Array, n_column: int) -> jax.Array:
    """Returns the columns of `n_column` distances from `largest` down: [..., P] -> [..., W].

    Distances above the clamp, P - 1, have its column. Only an `int` may be above it.
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
