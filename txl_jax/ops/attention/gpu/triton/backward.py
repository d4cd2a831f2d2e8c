"""The backward kernels: `backward_keys` gives the gradients of keys and values, and writes those of the scores.

From these `backward_queries` makes the gradients of queries, by a product with the keys and one with the position keys.
So scores and probabilities are computed once, and each sum has one program, which adds in one order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from txl_jax.ops.attention.gpu.position_table import Layout
from txl_jax.ops.attention.gpu.triton.positions import load_position_keys, queries_of_phase, tiles_of_phase
from txl_jax.ops.attention.gpu.triton.tiles import (
    Call,
    Cotangents,
    Inputs,
    Place,
    Tiles,
    compiler_params,
    dot,
    fold,
    for_band,
    load_numbers,
    load_rows,
    num_warps,
    store,
    store_scores,
)


def backward_keys(
    call: Call, inputs: Inputs, cotangents: Cotangents, batch: int
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Computes the gradients of keys and values of a chunk of rows, [b, H, K, E] each, and those of the scores.

    The last are divided by the scale, in the layout of the position scores and the type of the queries, zero wherever
    no visible key is: [H, elements] of each band.
    """
    width, places = inputs.key.shape[2], batch * call.n_head
    of_key, of_value, *of_scores = pl.pallas_call(
        functools.partial(_keys_kernel, call=call),
        grid=(pl.cdiv(call.n_keys, call.tile.key), places),
        out_shape=(
            jax.ShapeDtypeStruct((places, call.n_keys, width), inputs.key.dtype),
            jax.ShapeDtypeStruct((places, call.n_keys, width), inputs.value.dtype),
            *(
                jax.ShapeDtypeStruct((call.n_head, layout.n_elements(batch)), inputs.query.dtype)
                for layout in call.bands
            ),
        ),
        compiler_params=compiler_params(8),
        interpret=call.interpret,
        name="attention_backward_keys",
    )(inputs._replace(position_key=None, position_bias=None, position_score=None), cotangents)
    shape = batch, call.n_head, call.n_keys, width
    return of_key.reshape(shape), of_value.reshape(shape), of_scores


def backward_queries(call: Call, inputs: Inputs, of_scores: list[jax.Array], batch: int) -> list[jax.Array]:
    """Computes the gradients of q + u, and with position keys those of q + v, of a chunk: [b, H, L, E] each.

    Args:
      call: static facts.
      inputs: those of `backward_keys`.
      of_scores: its last result.
      batch: rows of the chunk.
    """
    width, places = inputs.key.shape[2], batch * call.n_head
    shape = jax.ShapeDtypeStruct((places, call.segment_len * width), inputs.query.dtype)
    gradients = pl.pallas_call(
        functools.partial(_queries_kernel, call=call),
        grid=(sum(tiles_of_phase(call)), places, call.bands[0].phases),
        out_shape=[shape] if inputs.position_key is None else [shape, shape],
        compiler_params=compiler_params(num_warps(call)),
        interpret=call.interpret,
        name="attention_backward_queries",
    )(
        inputs._replace(query=None, value=None, content_bias=None, table=None, position_bias=None, position_score=None),
        of_scores,
    )
    return [x.reshape(batch, call.n_head, call.segment_len, width) for x in gradients]


class _Queries:
    """A tile of queries and what belongs to it."""

    def __init__(self, place: Place, cotangents: Cotangents, first: jax.Array) -> None:
        call = place.call
        size, end, row_head = call.tile.query, call.segment_len, place.row_head
        self.numbers = (first + jnp.arange(size))[:, None]
        self.query = place.queries(first)
        self.of_output = load_rows(cotangents.output, row_head, first, size, end)
        self.log_sum = load_numbers(cotangents.log_sum, row_head, first, size, end)[:, None]
        self.delta = load_numbers(cotangents.delta, row_head, first, size, end)[:, None]


