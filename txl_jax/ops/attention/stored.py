"""Attention in plain XLA with its own backward pass, which stores the probabilities once.

This is the path for GPUs in training.

The definition is `reference.attention`; tests/ops/attention/test_training.py compares values,
gradients and dropout masks with it, tests/ops/attention/test_reference.py both with a loop over
pairs.

Left to XLA's differentiation, the reference keeps seven arrays of the scores' size in 16 bits for
the backward pass, and moves such arrays some 40 times. Here one is kept, the probabilities before
dropout, and they move some 25 times (enwik8_24l on an H200, by the compiler; test_stored.py counts
them):

- Where arrays have 16 bits, scores are stored in float16, which keeps 11 bits of a number where
  bfloat16 keeps 8. They are clipped to its range, as infinity would become nan.
- Scores by distance have columns of zeros behind them, so that the relative shift reads the same
  buffer with rows of another length (`distances.skew`).
- Arrays are heads first, [H, B, L, K], the order that the product of position keys has.

Letters as in `txl_jax.ops.attention`, and W columns of the scores by distance.
"""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.distances import skew, unskew
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Operands
from txl_jax.ops.matmul import product, wide_type

# Finite, so that a query that sees no key yields no nan.
_HIDDEN = -1e30
# Columns: rows that begin at multiples of 16 bytes suit the libraries of matrix products.
_ALIGNED = 8


def stored_attention(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None = None
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. A query that sees no key gets zeros."""
    heads_first = {
        name: getattr(operands, name).swapaxes(0, 1) for name in ("query", "key", "value")
    }
    return _attend(operands._replace(**heads_first), visibility, dropout).swapaxes(0, 1)


@jax.custom_vjp
def _attend(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
) -> jax.Array:
    return _forward(operands, visibility, dropout)[0]


def _forward(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
) -> tuple[jax.Array, Any]:
    o, scale, wide = operands, operands.query.shape[-1] ** -0.5, wide_type(operands.query)
    content = product("hble,hbke->hblk", _biased(o.query, o.content_bias), o.key)
    scores_HxBxLxK = _narrow(content * scale, o.query.dtype).astype(wide)
    by_distance = _scores_by_distance(o)
    if by_distance is not None:
        by_distance = _narrow(by_distance * scale, o.query.dtype)
        scores_HxBxLxK += skew(by_distance, visibility.n_keys).astype(wide)
    visible_1xBxLxK = visibility.mask()[None]
    scores_HxBxLxK = jnp.where(visible_1xBxLxK, scores_HxBxLxK, _HIDDEN)
    weights = jnp.exp(scores_HxBxLxK - jnp.max(scores_HxBxLxK, axis=-1, keepdims=True))
    if visibility.lengths is not None:  # A query may see no key.
        weights = jnp.where(visible_1xBxLxK, weights, 0)
    # The sum is at least 1 where a key is seen.
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
    # Without the barrier XLA stores the weights in float32 for both passes.
    probabilities = jax.lax.optimization_barrier((weights / total).astype(o.value.dtype))
    output = product("hblk,hbke->hble", _drop(probabilities, dropout), o.value).astype(
        o.value.dtype
    )
    return output, (operands, dropout, probabilities, output)


def _backward(residuals: Any, gradient: jax.Array) -> tuple[Operands, None, None]:
    o, dropout, probabilities, output = residuals
    n_head, batch, n_query, width = o.query.shape
    wide, dtype = wide_type(o.query), o.query.dtype
    of_value = product("hblk,hble->hbke", _drop(probabilities, dropout), gradient)
    of_weights = product("hble,hbke->hblk", gradient, o.value).astype(dtype)
    mean = jnp.sum(gradient.astype(wide) * output.astype(wide), axis=-1, keepdims=True)
    of_scores = probabilities.astype(wide) * (_drop(of_weights.astype(wide), dropout) - mean)
    of_scores = (of_scores * width**-0.5).astype(dtype)
    of_query = of_content_query = product("hblk,hbke->hble", of_scores, o.key)
    of_key = product("hblk,hble->hbke", of_scores, _biased(o.query, o.content_bias))
    found = {
        "key": of_key,
        "value": of_value,
        "content_bias": jnp.sum(of_content_query, axis=(1, 2)),
    }
    by_distance = o.position_score if o.position_key is None else o.position_key
    if by_distance is not None:
        n_positions = by_distance.shape[1]
        columns = unskew(of_scores, n_positions + _behind(n_positions)).reshape(
            n_head, batch * n_query, -1
        )
        found["position_score"] = jnp.sum(columns.astype(wide), axis=1)[:, :n_positions]
        if o.position_key is not None:
            of_position_query = product("hnw,hwe->hne", columns, _padded(o.position_key)).reshape(
                o.query.shape
            )
            found["position_bias"] = jnp.sum(of_position_query, axis=(1, 2))
            found["position_key"] = product("hnw,hne->hwe", columns, _position_rows(o))[
                :, :n_positions
            ]
            of_query += of_position_query
    found["query"] = of_query
    given = {name: array for name, array in o._asdict().items() if array is not None}
    return (
        Operands(**{name: found[name].astype(array.dtype) for name, array in given.items()}),
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def _scores_by_distance(o: Operands) -> jax.Array | None:
    """Returns scores by distance [H, B or 1, L, W], or None without position keys and scores."""
    n_head, batch, n_query, _ = o.query.shape
    score = (
        None
        if o.position_score is None
        else _padded(o.position_score).astype(wide_type(o.query))[:, None, None, :]
    )
    if o.position_key is None:
        return (
            None
            if score is None
            else jnp.broadcast_to(score, (n_head, 1, n_query, score.shape[-1]))
        )
    scores = product("hne,hwe->hnw", _position_rows(o), _padded(o.position_key))
    scores = scores.reshape(n_head, batch, n_query, -1)
    return scores if score is None else scores + score


def _position_rows(o: Operands) -> jax.Array:
    """Returns q + v of all rows: [H, B L, E]."""
    n_head, *_, width = o.query.shape
    return _biased(o.query, o.position_bias).reshape(n_head, -1, width)


def _padded(by_distance: jax.Array) -> jax.Array:
    """Puts zeros behind the distances: [H, P, ..] -> [H, W, ..]."""
    behind = _behind(by_distance.shape[1])
    return jnp.pad(by_distance, [(0, 0), (0, behind), *[(0, 0)] * (by_distance.ndim - 2)])


def _behind(n_positions: int) -> int:
    """Returns W - P, at least the one column that the shift of causal scores needs."""
    return 1 + -(n_positions + 1) % _ALIGNED


def _drop(array: jax.Array, dropout: ProbabilityDropout | None) -> jax.Array:
    """Applies the mask of dropout to [H, B, L, K], and divides by 1 - rate."""
    if dropout is None:
        return array
    n_head, batch, *lengths = array.shape
    kept = dropout.mask(batch, n_head, *lengths).swapaxes(0, 1)
    return jnp.where(kept, array / jnp.asarray(1 - dropout.rate, array.dtype), 0)


def _biased(rows: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[H, B, L, E] and [H, E] -> [H, B, L, E]."""
    return rows if bias is None else rows + bias[:, None, None, :]


def _narrow(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype.itemsize > 2:
        return scores
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(scores, -largest, largest).astype(jnp.float16)
