"""The parts of the scores of one head: strips of queries, each with the blocks of keys that it may see."""

import dataclasses
from typing import Any

from txl_jax.ops.attention.problem import Tile


@dataclasses.dataclass(frozen=True)
class Strip:
    """Neighbouring queries, and the keys that some of them may see.

    Attributes:
      first: the first query.
      n_query: n, their number.
      begin: the first key.
      end: behind the last key.
      n_key: m, keys of a block. The last block starts early enough to be whole, and hides what it repeats.
      width: columns of scores by distance that `skew` needs of a block.
    """

    first: int
    n_query: int
    begin: int
    end: int
    n_key: int
    width: int

    @property
    def n_blocks(self) -> int:
        """Returns the number of blocks."""
        return -(-(self.end - self.begin) // self.n_key)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The strips of a segment with memory; static.

    Attributes:
      segment_len: L.
      mem_len: M.
      window: keys that a query sees at most, on each side; None: no limit.
      causal: whether keys behind the query are hidden.
      tile: most queries of a strip and keys of a block.
    """

    segment_len: int
    mem_len: int
    window: int | None
    causal: bool
    tile: Tile

    @property
    def n_keys(self) -> int:
        """Returns K."""
        return self.mem_len + self.segment_len

    def strips(self) -> list[Strip]:
        """Returns the strips, of nearly equal height."""
        height = _even(self.segment_len, self.tile.query)
        return [
            self._strip(first, min(height, self.segment_len - first)) for first in range(0, self.segment_len, height)
        ]

    def _strip(self, first: int, n_query: int) -> Strip:
        begin, end = 0, self.n_keys
        if self.causal:
            end = self.mem_len + first + n_query
        if self.window is not None:
            begin = max(0, self.mem_len + first - self.window + 1)
            end = min(end, self.mem_len + first + n_query - 1 + self.window)
        n_key = _even(end - begin, self.tile.key)
        width = n_query + n_key - 1
        if self.causal and n_key == end - begin and n_query > 1:
            # Distances below 0 are hidden: `skew` may read anything there, if only each row is one column longer.
            width = n_key + 1
        return Strip(first, n_query, begin, end, n_key, width)

    def column(self, strip: Strip, key: Any) -> Any:
        """Returns the column of the position keys at which a block begins whose first key this is."""
        return self.segment_len - strip.n_query - strip.first + key

    def n_columns(self, n_positions: int) -> int:
        """Returns the number of position keys that the blocks read, P and zeros behind."""
        return max([n_positions, *(int(self.column(s, s.end - s.n_key)) + s.width for s in self.strips())])


def _even(length: int, most: int) -> int:
    """Returns the least size that cuts a length into as few pieces as `most` does."""
    n_pieces = -(-length // most)
    return -(-length // n_pieces)
