"""The forward kernel over a KV cache: the ring where it lies, then the segment's own keys."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from txl_jax.ops.attention.gpu.triton.tiles import LOG2_E, LOWEST, compiler_params, dot, load_rows, store
from txl_jax.ops.attention.problem import Tile


@dataclasses.dataclass(frozen=True)
class CachedCall:
    """Static facts of a call.

    Attributes:
      n_head: H.
      segment_len: L.
      capacity: R.
      width: E.
      n_positions: P; 0: no position scores.
      pitch: columns of a row of position scores, of which the first P are used.
      window: keys that a query sees at most, itself included; None: no limit.
      splits: parts of the ring, each with programs of its own.
      tile: queries and keys of a tile.
      interpret: whether the kernel is interpreted, on any device.
    """

    n_head: int
    segment_len: int
    capacity: int
    width: int
    n_positions: int
    pitch: int
    window: int | None
    splits: int
    tile: Tile
    interpret: bool


class CachedInputs(NamedTuple):
    """Arrays of the kernel; n = row * H + head.

    Attributes:
      query: [B * H, L, E], divided by sqrt(E), with E a power of two.
      key: [B * H, L, E], of the segment.
      value: [B * H, L, E].
      ring_key: [B * H, E * R], of any type, with E before padding.
      ring_value: [B * H, R * E].
      table: [H, b * L * pitch], position scores of the distances P - 1, .., 0 times log2(e), of a chunk; or None.
      first_row: int32 [1], of the chunk.
      valid: int32 [B].
      write_index: int32 [1].
    """

    query: Any
    key: Any
    value: Any
    ring_key: Any
    ring_value: Any
    table: Any
    first_row: Any
    valid: Any
    write_index: Any


def cached_forward(call: CachedCall, inputs: CachedInputs, batch: int) -> jax.Array:
    """Computes the attention of a chunk of rows: [b, H, L, E]."""
    width, places = inputs.query.shape[2], batch * call.n_head
    grid = pl.cdiv(call.segment_len, call.tile.query), places, call.splits
    shape = call.splits, places, call.segment_len
    parts = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid=grid,
        out_shape=(
            jax.ShapeDtypeStruct((*shape, width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        compiler_params=compiler_params(8 if width >= 128 else 4),  # At 128, 4 warps spill 356 bytes.
        interpret=call.interpret,
        name="cached_attention",
    )(inputs)
    total, top, weight = parts
    factor = jnp.exp2(top - jnp.max(top, axis=0, keepdims=True))
    total = jnp.sum(total * factor[..., None], axis=0) / jnp.sum(weight * factor, axis=0)[..., None]
    return total.astype(inputs.value.dtype).reshape(batch, call.n_head, call.segment_len, width)


class _Place:
    """The place of a program: its row and head, and its tile of queries."""

    def __init__(self, call: CachedCall, inputs: CachedInputs) -> None:
        self.call, self.inputs = call, inputs
        in_chunk = lax.div(pl.program_id(1), jnp.int32(call.n_head))
        self.head = lax.rem(pl.program_id(1), jnp.int32(call.n_head))
        self.first_in_table = in_chunk * call.segment_len
        row = inputs.first_row[0] + in_chunk
        self.row_head, self.valid = row * call.n_head + self.head, inputs.valid[row]
        self.first = pl.program_id(0) * call.tile.query
        self.i = (self.first + jnp.arange(call.tile.query))[:, None]
        self.largest = 0.0 if inputs.table is None else float(jnp.finfo(inputs.table.dtype).max)

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array, visible: jax.Array) -> jax.Array:
        """Returns scores [n, m] of queries [n, E] and keys [E, m] at distances [n, m], -inf where hidden."""
        scores = dot(query, key) * LOG2_E
        call = self.call
        if call.n_positions:
            # The largest distance is used for all beyond it; what is hidden reads any.
            column = call.n_positions - 1 - jnp.clip(distance, 0, call.n_positions - 1)
            query_row = self.first_in_table + jnp.minimum(self.i, call.segment_len - 1)
            index = query_row * call.pitch + column
            position_scores = pltriton.load(self.inputs.table.at[self.head, index]).astype(jnp.float32)
            # Above 65504 they are infinite in the table, which would become NaN in the softmax.
            scores += jnp.minimum(position_scores, self.largest)
        if call.window is not None:
            visible &= distance < call.window
        return jnp.where(visible, scores, -jnp.inf)

    def ring_tiles(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first tile of slots that the queries see, and how many, running over the end of the ring."""
        call, size = self.call, self.call.tile.key
        reach = jnp.minimum(self.valid, call.capacity)
        if call.window is not None:
            reach = jnp.minimum(reach, jnp.maximum(call.window - 1 - self.first, 0))
        write_index = self.inputs.write_index[0]
        oldest = write_index - reach
        oldest = jnp.where(oldest < 0, oldest + call.capacity, oldest)
        tiles, first = pl.cdiv(call.capacity, size), lax.div(oldest, jnp.int32(size))
        end = oldest + reach
        ahead = lax.div(jnp.minimum(end, call.capacity) + (size - 1), jnp.int32(size)) - first
        around = lax.div(jnp.maximum(end - call.capacity, 0) + (size - 1), jnp.int32(size))
        # The tile of the oldest slot has the newest too, if the ring is full and its seam within a tile.
        return first, jnp.where(reach > 0, jnp.minimum(ahead + around, tiles), 0)


