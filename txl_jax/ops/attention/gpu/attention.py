"""Attention over [memory; segment] on NVIDIA GPUs, with gradients.

Rows of the batch are taken in chunks. For each, a kernel multiplies queries and position keys into a table of the
scores by distance (`position_table.py`), which the others read; so there is such a table of a chunk, never one of the
whole batch. The backward pass computes it again. The gradients of the scores lie as their table does, so that those of
the position keys are a product that the library computes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.gpu import cudnn, position_table
from txl_jax.ops.attention.gpu.chunks import over_chunks, rows_per_chunk
from txl_jax.ops.attention.gpu.padding import widen
from txl_jax.ops.attention.gpu.position_table import make_bands
from txl_jax.ops.attention.gpu.triton.backward import backward_keys, backward_queries
from txl_jax.ops.attention.gpu.triton.forward import forward
from txl_jax.ops.attention.gpu.triton.positions import position_scores
from txl_jax.ops.attention.gpu.triton.tiles import Call, Cotangents, Inputs
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Tile


class _Arrays(NamedTuple):
    """Arguments with gradients, as of `attention`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    position_key: jax.Array | None
    content_bias: jax.Array | None
    position_bias: jax.Array | None
    position_score: jax.Array | None


class _Masks(NamedTuple):
    """Arguments without gradients, as of `tiles.Inputs`."""

    start: jax.Array
    stop: jax.Array
    row_head: jax.Array | None
    seed: jax.Array | None
    keep_scale: jax.Array | None


