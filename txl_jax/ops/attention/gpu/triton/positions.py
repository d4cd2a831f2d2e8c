"""The kernel that computes position scores by distance, and what it shares with the gradient of queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from txl_jax.ops.attention.gpu.position_table import Layout, table_dtype
from txl_jax.ops.attention.gpu.triton.tiles import (
    LOG2_E,
    Call,
    Inputs,
    Place,
    compiler_params,
    dot,
    for_band,
    num_warps,
    store_scores,
)


def position_scores(call: Call, inputs: Inputs, batch: int) -> list[jax.Array]:
    """Computes the tables of a chunk of rows, times scale and log2(e), of each band [H, elements].

    What no visible key has is left as it is: anything.
    """
    dtype = table_dtype(inputs.query.dtype)
    tables: list[jax.Array] = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid=(sum(tiles_of_phase(call)), batch * call.n_head, call.bands[0].phases),
        out_shape=[jax.ShapeDtypeStruct((call.n_head, layout.n_elements(batch)), dtype) for layout in call.bands],
        compiler_params=compiler_params(num_warps(call)),
        interpret=call.interpret,
        name="attention_position_scores",
    )(inputs._replace(key=None, value=None, content_bias=None, table=None))
    return tables


def tiles_of_phase(call: Call) -> list[int]:
    """Returns the tiles of queries of one phase, of each band."""
    return [-(-layout.queries_per_phase // call.tile.query) for layout in call.bands]


def queries_of_phase(place: Place, layout: Layout, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a program's queries of one phase from a number in the phase on.

    Returns:
      queries [n]; the same [n, 1], those behind the last replaced by the last; the first.
    """
    phase = place.phase
    i = layout.first_query + (first + jnp.arange(place.call.tile.query)) * layout.phases + phase
    last = layout.first_query + layout.n_queries - layout.phases + phase
    return i, jnp.minimum(i, last)[:, None], layout.first_query + first * layout.phases + phase


def load_position_keys(place: Place, layout: Layout, column: jax.Array, width: int) -> jax.Array:
    """Returns position keys of columns of the table in the program's phase, [m, E], zeros where there are none."""
    position = column - (place.phase + layout.lead)
    inside = (position >= 0) & (position < layout.n_positions)
    row = layout.skipped + jnp.clip(position, 0, layout.n_positions - 1)
    where = place.inputs.position_key.at[place.head, row[:, None] * width + jnp.arange(width)[None, :]]
    return pltriton.load(where, mask=inside[:, None], other=0.0)


def _kernel(inputs: Inputs, *tables: Any, call: Call) -> None:
    place = Place(call, inputs, phase=pl.program_id(2))

    def run(band: int, tile: jax.Array) -> None:
        _multiply(place, call.bands[band], tables[band], tile * call.tile.query)

    for_band(pl.program_id(0), tiles_of_phase(call), run)


def _multiply(place: Place, layout: Layout, table: Any, first: jax.Array) -> None:
    """Multiplies a tile of queries of one phase with the position keys that it uses."""
    call, inputs, (n_query, n_key) = place.call, place.inputs, place.call.tile
    i, within, first_query = queries_of_phase(place, layout, first)
    if inputs.position_key is not None:
        width = inputs.query.shape[2]
        shape = n_query, width
        row, e = jnp.broadcast_to(within, shape), jnp.broadcast_to(jnp.arange(width)[None, :], shape)
        query = pltriton.load(
            inputs.query.at[place.row_head, row, e], mask=jnp.broadcast_to((i < layout.end)[:, None], shape), other=0.0
        )
        if inputs.position_bias is not None:
            query += inputs.position_bias[place.head, :][None, :]
    largest = float(jnp.finfo(table.dtype).max)

    def body(tile: jax.Array, carry: None) -> None:
        column = tile * n_key + jnp.arange(n_key)
        scores = jnp.zeros((n_query, n_key), jnp.float32)
        if inputs.position_key is not None:
            scores = dot(query, load_position_keys(place, layout, column, width).T)
        if inputs.position_score is not None:
            position = jnp.clip(column - (place.phase + layout.lead), 0, layout.n_positions - 1)
            scores += pltriton.load(inputs.position_score.at[place.head, layout.skipped + position])[None, :]
        # Infinity would become NaN in the softmax.
        scores = jnp.clip(scores * (call.scale * LOG2_E), -largest, largest)
        index = layout.row_index(place.batch, place.in_chunk, i[:, None]) + column[None, :]
        inside = (i < layout.first_query + layout.n_queries)[:, None] & (column < layout.pitch)[None, :]
        store_scores(place, table, index, scores, inside)
        return carry

    start, end = place.columns(layout, first_query)
    lax.fori_loop(start, end, body, None)
