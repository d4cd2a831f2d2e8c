"""Attention over [memory; segment] with gradients, by the forward and the backward kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.backward import backward
from txl_jax.ops.attention.tpu.calls import Operands, Scalars, make_scalars
from txl_jax.ops.attention.tpu.forward import forward
from txl_jax.ops.attention.tpu.geometry import Geometry, round_tile
from txl_jax.ops.attention.tpu.limits import SCORE_COLUMNS
from txl_jax.ops.attention.tpu.skew import Way

_WAYS: dict[str, Way] = {"mosaic_roll": "roll", "mosaic_gather": "gather"}


def tpu_attention(
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
    kernel: str = "mosaic_gather",
    interpret: bool = False,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]; differentiable in every array.

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`); None: no term by distance.
      content_bias: [H, E], u; None: without.
      position_bias: [H, E], v; None: without.
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E); None: nothing.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities; None: none.
      tile: queries and keys of a tile; rounded to what the registers take.
      kernel: "mosaic_roll" (TPU v5 and later) or "mosaic_gather" (v4 and later): how a tile is skewed.
      interpret: whether the kernels run interpreted, on any device.
    """
    operands = Operands(
        query,
        key.astype(query.dtype),
        value.astype(query.dtype),
        None if position_key is None else position_key.astype(query.dtype),
        None if content_bias is None else content_bias[:, None, :],
        None if position_bias is None else position_bias[:, None, :],
    )
    if position_score is not None:
        operands = _with_scores(operands, position_score)
    batch, n_head, segment_len, width = operands.query.shape
    geometry = Geometry(
        batch=batch,
        n_head=n_head,
        segment_len=segment_len,
        n_keys=visibility.n_keys,
        width=width,
        scale=query.shape[3] ** -0.5,
        n_positions=0 if operands.position_key is None else operands.position_key.shape[1],
        tile=round_tile(tile, segment_len=segment_len, n_keys=visibility.n_keys),
        causal=visibility.causal,
        window=visibility.window,
        way=_WAYS[kernel],
        n_drawn_head=None if dropout is None else dropout.n_head,
        interpret=interpret,
    )
    out = _attend(geometry, operands, make_scalars(visibility, dropout))
    return out[..., : value.shape[3]].astype(value.dtype)


def _with_scores(operands: Operands, score: jax.Array) -> Operands:
    """Writes a score per distance as more columns of the position keys, which queries meet with 1 and keys with 0.

    Two columns, as bfloat16 would round a score to three digits: what it keeps, and what it rounds off. Up to 126 the
    width fills no more registers than before.
    """
    dtype = operands.query.dtype
    kept = score.astype(dtype)
    columns = jnp.stack([kept, (score - kept.astype(score.dtype)).astype(dtype)], axis=-1)
    position_key = operands.position_key
    if position_key is None:
        position_key = jnp.zeros((*score.shape, operands.query.shape[3]), dtype)
    return Operands(
        _widen(operands.query, 1),
        _widen(operands.key, 0),
        _widen(operands.value, 0),
        jnp.concatenate([position_key, columns], axis=-1),
        *(None if bias is None else _widen(bias, 0) for bias in (operands.content_bias, operands.position_bias)),
    )


def _widen(array: jax.Array, number: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, SCORE_COLUMNS)], constant_values=number)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(geometry: Geometry, operands: Operands, scalars: Scalars) -> jax.Array:
    return forward(geometry, operands, scalars)[0]


def _attend_forward(geometry: Geometry, operands: Operands, scalars: Scalars) -> tuple[jax.Array, Any]:
    out, log_sum = forward(geometry, operands, scalars)
    return out, (operands, scalars, out, log_sum)


def _attend_backward(geometry: Geometry, residuals: Any, gradient: jax.Array) -> tuple[Operands, None]:
    operands, scalars, out, log_sum = residuals
    return backward(geometry, operands, scalars, out, log_sum, gradient), None


_attend.defvjp(_attend_forward, _attend_backward)
