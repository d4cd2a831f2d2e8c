"""The forward kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from txl_jax.ops.attention.gpu.triton.tiles import (
    LOWEST,
    Call,
    Inputs,
    Place,
    compiler_params,
    dot,
    fold,
    for_band,
    num_warps,
    store,
)


def forward(call: Call, inputs: Inputs, batch: int) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of a chunk of rows: (output [b, H, L, E], base 2 logarithms of sums [b, H, L])."""
    width = inputs.query.shape[2]
    places = batch * call.n_head
    output, log_sum = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid=(sum(_tiles(call)), places),
        out_shape=(
            jax.ShapeDtypeStruct((places, call.segment_len, width), inputs.value.dtype),
            jax.ShapeDtypeStruct((places, call.segment_len), jnp.float32),
        ),
        compiler_params=compiler_params(num_warps(call)),
        interpret=call.interpret,
        name="attention_forward",
    )(inputs._replace(position_key=None, position_bias=None, position_score=None))
    shape = batch, call.n_head, call.segment_len
    return output.reshape(*shape, width), log_sum.reshape(shape)


def _kernel(inputs: Inputs, output: Any, log_sum: Any, *, call: Call) -> None:
    place = Place(call, inputs)

    def run(band: int, tile: jax.Array) -> None:
        _attend(place, band, call.bands[band].first_query + tile * call.tile.query, output, log_sum)

    # The last queries have the most keys: first.
    for_band(pl.num_programs(0) - 1 - pl.program_id(0), _tiles(call), run)


def _tiles(call: Call) -> list[int]:
    """Returns the tiles of queries of each band."""
    return [-(-layout.count // call.tile.query) for layout in call.bands]


def _attend(place: Place, band: int, first: jax.Array, output: Any, log_sum: Any) -> None:
    call, inputs, (n_query, n_key) = place.call, place.inputs, place.call.tile
    i = first + jnp.arange(n_query)
    query = place.queries(first)

    def body(tile: jax.Array, masked: bool, carry: Any) -> Any:
        total, top, weight = carry
        first_key = tile * n_key
        j = first_key + jnp.arange(n_key)
        visible = place.visible(i[:, None], j[None, :]) if masked else None
        key, value = place.keys(inputs.key, first_key), place.keys(inputs.value, first_key)
        scores = place.scores(query, key, i[:, None], j[None, :], visible, band=band)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
        weight = weight * shrink + jnp.sum(p, axis=1)
        if call.dropout:
            p = jnp.where(place.kept(i[:, None], j[None, :]), p, 0.0)
        return total * shrink[:, None] + dot(p.astype(value.dtype), value), new_top, weight

    zeros = jnp.zeros((n_query, query.shape[1]), jnp.float32)
    start = (zeros, jnp.full((n_query,), LOWEST, jnp.float32), jnp.zeros((n_query,), jnp.float32))
    total, top, weight = fold(place.key_tiles(first, n_query), body, start)
    safe = jnp.where(weight > 0, weight, 1.0)
    factor = 1.0 / safe
    if call.dropout:
        factor *= inputs.keep_scale[0]
    end = i < call.segment_len
    store(output.at[place.place, pl.ds(first, n_query), :], total * factor[:, None], end[:, None])
    store(log_sum.at[place.place, pl.ds(first, n_query)], jnp.where(weight > 0, top + jnp.log2(safe), 0.0), end)