def _kernel(inputs: CachedInputs, total_out: Any, top_out: Any, weight_out: Any, *, call: CachedCall) -> None:
    place, split, (n_query, n_key) = _Place(call, inputs), pl.program_id(2), call.tile
    query = load_rows(inputs.query, place.row_head, place.first, n_query, call.segment_len)

    def add(scores: jax.Array, value: jax.Array, carry: Any) -> Any:
        total, top, weight = carry
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
        total = total * shrink[:, None] + dot(p.astype(value.dtype), value)
        return total, new_top, weight * shrink + jnp.sum(p, axis=1)

    def of_ring(step: jax.Array, carry: Any) -> Any:
        tile = first_tile + split + step * call.splits
        tile = jnp.where(tile >= n_tiles, tile - n_tiles, tile)
        slot = tile * n_key + jnp.arange(n_key)
        age = inputs.write_index[0] - slot
        age = jnp.where(age <= 0, age + call.capacity, age)[None, :]
        inside = slot < call.capacity
        e = jnp.arange(query.shape[1])
        where = inputs.ring_key.at[place.row_head, e[:, None] * call.capacity + slot[None, :]]
        key = pltriton.load(where, mask=(e < call.width)[:, None] & inside[None, :], other=0.0).astype(query.dtype)
        where = inputs.ring_value.at[place.row_head, slot[:, None] * call.width + e[None, :]]
        value = pltriton.load(where, mask=inside[:, None] & (e < call.width)[None, :], other=0.0).astype(query.dtype)
        visible = (age <= place.valid) & inside[None, :]
        return add(place.scores(query, key, place.i + age, visible), value, carry)

    def of_segment(tile: jax.Array, carry: Any) -> Any:
        j = (tile * n_key + jnp.arange(n_key))[None, :]
        key = load_rows(inputs.key, place.row_head, tile * n_key, n_key, call.segment_len)
        value = load_rows(inputs.value, place.row_head, tile * n_key, n_key, call.segment_len)
        visible = (j <= place.i) & (j < call.segment_len)
        return add(place.scores(query, key.T, place.i - j, visible), value, carry)

    zeros = jnp.zeros((n_query, query.shape[1]), jnp.float32)
    carry = (zeros, jnp.full((n_query,), LOWEST, jnp.float32), jnp.zeros((n_query,), jnp.float32))
    if call.capacity:
        n_tiles = pl.cdiv(call.capacity, n_key)
        first_tile, visited = place.ring_tiles()
        steps = lax.div(visited - split + (call.splits - 1), jnp.int32(call.splits))
        carry = lax.fori_loop(0, jnp.maximum(steps, 0), of_ring, carry)
    # The first part has the segment's own keys too.
    end = pl.cdiv(jnp.minimum(place.first + n_query, call.segment_len), n_key)
    carry = lax.fori_loop(0, jnp.where(split == 0, end, 0), of_segment, carry)
    inside = place.i[:, 0] < call.segment_len
    rows = pl.ds(place.first, n_query)
    store(total_out.at[split, pl.program_id(1), rows, :], carry[0], inside[:, None])
    store(top_out.at[split, pl.program_id(1), rows], carry[1], inside)
    store(weight_out.at[split, pl.program_id(1), rows], carry[2], inside)