def gpu_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array | None = None,
    *,
    content_bias: jax.Array | None = None,
    position_bias: jax.Array | None = None,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    dropout: Dropout | None = None,
    tile: Tile,
    kernel: str | None = "triton",
    interpret: bool = False,
    table_bytes: int | None = None,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], or None.
      content_bias: [H, E], u, or None.
      position_bias: [H, E], v, or None.
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E), or None.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities; None: none.
      tile: queries and keys of a tile, powers of two of at least 16.
      kernel: "triton" or "cudnn" (`limits.kernel_of`).
      interpret: whether to interpret the kernels, on any device and slowly; of cuDNN: to use XLA in its place.
      table_bytes: largest table of position scores, of a chunk of rows; None: as `chunks` has it.

    Raises:
      ValueError: dropout in cuDNN, which draws other masks.
    """
    arrays = _Arrays(query, key, value, position_key, content_bias, position_bias, position_score)
    if kernel == "cudnn" and dropout is not None:
        raise ValueError("there is dropout on probabilities, which cuDNN's attention cannot have here; use auto")
    if kernel == "cudnn":
        return cudnn.attention(*arrays, visibility=visibility, interpret=interpret, table_bytes=table_bytes)
    bands = make_bands(segment_len=query.shape[2], n_keys=key.shape[2], causal=visibility.causal, tile=tile)
    call = Call(
        n_head=query.shape[1],
        segment_len=query.shape[2],
        n_keys=key.shape[2],
        scale=query.shape[3] ** -0.5,
        causal=visibility.causal,
        window=visibility.window,
        dropout=dropout is not None,
        tile=tile,
        bands=bands,
        interpret=interpret,
    )
    row_bytes = call.n_head * sum(layout.n_elements(1) for layout in bands) * query.dtype.itemsize
    spec = _Spec(call, rows_per_chunk(query.shape[0], row_bytes, table_bytes))
    return _attention(spec, arrays, _masks(visibility, dropout, call.n_head))


def _masks(visibility: Visibility, dropout: Dropout | None, n_head: int) -> _Masks:
    start, stop = visibility.key_range()
    if dropout is None:
        return _Masks(start, stop, None, None, None)
    row_head = dropout.row_heads(start.shape[0], n_head).reshape(-1)
    seed = jnp.stack([jnp.asarray(dropout.seed, jnp.uint32), dropout.threshold()])
    return _Masks(start, stop, row_head, seed, (1 / (1 - jnp.asarray(dropout.rate, jnp.float32))).reshape(1))


class _Spec(NamedTuple):
    """Static facts: those of the kernels, and the rows of a chunk."""

    call: Call
    chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: _Spec, arrays: _Arrays, masks: _Masks) -> jax.Array:
    return _forward(spec, arrays, masks)[0]


def _forward(spec: _Spec, arrays: _Arrays, masks: _Masks) -> tuple[jax.Array, Any]:
    call, inputs = spec.call, _inputs(arrays, masks)

    def of_chunk(carry: None, first: jax.Array, size: int) -> Any:
        return carry, forward(call, _of_chunk(call, inputs, first, size), size)

    _, (output, log_sum) = over_chunks(of_chunk, None, arrays.query.shape[0], spec.chunk)
    output = output[..., : arrays.query.shape[3]]
    return output, (arrays, masks, output, log_sum)


def _backward(spec: _Spec, residuals: Any, of_output: jax.Array) -> tuple[_Arrays, None]:
    arrays, masks, output, log_sum = residuals
    # Else XLA would keep the table of the forward pass for this one, of every layer.
    arrays, of_output = jax.lax.optimization_barrier((arrays, of_output))
    call, width, inputs = spec.call, arrays.query.shape[3], _inputs(arrays, masks)
    delta = jnp.sum(of_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    cotangents = Cotangents(*(x.reshape(-1, *x.shape[2:]) for x in (widen(of_output), log_sum, delta)))

    def of_chunk(sums: tuple[Any, Any, Any], first: jax.Array, size: int) -> Any:
        of_u, of_v, of_rows = sums
        mine = _of_chunk(call, inputs, first, size)
        of_key, of_value, of_scores = backward_keys(call, mine, cotangents, size)
        parts = [x[..., :width] for x in backward_queries(call, mine, of_scores, size)]
        of_rows = [
            total + position_table.multiply_transposed(gradient, queries, layout.pitch) * call.scale
            for total, gradient, layout, queries in zip(
                of_rows, of_scores, call.bands, _position_queries(call, arrays, first, size), strict=False
            )
        ]
        of_u = None if of_u is None else of_u + _sum(parts[0])
        of_v = None if of_v is None else of_v + _sum(parts[1])
        of_query = parts[0] if len(parts) == 1 else _add(*parts)
        return (of_u, of_v, of_rows), (of_query, of_key[..., :width], of_value[..., :width])

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (*arrays[4:6], _rows_shapes(call, arrays)))
    sums, (of_query, of_key, of_value) = over_chunks(of_chunk, start, arrays.query.shape[0], spec.chunk)
    of_position_key, of_score = _pull_rows(call, arrays, sums[2])
    gradients = _Arrays(of_query, of_key, of_value, of_position_key, sums[0], sums[1], of_score)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, arrays), None


_attention.defvjp(_forward, _backward)


def _inputs(arrays: _Arrays, masks: _Masks) -> Inputs:
    """Returns inputs of the kernels, without what belongs to a chunk; E becomes a power of two."""
    wide: dict[str, Any] = {name: widen(x) for name, x in arrays._asdict().items() if x is not None}
    for name in ("query", "key", "value"):
        wide[name] = wide[name].reshape(-1, *wide[name].shape[2:])
    if arrays.position_key is not None:
        wide["position_key"] = wide["position_key"].reshape(arrays.position_key.shape[0], -1)
    if arrays.position_score is not None:
        wide["position_score"] = arrays.position_score.astype(jnp.float32)
    none = dict.fromkeys(name for name in _Arrays._fields if name not in wide)
    return Inputs(**wide, **none, **masks._asdict(), table=None, first_row=None)


def _of_chunk(call: Call, inputs: Inputs, first: jax.Array, size: int) -> Inputs:
    """Returns the inputs of a chunk, with its position scores."""
    inputs = inputs._replace(first_row=jnp.asarray(first, jnp.int32).reshape(1))
    if inputs.position_key is None and inputs.position_score is None:
        return inputs
    return inputs._replace(table=position_scores(call, inputs, size))


def _position_rows(call: Call, position_key: jax.Array | None, score: jax.Array | None) -> list[jax.Array]:
    """Returns position keys by column, with scores, of each band; none without keys and scores."""
    if position_key is None:
        if score is None:
            return []
        position_key = jnp.zeros((*score.shape, 0), score.dtype)
    return [position_table.position_rows(position_key, score, layout) for layout in call.bands]


def _float32(arrays: _Arrays) -> Any:
    of_position = arrays.position_key, arrays.position_score
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), of_position)


def _rows_shapes(call: Call, arrays: _Arrays) -> Any:
    return jax.eval_shape(functools.partial(_position_rows, call), *_float32(arrays))


def _pull_rows(call: Call, arrays: _Arrays, of_rows: list[jax.Array]) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the gradients of position keys and scores from those of `_position_rows`."""
    if not of_rows:
        return None, None
    of_key, of_score = jax.linear_transpose(functools.partial(_position_rows, call), *_float32(arrays))(of_rows)
    return of_key, of_score


def _position_queries(call: Call, arrays: _Arrays, first: jax.Array, size: int) -> list[jax.Array]:
    """Returns what meets `_position_rows`, of the rows of a chunk."""
    query = jax.lax.dynamic_slice_in_dim(arrays.query, first, size)
    if arrays.position_key is None:
        query = query[..., :0]
    has_score = arrays.position_score is not None
    return [
        position_table.position_queries(query, arrays.position_bias, layout, has_score=has_score)
        for layout in call.bands
    ]


def _sum(of_query: jax.Array) -> jax.Array:
    """Returns the gradient of a bias: [B, H, L, E] -> [H, E]."""
    return jnp.sum(of_query.astype(jnp.float32), axis=(0, 2))


def _add(content: jax.Array, position: jax.Array) -> jax.Array:
    return (content.astype(jnp.float32) + position.astype(jnp.float32)).astype(content.dtype)