def _tile_gradients(
    place: Place, queries: _Queries, key: jax.Array, value: jax.Array, j: jax.Array, masked: bool, *, band: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities of a tile, after dropout, and the gradients of its scaled scores: [n, m] each."""
    i = queries.numbers
    visible = place.visible(i, j) if masked else None
    p = jnp.exp2(place.scores(queries.query, key, i, j, visible, band=band) - queries.log_sum)
    of_p = dot(queries.of_output, value.T)
    dropped = p
    if place.call.dropout:
        kept, keep_scale = place.kept(i, j), place.inputs.keep_scale[0]
        dropped = jnp.where(kept, p * keep_scale, 0.0)
        of_p = jnp.where(kept, of_p * keep_scale, 0.0)
    return dropped, p * (of_p - queries.delta)


def _keys_kernel(
    inputs: Inputs, cotangents: Cotangents, of_key_out: Any, of_value_out: Any, *of_scores_out: Any, call: Call
) -> None:
    place, (n_query, n_key) = Place(call, inputs), call.tile
    first_key = pl.program_id(0) * n_key
    j = first_key + jnp.arange(n_key)
    key, value = place.keys(inputs.key, first_key), place.keys(inputs.value, first_key)

    def body(tile: jax.Array, masked: bool, carry: Any, *, band: int) -> Any:
        of_key, of_value = carry
        queries = _Queries(place, cotangents, tile * n_query)
        p, of_scores = _tile_gradients(place, queries, key, value, j[None, :], masked, band=band)
        narrow = of_scores.astype(key.dtype)
        _store_scores(place, call.bands[band], of_scores_out[band], tile * n_query, first_key, narrow, masked)
        of_value += dot(p.astype(value.dtype).T, queries.of_output)
        return of_key + dot(narrow.T, queries.query), of_value

    zeros = jnp.zeros((n_key, key.shape[1]), jnp.float32)
    carry, tiles = (zeros, zeros), place.query_tiles(first_key)
    for band, layout in enumerate(call.bands):
        first, end = layout.first_query // n_query, pl.cdiv(layout.end, n_query)
        of_band = tiles.within(first, end)
        carry = fold(of_band, functools.partial(body, band=band), carry)
        _fill_with_zeros(place, layout, of_scores_out[band], of_band)
    inside = (j < call.n_keys)[:, None]
    store(of_key_out.at[place.place, pl.ds(first_key, n_key), :], carry[0] * call.scale, inside)
    store(of_value_out.at[place.place, pl.ds(first_key, n_key), :], carry[1], inside)


def _store_scores(
    place: Place,
    layout: Layout,
    of_scores: Any,
    first_query: jax.Array,
    first_key: jax.Array,
    values: jax.Array,
    masked: bool,
) -> None:
    """Writes gradients of a tile of scores, as far as the rows of the layout have columns for them."""
    i = (first_query + jnp.arange(values.shape[0]))[:, None]
    j = (first_key + jnp.arange(values.shape[1]))[None, :]
    inside = None
    if masked:
        first_column = layout.first_column(i)
        inside = (j >= -first_column) & (j < layout.pitch - first_column)
        inside &= i < layout.first_query + layout.n_queries
    store_scores(place, of_scores, layout.first_index(place.batch, place.in_chunk, i) + j, values, inside)


def _fill_with_zeros(place: Place, layout: Layout, of_scores: Any, tiles: Tiles) -> None:
    """Writes zeros where there are no visible keys: the product with the queries reads all distances.

    Those are the tiles of queries that do not meet a tile of keys, and the columns in front of the first and behind the
    last key, of which each program takes those of other queries.
    """
    (n_query, n_key), key_tile = place.call.tile, pl.program_id(0)
    zeros = jnp.zeros((n_query, n_key), of_scores.dtype)
    first_tile, end_tile = layout.first_query // n_query, pl.cdiv(layout.first_query + layout.n_queries, n_query)
    programs = pl.num_programs(0)

    def fill(query_tile: jax.Array, key_tile: jax.Array) -> None:
        _store_scores(place, layout, of_scores, query_tile * n_query, key_tile * n_key, zeros, True)

    def loop(first: Any, end: Any, body: Any) -> None:
        lax.fori_loop(jnp.int32(first), jnp.int32(end), lambda step, _: body(step), None)

    has_keys = key_tile * n_key < layout.n_keys
    loop(first_tile, jnp.where(has_keys, tiles.first, first_tile), lambda query_tile: fill(query_tile, key_tile))
    loop(tiles.end, jnp.where(has_keys, end_tile, tiles.end), lambda query_tile: fill(query_tile, key_tile))

    def outside(step: jax.Array) -> None:
        query_tile = first_tile + key_tile + step * programs
        first = query_tile * n_query
        # From the column 0 of the first query to the last column of the last.
        before = lax.div(layout.first_column(first) + (n_key - 1), jnp.int32(n_key))
        behind = lax.div(layout.pitch - layout.first_column(first + n_query - 1) + (n_key - 1), jnp.int32(n_key))
        loop(-before, 0, lambda key_tile: fill(query_tile, key_tile))
        loop(layout.n_keys // n_key, behind, lambda key_tile: fill(query_tile, key_tile))

    steps = lax.div(jnp.maximum(end_tile - first_tile - key_tile, 0) + programs - 1, programs)
    loop(0, steps, outside)


def _queries_kernel(inputs: Inputs, of_scores: Any, *outputs: Any, call: Call) -> None:
    place = Place(call, inputs, phase=pl.program_id(2))

    def run(band: int, tile: jax.Array) -> None:
        _gradients_of_queries(place, call.bands[band], of_scores[band], tile * call.tile.query, outputs)

    for_band(pl.program_id(0), tiles_of_phase(call), run)


def _gradients_of_queries(
    place: Place, layout: Layout, of_scores: Any, first: jax.Array, outputs: tuple[Any, ...]
) -> None:
    """Computes a tile of queries of one phase, which meet the same columns of position keys."""
    call, inputs, (n_query, n_key) = place.call, place.inputs, place.call.tile
    i, within, first_query = queries_of_phase(place, layout, first)
    width = inputs.key.shape[2]
    e = jnp.arange(width)

    def of_keys(tile: jax.Array, masked: bool, total: jax.Array) -> jax.Array:
        j = tile * n_key + jnp.arange(n_key)
        index = layout.first_index(place.batch, place.in_chunk, within) + j[None, :]
        gradients = pltriton.load(of_scores.at[place.head, index])
        if masked:
            gradients = jnp.where(place.visible(i[:, None], j[None, :]), gradients, 0)
        return total + dot(gradients, place.keys(inputs.key, tile * n_key))

    def of_columns(tile: jax.Array, total: jax.Array) -> jax.Array:
        column = tile * n_key + jnp.arange(n_key)
        index = layout.row_index(place.batch, place.in_chunk, within) + column[None, :]
        gradients = pltriton.load(of_scores.at[place.head, index], mask=(column < layout.pitch)[None, :], other=0.0)
        return total + dot(gradients, load_position_keys(place, layout, column, width))

    def put(out: Any, values: jax.Array) -> None:
        index = i[:, None] * width + e[None, :]
        store(out.at[place.place, index], values * call.scale, (i < layout.end)[:, None])

    zeros = jnp.zeros((n_query, width), jnp.float32)
    put(outputs[0], fold(place.key_tiles(first_query, (n_query - 1) * layout.phases + 1), of_keys, zeros))
    if len(outputs) == 2:
        start, end = place.columns(layout, first_query)
        put(outputs[1], lax.fori_loop(start, end, of_columns, zeros))
