"""Sizes of one call of the training kernels, and which tiles, pairs and position keys belong together.

Query i meets key j at distance M + i - j, column p = L - 1 - i + j of the position keys. Queries are padded behind to
whole tiles, keys too, and position keys in front by as many rows as queries behind, which keeps this rule.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.scores import strip_rows
from txl_jax.ops.attention.tpu.skew import LANES, Way

_QUERY_STEP = 16  # Rows of a vector register of bfloat16.
_NO_KEY = 2**30


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of one call, all static.

    Attributes:
      batch: B.
      n_head: H.
      segment_len: L.
      n_keys: K.
      width: E, with what carries scores per distance.
      scale: 1 / sqrt(E).
      n_positions: P; 0: no position keys.
      tile: queries and keys of a tile; multiples of 16 and 128.
      causal: whether keys behind the query are hidden.
      window: distances that a query sees; None: all.
      way: of `skew`.
      n_drawn_head: heads of all devices, by which dropout counts; None: no dropout.
      interpret: whether the kernels run interpreted, on any device.
    """

    batch: int
    n_head: int
    segment_len: int
    n_keys: int
    width: int
    scale: float
    n_positions: int
    tile: Tile
    causal: bool
    window: int | None
    way: Way
    n_drawn_head: int | None
    interpret: bool

    @property
    def mem_len(self) -> int:
        """M."""
        return self.n_keys - self.segment_len

    @property
    def n_query_tile(self) -> int:
        """Tiles of queries."""
        return -(-self.segment_len // self.tile.query)

    @property
    def n_key_tile(self) -> int:
        """Tiles of keys."""
        return -(-self.n_keys // self.tile.key)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Steps of the kernels: head, row, tile of queries, tile of keys.

        Heads come first, so that a head's position keys are fetched once and their gradient adds up over all rows.
        """
        return self.n_head, self.batch, self.n_query_tile, self.n_key_tile

    @property
    def padded_queries(self) -> int:
        """Rows of the padded queries."""
        return self.n_query_tile * self.tile.query

    @property
    def padded_keys(self) -> int:
        """Rows of the padded keys."""
        return self.n_key_tile * self.tile.key

    @property
    def position_padding(self) -> tuple[int, int]:
        """Rows in front of the position keys and behind; the last strip reads up to 128 more than there are."""
        before = self.padded_queries - self.segment_len
        return before, self.padded_queries + self.padded_keys + LANES - before - self.n_positions

    @property
    def n_position_rows(self) -> int:
        """Rows of the padded position keys."""
        return self.padded_queries + self.padded_keys + LANES

    @property
    def position_step(self) -> int:
        """A divisor of every row of the position keys at which a strip begins."""
        return math.gcd(strip_rows(self.tile.query), self.tile.key)

    def first_position(self, query_tile: jax.Array, key_tile: jax.Array) -> jax.Array:
        """Returns the row of the padded position keys for a tile's last query and first key."""
        return self.padded_queries - (query_tile + 1) * self.tile.query + key_tile * self.tile.key

    def key_tiles(self, query_tile: jax.Array, start: jax.Array, stop: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first tile of keys that some query of a tile sees, and the last: an empty range if none does.

        Args:
          query_tile: number of the tile of queries.
          start: first key that the row's queries may see.
          stop: end of these keys.
        """
        start, stop = self._key_range(query_tile, start, stop, jnp.minimum, jnp.maximum)
        size = jnp.int32(self.tile.key)
        return lax.div(start, size), jnp.where(stop > start, lax.div(stop - 1, size), -1)

    def _key_range(
        self, query_tile: Any, start: Any, stop: Any, minimum: Callable[..., Any], maximum: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """Returns the first key that some query of a tile sees, and the end, by integers or traced numbers."""
        first = self.mem_len + query_tile * self.tile.query  # The key at distance 0 from the first query.
        last = self.mem_len + minimum((query_tile + 1) * self.tile.query, self.segment_len) - 1
        if self.window is not None:
            start = maximum(start, first - self.window + 1)
            stop = stop if self.causal else minimum(stop, last + self.window)
        return start, minimum(stop, last + 1) if self.causal else stop

    def visible(self, query_tile: jax.Array, key_tile: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        """Returns the visible pairs of a tile: bool [n, m], or [1, m] if all its queries see the same.

        What holds for a key alone goes into its number, [1, m], so that a pair costs one comparison.
        """
        key = key_tile * self.tile.key + lax.broadcasted_iota(jnp.int32, (1, self.tile.key), 1)
        key = jnp.where((key >= start) & (key < stop), key, _NO_KEY)
        rows = lax.broadcasted_iota(jnp.int32, (self.tile.query, 1), 0)
        own = self.mem_len + query_tile * self.tile.query + rows  # The key at distance 0.
        if self.causal:
            pairs = key <= own
        elif self.window is not None:
            pairs = key < own + self.window
        else:
            return key < _NO_KEY
        return pairs if self.window is None else pairs & (key > own - self.window)

    @functools.cached_property
    def n_tile(self) -> int:
        """Tiles of a row and head with visible pairs, if its memory is full; as `key_tiles`, in Python's integers.

        An array's value cannot be asked for here: where a mesh of devices that are not at hand is the ambient one, jax
        would compute it on those.
        """
        count = 0
        for query_tile in range(self.n_query_tile):
            start, stop = self._key_range(query_tile, 0, self.n_keys, min, max)
            count += (stop - 1) // self.tile.key - start // self.tile.key + 1 if stop > start else 0
        return count


def round_tile(tile: Tile, *, segment_len: int, n_keys: int) -> Tile:
    """Returns the tile in steps that the registers have, and no larger than the scores."""
    query = min(tile.query, segment_len)
    key = min(tile.key, n_keys)
    return Tile(-(-query // _QUERY_STEP) * _QUERY_STEP, -(-key // LANES) * LANES)
