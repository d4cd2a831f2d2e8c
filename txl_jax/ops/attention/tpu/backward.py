"""The backward kernel: all gradients in one pass over the tiles, from scores that are computed once more.

With p the probabilities, d their dropout (0 or 1 / (1 - rate)) and o the output, a pair's score has the gradient

    ds = p (d (do . v) - do . o)

which goes to q + u and k through the keys, and, moved back to its distance, to q + v and r through the position keys.
The kernel leaves the factor 1 / (1 - rate) out of d, multiplies do . o by 1 - rate instead, and the sums at the end.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.tpu import calls
from txl_jax.ops.attention.tpu.calls import Kernel, Operands, Scalars, Step
from txl_jax.ops.attention.tpu.geometry import Geometry
from txl_jax.ops.attention.tpu.scores import NN, NT, TN, dot, strips, widen
from txl_jax.ops.attention.tpu.skew import LANES, unskew


class _Residuals(NamedTuple):
    """Arrays that the backward pass reads beside the operands."""

    out: Any  # [B, H, L, E]
    out_gradient: Any  # [B, H, L, E]
    log_sum: Any  # float32 [B, H, tiles of queries, 1, n]


class _Scratch(NamedTuple):
    """Arrays that stay in VMEM: over the tiles of keys, and the last two over all tiles of a row and head."""

    content_query: Any  # [n, E], with u.
    position_query: Any  # [n, E], with v; None: no position keys.
    log_sum: Any  # float32 [n, 128], in every lane.
    out_product: Any  # float32 [n, 128], (1 - rate) do . o in every lane.
    content_gradient: Any  # float32 [n, E], of the queries through the keys.
    position_gradient: Any  # float32 [n, E], of the queries through the position keys; None: no position keys.
    key_gradient: Any  # float32 [K, E].
    value_gradient: Any  # float32 [K, E].


def backward(
    geometry: Geometry, operands: Operands, scalars: Scalars, out: jax.Array, log_sum: jax.Array, gradient: jax.Array
) -> Operands:
    """Returns the gradients of the operands, of which those of [H, ...] arrays are sums over all rows.

    Args:
      geometry: sizes.
      operands: those of `forward`.
      scalars: those of `forward`.
      out: [B, H, L, E], the result of `forward`.
      log_sum: the other result.
      gradient: [B, H, L, E], of `out`.
    """
    blocks, dtype = calls.make_blocks(geometry), operands.query.dtype
    keys = jax.ShapeDtypeStruct((geometry.batch, geometry.n_head, geometry.padded_keys, geometry.width), dtype)
    positions = jax.ShapeDtypeStruct((geometry.n_head, geometry.n_position_rows, geometry.width), jnp.float32)
    bias = jax.ShapeDtypeStruct((geometry.n_head, 1, geometry.width), jnp.float32)
    shapes = Operands(calls.queries_shape(geometry, dtype), keys, keys, positions, bias, bias)
    given = calls.operand_blocks(blocks, operands)
    written = given._replace(key=blocks.all_keys, value=blocks.all_keys)
    kernel = Kernel(
        functools.partial(_kernel, geometry),
        in_specs=(given, _Residuals(blocks.query, blocks.query, blocks.log_sum)),
        out_specs=written,
        out_shape=Operands(*(None if array is None else shape for array, shape in zip(operands, shapes, strict=True))),
        scratch=(_scratch(geometry, dtype),),
        backward=True,
        n_product=5,
        n_position_product=3,
        name="relative_attention_backward",
    )
    residuals = _Residuals(calls.pad_queries(geometry, out), calls.pad_queries(geometry, gradient), log_sum)
    gradients = calls.run(kernel, geometry, scalars, calls.pad_operands(geometry, operands), residuals)
    return _trim(geometry, operands, gradients, scalars.keep[1])


def _scratch(geometry: Geometry, dtype: jnp.dtype) -> _Scratch:
    rows, width, wide = geometry.tile.query, geometry.width, jnp.float32
    has_position = geometry.n_positions > 0
    return _Scratch(
        content_query=pltpu.VMEM((rows, width), dtype),
        position_query=pltpu.VMEM((rows, width), dtype) if has_position else None,
        log_sum=pltpu.VMEM((rows, LANES), wide),
        out_product=pltpu.VMEM((rows, LANES), wide),
        content_gradient=pltpu.VMEM((rows, width), wide),
        position_gradient=pltpu.VMEM((rows, width), wide) if has_position else None,
        key_gradient=pltpu.VMEM((geometry.padded_keys, width), wide),
        value_gradient=pltpu.VMEM((geometry.padded_keys, width), wide),
    )


def _trim(geometry: Geometry, operands: Operands, gradients: Operands, inverse_keep: jax.Array) -> Operands:
    """Cuts the padding off, and finishes what the kernel added up in float32 over all rows."""
    position_key = gradients.position_key
    if position_key is not None:
        before, _ = geometry.position_padding
        position_key = position_key[:, before : before + geometry.n_positions]

    def finish(gradient: jax.Array | None, array: jax.Array | None) -> jax.Array | None:
        return None if gradient is None or array is None else (gradient * inverse_keep).astype(array.dtype)

    return Operands(
        query=gradients.query[:, :, : geometry.segment_len],
        key=gradients.key[:, :, : geometry.n_keys],
        value=gradients.value[:, :, : geometry.n_keys],
        position_key=finish(position_key, operands.position_key),
        content_bias=finish(gradients.content_bias, operands.content_bias),
        position_bias=finish(gradients.position_bias, operands.position_bias),
    )


def _kernel(
    geometry: Geometry,
    scalars: Scalars,
    operands: Operands,
    residuals: _Residuals,
    *rest: Any,
) -> None:
    *outputs, scratch = rest
    gradients = Operands(*outputs)
    step = Step.current(scalars)
    _begin(geometry, step, operands, residuals, gradients, scratch)

    @pl.when(step.is_needed(geometry))
    def _() -> None:
        score_gradient = _score_gradient(geometry, step, operands, residuals, scratch)
        keys = pl.ds(pl.multiple_of(step.key_tile * geometry.tile.key, geometry.tile.key), geometry.tile.key)
        narrow = score_gradient.astype(operands.key.dtype)
        scratch.key_gradient[keys, :] += dot(narrow, scratch.content_query[...], TN)
        scratch.content_gradient[...] += dot(narrow, operands.key[0, 0], NN)
        if geometry.n_positions:
            _add_by_distance(geometry, step, score_gradient, operands, gradients.position_key, scratch)

    _end(geometry, step, gradients, scratch)


def _begin(
    geometry: Geometry, step: Step, operands: Operands, residuals: _Residuals, gradients: Operands, scratch: _Scratch
) -> None:
    """Sets sums to 0 where they begin, and prepares a tile of queries."""
    first_keys = step.key_tile == 0
    first_queries = first_keys & (step.query_tile == 0)

    @pl.when(first_queries & (step.row == 0))
    def _() -> None:
        _clear(gradients.position_key, gradients.content_bias, gradients.position_bias)

    @pl.when(first_queries)
    def _() -> None:
        _clear(scratch.key_gradient, scratch.value_gradient)

    @pl.when(first_keys)
    def _() -> None:
        calls.bias_queries(geometry, operands, scratch.content_query, scratch.position_query)
        _clear(scratch.content_gradient, scratch.position_gradient)
        row = residuals.log_sum[0, 0, 0]
        scratch.log_sum[...] = jnp.broadcast_to(row, (LANES, row.shape[1])).T
        product = residuals.out[0, 0].astype(jnp.float32) * residuals.out_gradient[0, 0].astype(jnp.float32)
        sums = jnp.sum(product, axis=1, keepdims=True) * step.scalars.keep[0]
        scratch.out_product[...] = jnp.broadcast_to(sums, scratch.out_product.shape)


def _clear(*references: Any) -> None:
    for reference in references:
        if reference is not None:
            reference[...] = jnp.zeros_like(reference)


def _score_gradient(
    geometry: Geometry, step: Step, operands: Operands, residuals: _Residuals, scratch: _Scratch
) -> jax.Array:
    """Adds to the gradient of the values, and returns that of the scores times 1 - rate: [n, m] in float32."""
    n_key = geometry.tile.key
    scores = calls.tile_scores(geometry, step, operands, scratch.content_query, scratch.position_query)
    probabilities = jnp.exp(scores - widen(scratch.log_sum[...], n_key))
    probabilities = jnp.where(step.visible(geometry), probabilities, 0)
    out_gradient = residuals.out_gradient[0, 0]
    kept_gradient, kept_probabilities = dot(out_gradient, operands.value[0, 0], NT), probabilities
    if geometry.n_drawn_head is not None:
        kept = step.kept(geometry)
        kept_gradient = jnp.where(kept, kept_gradient, 0)
        kept_probabilities = jnp.where(kept, probabilities, 0)
    keys = pl.ds(pl.multiple_of(step.key_tile * n_key, n_key), n_key)
    scratch.value_gradient[keys, :] += dot(kept_probabilities.astype(out_gradient.dtype), out_gradient, TN)
    return probabilities * (kept_gradient - widen(scratch.out_product[...], n_key))


def _add_by_distance(
    geometry: Geometry, step: Step, score_gradient: jax.Array, operands: Operands, target: Any, scratch: _Scratch
) -> None:
    """Adds to the gradients of the position keys, and of the queries through them."""
    for rows, at in strips(geometry.tile.query):
        positions = calls.position_slice(geometry, step, at, geometry.tile.key + LANES)
        by_distance = unskew(score_gradient[rows]).astype(operands.query.dtype)
        scratch.position_gradient[rows, :] += dot(by_distance, operands.position_key[0, positions, :], NN)
        target[0, positions, :] += dot(by_distance, scratch.position_query[rows, :], TN)


def _end(geometry: Geometry, step: Step, gradients: Operands, scratch: _Scratch) -> None:
    """Writes the sums of a tile of queries, and after the last one those of the keys and values."""
    last_keys = step.key_tile == geometry.n_key_tile - 1
    inverse_keep = step.scalars.keep[1]

    @pl.when(last_keys)
    def _() -> None:
        content, scale = scratch.content_gradient[...], geometry.scale
        both = content
        if gradients.content_bias is not None:
            gradients.content_bias[0] += jnp.sum(content, axis=0, keepdims=True) * scale
        if scratch.position_gradient is not None:
            position = scratch.position_gradient[...]
            both = content + position
            if gradients.position_bias is not None:
                gradients.position_bias[0] += jnp.sum(position, axis=0, keepdims=True) * scale
        gradients.query[0, 0] = (both * (inverse_keep * scale)).astype(gradients.query.dtype)

    @pl.when(last_keys & (step.query_tile == geometry.n_query_tile - 1))
    def _() -> None:
        gradients.key[0, 0] = (scratch.key_gradient[...] * inverse_keep).astype(gradients.key.dtype)
        gradients.value[0, 0] = (scratch.value_gradient[...] * inverse_keep).astype(gradients.value.dtype)
