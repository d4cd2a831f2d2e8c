"""The table of position scores by distance of a chunk of rows, and the gradient of the position keys.

The table has one score per query and distance, in 16 bits. Kernels read it where query i meets key j, at the column
p = L - 1 - i + j, which from one query to the next begins one column earlier. Addresses that are multiples of two
bytes only would be read element by element. So queries lie in G phases (i modulo G), each with its columns moved by as
many, and the first address of any query is a multiple of G. With G = 2, L = 4, K = 6, the columns of keys 0, .., 5
(`.`: unused; `-`: distances without a key):

    phase 0   query 0   . - - - 0 1 2 3 4 5        phase 1   query 1   . . - - 0 1 2 3 4 5
              query 2   . - 0 1 2 3 4 5                      query 3   . . 0 1 2 3 4 5

The first queries of a segment see fewer keys than the last, and none uses all distances. So the queries are divided
into two bands, each with a table of the distances that it uses. Of a band of queries from f to f + L' these are the P'
from column L - f - L' on; within it, it is a segment of L' queries behind a memory of M + f.

A row holds the keys up to the end of the last tile, if need be beyond its own columns, in the next row's: kernels may
read there and must not use what they get.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.gpu.padding import ALIGNMENT, pad, round_up
from txl_jax.ops.attention.problem import Tile


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place in the table of a band of the position score of a pair.

    Attributes:
      first_query: of the segment.
      count: queries, L'.
      n_positions: distances, P'.
      skipped: distances of the segment in front of the first.
      n_keys: keys, rounded up to whole tiles.
      phases: G, a power of two.
    """

    first_query: int
    count: int
    n_positions: int
    skipped: int
    n_keys: int
    phases: int = 2

    @property
    def end(self) -> int:
        """The query behind the last."""
        return self.first_query + self.count

    @property
    def queries_per_phase(self) -> int:
        """Queries of one phase; the last may be padding."""
        return -(-self.count // self.phases)

    @property
    def n_queries(self) -> int:
        """Queries with padding."""
        return self.queries_per_phase * self.phases

    @property
    def lead(self) -> int:
        """Columns of phase 0 in front of the first distance."""
        return (1 - self.count) % self.phases

    @property
    def pitch(self) -> int:
        """Columns of a row: the distances, but at least what the last query reads."""
        return round_up(self.lead + self.phases - 1 + max(self.n_positions, self.n_keys), ALIGNMENT)

    def n_elements(self, batch: int) -> int:
        """Returns the elements of the table of one head."""
        return batch * self.n_queries * self.pitch

    def first_column(self, query: jax.Array) -> jax.Array:
        """Returns the column of key 0 in the row of a query, a multiple of G."""
        return self.count - 1 + self.lead - ((query - self.first_query) & -self.phases)

    def row_index(self, batch: int | jax.Array, row: jax.Array, query: jax.Array) -> jax.Array:
        """Returns where a query's row begins in the table of one head, for a row of the chunk and its B rows."""
        return self._phase_index(batch, row, query) + self._number_in_phase(query) * self.pitch

    def first_index(self, batch: int | jax.Array, row: jax.Array, query: jax.Array) -> jax.Array:
        """Returns the place of a query's key 0 in the table of one head: `row_index` + `first_column`.

        Written so that a compiler sees a multiple of G.
        """
        in_phase = self._number_in_phase(query) * (self.pitch - self.phases)
        return self._phase_index(batch, row, query) + in_phase + (self.count - 1 + self.lead)

    def _number_in_phase(self, query: jax.Array) -> jax.Array:
        return (query - self.first_query) >> int(math.log2(self.phases))

    def _phase_index(self, batch: int | jax.Array, row: jax.Array, query: jax.Array) -> jax.Array:
        phase = (query - self.first_query) & (self.phases - 1)
        return (phase * batch + row) * (self.queries_per_phase * self.pitch)


def make_bands(*, segment_len: int, n_keys: int, causal: bool, tile: Tile) -> tuple[Layout, ...]:
    """Returns the bands of a segment's queries, one or two, each but the last of whole tiles.

    Args:
      segment_len: L.
      n_keys: K.
      causal: whether keys behind the query are hidden.
      tile: queries and keys of a tile.
    """
    half = round_up(-(-segment_len // 2), tile.query)
    firsts = [0, half] if half < segment_len else [0]
    bands = []
    for first, end in zip(firsts, [*firsts[1:], segment_len], strict=True):
        count = end - first
        seen = n_keys - segment_len + end if causal else n_keys
        n_positions = seen if causal else n_keys + count - 1
        bands.append(Layout(first, count, n_positions, segment_len - end, round_up(seen, tile.key)))
    return tuple(bands)


def position_rows(position_key: jax.Array, score: jax.Array | None, layout: Layout) -> jax.Array:
    """Returns position keys by phase and column, [H, G, pitch, E + 1 rounded up]; linear in the arguments.

    Args:
      position_key: [H, P, E]; E is 0 for a score alone.
      score: [H, P], as a further column, or None.
      layout: of a band.
    """
    rows = position_key if score is None else jnp.concatenate([position_key, score[:, :, None]], axis=-1)
    rows = rows[:, layout.skipped : layout.skipped + layout.n_positions]
    rows = pad(rows, 2, 0, _width(position_key.shape[2], score is not None) - rows.shape[2])
    before = [layout.lead + phase for phase in range(layout.phases)]
    moved = [pad(rows, 1, front, layout.pitch - front - layout.n_positions) for front in before]
    return jnp.stack(moved, axis=1)


def position_queries(query: jax.Array, bias: jax.Array | None, layout: Layout, *, has_score: bool) -> jax.Array:
    """Returns what meets `position_rows`: [H, G, B * L' / G, E + 1 rounded up].

    Args:
      query: [B, H, L, E]; E is 0 for a score alone.
      bias: [H, E], v, or None.
      layout: of a band.
      has_score: whether there is a score per distance: a column of ones meets it.
    """
    query = query[:, :, layout.first_query : layout.end]
    batch, n_head, count, width = query.shape
    if bias is not None:
        query = query + bias[None, :, None, :]
    if has_score:
        query = jnp.concatenate([query, jnp.ones((batch, n_head, count, 1), query.dtype)], axis=-1)
    query = pad(query, 3, 0, _width(width, has_score) - query.shape[3])
    query = pad(query, 2, 0, layout.n_queries - count)
    split = query.reshape(batch, n_head, layout.queries_per_phase, layout.phases, -1)
    return split.transpose(1, 3, 0, 2, 4).reshape(n_head, layout.phases, batch * layout.queries_per_phase, -1)


def multiply_transposed(gradient: jax.Array, queries: jax.Array, pitch: int) -> jax.Array:
    """Returns the gradient of `position_rows`, in float32, from that of a table [H, G * n * pitch] and its queries."""
    gradient = gradient.reshape(*queries.shape[:3], pitch)
    return jnp.einsum(
        "hgnp,hgne->hgpe", gradient, queries, precision=precision(gradient.dtype), preferred_element_type=jnp.float32
    )


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Returns the precision of products: float32 as it is (the default would be TF32), 16 bits in one pass."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def table_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the table's type: float16 for 16 bits, as bfloat16 would round scores to 0.4 %."""
    return jnp.dtype(jnp.float16 if dtype.itemsize == 2 else dtype)


def _width(width: int, has_score: bool) -> int:
    return round_up(width + has_score, ALIGNMENT)
