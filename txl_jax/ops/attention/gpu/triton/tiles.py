"""Tiles of the scores: which there are, which pairs are visible, and the scores themselves.

A program has one tile of queries (or, for the gradients of keys and values, of keys) of one row and head, and goes
over the tiles of keys (queries) that it meets. Tiles in which every pair is visible skip the mask. The scores of a
tile are the product of queries and keys plus the position scores, which `position_table.py` computed; they never leave
the registers. Base 2 throughout: scores are multiplied by log2(e), so that the exponential is one instruction.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from txl_jax.ops.attention import dropout as dropout_lib
from txl_jax.ops.attention.gpu.position_table import Layout, precision
from txl_jax.ops.attention.problem import Tile

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # Where a running maximum begins: finite, so that a query without keys yields no NaN.


@dataclasses.dataclass(frozen=True)
class Call:
    """Static facts of a call.

    Attributes:
      n_head: H.
      segment_len: L.
      n_keys: K.
      scale: 1 / sqrt(E), of the width before padding.
      causal: whether keys behind the query are hidden.
      window: keys that a query sees at most on each side, itself included; None: no limit.
      dropout: whether there is dropout.
      tile: queries and keys of a tile.
      bands: of the queries, with the layouts of position scores and of gradients of scores.
      interpret: whether kernels are interpreted, on any device.
    """

    n_head: int
    segment_len: int
    n_keys: int
    scale: float
    causal: bool
    window: int | None
    dropout: bool
    tile: Tile
    bands: tuple[Layout, ...]
    interpret: bool

    @property
    def mem_len(self) -> int:
        """M."""
        return self.n_keys - self.segment_len


class Inputs(NamedTuple):
    """Arrays of the kernels; b is a row of a chunk of the batch, n = (first row + b) * H + h.

    Attributes:
      query: [B * H, L, E], with E a power of two.
      key: [B * H, K, E].
      value: [B * H, K, E].
      content_bias: [H, E], u, or None.
      table: of each band [H, elements], position scores times scale and log2(e), of the chunk; or None.
      position_key: [H, P * E], or None.
      position_bias: [H, E], v, or None.
      position_score: float32 [H, P], or None.
      first_row: int32 [1], of the chunk.
      start: int32 [B], first visible column of keys.
      stop: int32 [B], end of the visible columns.
      row_head: int32 [B * H], number of row and head in the dropout mask, or None.
      seed: uint32 [2], of dropout, and the bits below which a probability is left out, or None.
      keep_scale: float32 [1], 1 / (1 - rate), or None.
    """

    query: Any
    key: Any
    value: Any
    content_bias: Any
    table: Any
    position_key: Any
    position_bias: Any
    position_score: Any
    first_row: Any
    start: Any
    stop: Any
    row_head: Any
    seed: Any
    keep_scale: Any


class Cotangents(NamedTuple):
    """Further arrays of the backward kernels.

    Attributes:
      output: [B * H, L, E], gradient of the output.
      log_sum: float32 [B * H, L], base 2 logarithm of the sum of the exponentials.
      delta: float32 [B * H, L], sum over E of output and gradient of the output.
    """

    output: Any
    log_sum: Any
    delta: Any


class Tiles(NamedTuple):
    """A range of tiles.

    Attributes:
      first: with a visible pair.
      full: the first of those in which every pair is visible.
      full_end: their end.
      end: of those with a visible pair.
    """

    first: jax.Array
    full: jax.Array
    full_end: jax.Array
    end: jax.Array

    def within(self, first: int, end: int) -> "Tiles":
        """Returns the part of the range that is within another."""
        return Tiles(*(jnp.clip(tile, first, end) for tile in self))


class Place:
    """The place of a program: its row of the chunk, its head, and what holds for all of its pairs.

    Program numbers are read when it is made: the interpreter has no grid within a condition.
    """

    def __init__(self, call: Call, inputs: Inputs, phase: Any = None) -> None:
        self.call, self.inputs = call, inputs
        place = pl.program_id(1)
        self.in_chunk = lax.div(place, jnp.int32(call.n_head))
        self.head = lax.rem(place, jnp.int32(call.n_head))
        self.batch = pl.num_programs(1) // call.n_head
        row = inputs.first_row[0] + self.in_chunk
        self.row_head = row * call.n_head + self.head
        self.place, self.phase = place, phase
        self.start, self.stop = inputs.start[row], inputs.stop[row]

    def key_tiles(self, first_query: jax.Array, n_query: int) -> Tiles:
        """Returns the tiles of keys that a number of queries meets."""
        call, n_key = self.call, self.call.tile.key
        here = call.mem_len + first_query  # The column of the first query itself.
        start = all_start = self.start
        stop = all_stop = self.stop
        if call.causal:
            stop, all_stop = jnp.minimum(stop, here + n_query), jnp.minimum(stop, here + 1)
        if call.window is not None:
            start = jnp.maximum(start, here - call.window + 1)
            all_start = jnp.maximum(all_start, here + n_query - call.window)
            if not call.causal:
                stop = jnp.minimum(stop, here + n_query - 1 + call.window)
                all_stop = jnp.minimum(all_stop, here + call.window)
        all_stop = jnp.where(first_query + n_query <= call.segment_len, all_stop, 0)
        return _tiles(start, stop, all_start, all_stop, n_key)

    def query_tiles(self, first_key: jax.Array) -> Tiles:
        """Returns the tiles of queries that a tile of keys meets."""
        call, (n_query, n_key) = self.call, self.call.tile
        same = first_key - call.mem_len  # The row of the query that is at the first key.
        start = all_start = jnp.int32(0)
        stop = all_stop = jnp.int32(call.segment_len)
        if call.causal:
            start, all_start = jnp.maximum(same, 0), jnp.maximum(same + n_key - 1, 0)
        if call.window is not None:
            stop = jnp.minimum(stop, same + n_key - 1 + call.window)
            all_stop = jnp.minimum(all_stop, same + call.window)
            if not call.causal:
                start = jnp.maximum(start, same - call.window + 1)
                all_start = jnp.maximum(all_start, same + n_key - call.window)
        stop = jnp.where((first_key + n_key > self.start) & (first_key < self.stop), stop, 0)
        all_stop = jnp.where((first_key >= self.start) & (first_key + n_key <= self.stop), all_stop, 0)
        return _tiles(start, stop, all_start, all_stop, n_query)

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the visible pairs of queries [n, 1] and keys [1, m]."""
        call = self.call
        distance = call.mem_len + query - key
        visible = (key >= self.start) & (key < self.stop) & (query < call.segment_len)
        if call.causal:
            visible &= distance >= 0
        if call.window is not None:
            visible &= distance < call.window
            if not call.causal:
                visible &= distance > -call.window
        return visible

    def queries(self, first: jax.Array) -> jax.Array:
        """Returns a tile of queries with u added, [n, E]."""
        rows = load_rows(self.inputs.query, self.row_head, first, self.call.tile.query, self.call.segment_len)
        bias = self.inputs.content_bias
        return rows if bias is None else rows + bias[self.head, :][None, :]

    def keys(self, array: Any, first: jax.Array) -> jax.Array:
        """Returns a tile of keys or values, [m, E]."""
        return load_rows(array, self.row_head, first, self.call.tile.key, self.call.n_keys)

    def scores(
        self, query: jax.Array, key: jax.Array, i: jax.Array, j: jax.Array, visible: Any, *, band: int
    ) -> jax.Array:
        """Returns scores [n, m] of tiles of queries [n, E] of a band and keys [m, E], -inf where hidden."""
        scores = dot(query, key.T) * (self.call.scale * LOG2_E)
        if self.inputs.table is not None:
            layout = self.call.bands[band]
            # Rows behind the last query read what that one reads.
            index = layout.first_index(self.batch, self.in_chunk, jnp.minimum(i, layout.end - 1)) + j
            scores += pltriton.load(self.inputs.table[band].at[self.head, index]).astype(jnp.float32)
        return scores if visible is None else jnp.where(visible, scores, -jnp.inf)

    def columns(self, layout: Layout, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tiles of the table's columns, first and end, of a tile of queries of one phase that begins there.

        Those of all keys that these queries see, and some more.
        """
        n_query, n_key = self.call.tile
        last = jnp.minimum(first + (n_query - 1) * layout.phases, layout.end - 1)
        tiles = self.key_tiles(first, (n_query - 1) * layout.phases + 1)
        end = jnp.minimum(layout.first_column(first) + tiles.end * n_key, layout.pitch)
        start = lax.div(layout.first_column(last) + tiles.first * n_key, jnp.int32(n_key))
        return start, jnp.maximum(start, lax.div(end + (n_key - 1), jnp.int32(n_key)))

    def kept(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns the dropout mask [n, m]."""
        inputs = self.inputs
        number = inputs.row_head[self.row_head]
        return dropout_lib.bits(inputs.seed[0], number, i, j) >= inputs.seed[1]


def _tiles(start: Any, stop: Any, all_start: Any, all_stop: Any, size: int) -> Tiles:
    """Returns the tiles of a range with visible pairs and of one within it with visible pairs only."""
    first, end = lax.div(start, jnp.int32(size)), lax.div(stop + (size - 1), jnp.int32(size))
    end = jnp.maximum(first, end)
    full = jnp.clip(lax.div(all_start + (size - 1), jnp.int32(size)), first, end)
    return Tiles(first, full, jnp.clip(lax.div(all_stop, jnp.int32(size)), full, end), end)


def for_band(program: jax.Array, programs: Sequence[int], run: Callable[[int, jax.Array], None]) -> None:
    """Runs run(band, number in the band) for a program, of which each band has a number."""
    first = 0
    for band, count in enumerate(programs):
        if len(programs) == 1:
            run(band, program)
        else:
            pl.when((program >= first) & (program < first + count))(functools.partial(run, band, program - first))
        first += count


def fold(tiles: Tiles, body: Callable[..., Any], carry: Any) -> Any:
    """Runs body(tile, masked, carry) over all tiles: those at both ends masked, those between not."""
    first, full, full_end, end = tiles
    before = full - first

    def at_the_ends(step: jax.Array, carry: Any) -> Any:
        return body(jnp.where(step < before, first + step, full_end + step - before), True, carry)

    carry = lax.fori_loop(jnp.int32(0), before + end - full_end, at_the_ends, carry)
    return lax.fori_loop(full, full_end, lambda tile, carry: body(tile, False, carry), carry)


def dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns a product of matrices in float32."""
    return jnp.dot(left, right, precision=precision(left.dtype), preferred_element_type=jnp.float32)


def load_rows(array: Any, place: jax.Array, first: jax.Array, count: int, end: int) -> jax.Array:
    """Returns rows first .. first + count of array[place], zeros from `end` on."""
    where = array.at[place, pl.ds(first, count), :]
    if end % count == 0:
        return pltriton.load(where)
    return pltriton.load(where, mask=(first + jnp.arange(count) < end)[:, None], other=0.0)


def load_numbers(array: Any, place: jax.Array, first: jax.Array, count: int, end: int) -> jax.Array:
    """Returns numbers first .. first + count of array[place], zeros from `end` on."""
    return pltriton.load(array.at[place, pl.ds(first, count)], mask=first + jnp.arange(count) < end, other=0.0)


def store(where: Any, values: jax.Array, mask: jax.Array | None) -> None:
    """Writes values in the array's type, where the mask is set; None: all."""
    pltriton.store(where, values.astype(where.dtype), mask=mask)


def store_scores(place: Place, table: Any, index: jax.Array, values: jax.Array, mask: jax.Array | None) -> None:
    """Writes values of a tile to the table of one head, where the mask is set; None: all."""
    if place.call.interpret and mask is not None:
        # The interpreter writes what was there where the mask is not set, in no order: not over this tile's own values.
        index = jnp.where(mask, index, table.shape[1])
    store(table.at[place.head, index], values, mask)


def num_warps(call: Call) -> int:
    """Returns the warps of a program: 128 x 64 scores and E = 128 fill the registers of 8."""
    return 8 if call.tile.query >= 128 else 4


def compiler_params(num_warps: int) -> pltriton.CompilerParams:
    """Returns warps and pipeline stages; always given, as without them newer versions of jax choose Mosaic."""
    return pltriton.CompilerParams(num_warps=num_warps, num_stages=2)
