"""Arrays that tiled attention over a KV cache reads: blocks of a ring by age, and position scores by distance."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from txl_jax.ops.attention import positions
from txl_jax.ops.attention.cached import CachedVisibility
from txl_jax.ops.attention.tiled.skew import skew

_LANES = 16  # float32 numbers of the widest register of a CPU; several blocks are multiples of it.


class Region(NamedTuple):
    """Blocks of one kind, oldest first; static.

    Block number t has the ages from `youngest + (n_block - t) * size - 1` down, `size` of them.
    """

    n_block: int
    size: int
    youngest: int
    n_cut: int  # Blocks at its beginning that are cut by the window or the clamp.

    def oldest(self, index: int | jax.Array) -> int | jax.Array:
        """Returns the largest age of a block."""
        return self.youngest + (self.n_block - index) * self.size - 1


@dataclasses.dataclass(frozen=True)
class Positions:
    """Position scores of a group of heads, by distance.

    Attributes:
      query: [B, H, L, E].
      key: [H, E, P], or None.
      score: [H, P], or None.
      wide: type of the scores.
    """

    query: jax.Array
    key: jax.Array | None
    score: jax.Array | None
    wide: jnp.dtype

    @property
    def clamp(self) -> int:
        """P - 1, the largest distance that has its own scores."""
        table = self.score if self.key is None else self.key
        assert table is not None  # For mypy.
        return table.shape[-1] - 1

    def tile(self, oldest: int | jax.Array, n_key: int) -> jax.Array:
        """Computes the scores of the ages from `oldest` down: [B or 1, H, L, n]."""
        n_query = self.query.shape[2]
        largest, n_column = oldest + n_query - 1, n_key + n_query - 1
        return skew(self._scores(lambda table: _columns(table, largest, n_column)), n_key)

    def own(self) -> jax.Array:
        """Computes the scores of the segment's own keys: [B or 1, H, L, L]; future keys get leftovers."""
        n_query = self.query.shape[2]
        return positions.relative_shift(self._scores(lambda table: _columns(table, n_query - 1, n_query)))

    def far(self) -> jax.Array:
        """Computes the scores of all distances from the clamp on: [B or 1, H, L, 1]."""
        return self._scores(lambda table: table[..., :1])

    def all(self) -> jax.Array:
        """Computes the scores of all distances: [B or 1, H, L, P]."""
        return self._scores(lambda table: table)

    def tile_of_all(self, scores: jax.Array, oldest: int) -> jax.Array:
        """Shifts the scores of `all` for the block of the ages from `oldest`, P - 1 at most, down to 1: [.., L, n].

        Rows of P columns read as rows of P - 1, from P - 1 - n on. What a query has beyond the clamp falls into the
        row before, and is replaced, so that no position key is copied.
        """
        *lead, n_query, n_position = scores.shape
        first = self.clamp - oldest
        if first + 1 >= n_query:  # No query reaches beyond the clamp.
            return skew(scores[..., first + 1 - n_query : -1], oldest)
        line = scores.reshape(*lead, n_query * n_position)[..., first : first + n_query * (n_position - 1)]
        shifted = line.reshape(*lead, n_query, n_position - 1)[..., :oldest]
        distance = jnp.arange(n_query)[:, None] + (oldest - jnp.arange(oldest))[None, :]
        return jnp.where((distance > self.clamp)[None, None], scores[..., :1], shifted)

    def _scores(self, select: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Computes the scores of a selection of distances: [B, H, L, W]; without keys [1, H, L, W]."""
        batch, n_head, n_query, width = self.query.shape
        score = None if self.score is None else select(self.score).astype(self.wide)[None, :, None, :]
        if self.key is None:
            assert score is not None  # For mypy.
            return jnp.broadcast_to(score, (1, n_head, n_query, score.shape[-1]))
        query_HxBLxE = self.query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)
        products = jnp.einsum("hne,hep->hnp", query_HxBLxE, select(self.key), preferred_element_type=self.wide)
        scores = products.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)
        return scores if score is None else scores + jnp.broadcast_to(score, scores.shape)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A group of rows and heads of a ring.

    Attributes:
      key: [B, H, E, R].
      value: [B, H, R, E].
      start: first row and head.
      size: rows and heads.
      write_index: the oldest slot.
    """

    key: jax.Array
    value: jax.Array
    start: tuple[int | jax.Array, int | jax.Array]
    size: tuple[int, int]
    write_index: jax.Array

    def read(self, oldest: int | jax.Array, n_key: int) -> tuple[jax.Array, jax.Array]:
        """Returns keys [b, h, E, n] and values [b, h, n, E] of the ages from `oldest` down."""
        capacity = self.key.shape[3]
        slot = (self.write_index - oldest) % capacity

        def at(slot: int | jax.Array) -> tuple[jax.Array, jax.Array]:
            row, head, none, slot = (jnp.asarray(index, jnp.int32) for index in (*self.start, 0, slot))
            key = lax.dynamic_slice(self.key, (row, head, none, slot), (*self.size, self.key.shape[2], n_key))
            value = lax.dynamic_slice(self.value, (row, head, slot, none), (*self.size, n_key, self.value.shape[3]))
            return key, value

        def over_the_end() -> tuple[jax.Array, jax.Array]:
            (key, value), (key_on, value_on), shift = at(capacity - n_key), at(0), slot - (capacity - n_key)
            # Keys lie along their last axis: without the barrier XLA would test every number for where it comes from.
            key = lax.optimization_barrier(jnp.concatenate([key, key_on], axis=3))
            value = jnp.concatenate([value, value_on], axis=2)
            return (
                lax.dynamic_slice_in_dim(key, shift, n_key, axis=3),
                lax.dynamic_slice_in_dim(value, shift, n_key, axis=2),
            )

        return lax.cond(slot > capacity - n_key, over_the_end, lambda: at(slot))


def regions(visibility: CachedVisibility, n_key: int, clamp: int | None) -> tuple[Region, Region]:
    """Returns the blocks that lie beyond the clamp for all queries, and the others; `clamp` None: no positions."""
    n_query, window = visibility.segment_len, visibility.window
    n_age = visibility.capacity if window is None else min(visibility.capacity, window - 1)
    if clamp is None:
        clamp = 0
    n_near = min(n_age, max(clamp - 1, 0)) if clamp < n_age + n_query - 1 else n_age
    near = _region(1, n_near, n_key, visibility, clamp)
    youngest_far = 1 + near.n_block * near.size
    return _region(youngest_far, n_age - youngest_far + 1, n_key, visibility, None), near


def _region(youngest: int, n_age: int, n_key: int, visibility: CachedVisibility, clamp: int | None) -> Region:
    """Returns blocks of about `n_key` keys for the ages from `youngest` up; `clamp` None: it does not cut them."""
    if n_age <= 0:
        return Region(0, 0, youngest, 0)
    n_block = max(1, round(n_age / n_key))
    size = n_age
    if n_block > 1:
        size = -(-n_age // n_block)
        size = min(-(-size // _LANES) * _LANES, n_age)  # One block has these ages only, as `tile_of_all` needs it.
        n_block = -(-n_age // size)
    whole = Region(n_block, size, youngest, 0)

    n_query, n_cut = visibility.segment_len, 0
    for oldest in map(whole.oldest, range(n_block)):
        assert isinstance(oldest, int)  # For mypy.
        n_cut += (clamp is not None and oldest + n_query - 1 > clamp) or is_cut(oldest, n_query, visibility.window)
    return whole._replace(n_cut=n_cut)


def is_cut(oldest: int | jax.Array, n_query: int, window: int | None) -> bool:
    """Returns whether a window hides pairs of a block; those of a loop are whole."""
    return window is not None and isinstance(oldest, int) and oldest + n_query - 1 >= window


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
