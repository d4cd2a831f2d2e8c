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
- No layer reads a mask or a constant of the scores' size from memory (`_per_layer`).

Letters as in `txl_jax.ops.attention`, and W columns of the scores by distance.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.distances import skew, unskew
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import KeyBounds, Visibility
from txl_jax.ops.attention.problem import Operands
from txl_jax.ops.attention.saved import OUTPUT, PROBABILITIES, mark_as_saved
from txl_jax.ops.matmul import product, wide_type

# Finite, so that a query that sees no key yields no nan.
_HIDDEN = -1e30
# Columns: rows that begin at multiples of 16 bytes suit the libraries of matrix products.
_ALIGNED = 8


def stored_attention(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None = None
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. A query that sees no key gets zeros."""
    heads_first = operands._replace(
        query=operands.query.swapaxes(0, 1),
        key=operands.key.swapaxes(0, 1),
        value=operands.value.swapaxes(0, 1),
    )
    return _attend(heads_first, visibility, dropout).swapaxes(0, 1)


class _StoredResiduals(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    operands: Operands
    dropout: ProbabilityDropout | None
    probabilities: jax.Array  # [H, B, L, K], before dropout.
    output: jax.Array  # [H, B, L, E]


@jax.custom_vjp
def _attend(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
) -> jax.Array:
    output, _ = _forward(operands, visibility, dropout)
    return output


def _forward(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
) -> tuple[jax.Array, _StoredResiduals]:
    """Returns the weighted sums of the values [H, B, L, E], and the residuals."""
    query = operands.query
    value = operands.value
    wide = wide_type(query)
    scale = query.shape[-1] ** -0.5

    # Scores by content and by distance are rounded before they are added, since they are stored.
    content_query = _biased(query, operands.content_bias)
    content = product("hble,hbke->hblk", content_query, operands.key)
    scores_HxBxLxK = _narrow(content * scale, query.dtype).astype(wide)
    by_distance = _scores_by_distance(operands)
    if by_distance is not None:
        by_distance = _narrow(by_distance * scale, query.dtype)
        scores_HxBxLxK += skew(by_distance, visibility.n_keys).astype(wide)

    constants = _per_layer(visibility, query)
    visible_1xBxLxK = constants.bounds.mask()[None]
    scores_HxBxLxK = jnp.where(visible_1xBxLxK, scores_HxBxLxK, constants.hidden)

    highest = jnp.max(scores_HxBxLxK, axis=-1, keepdims=True)
    numerators = jnp.exp(scores_HxBxLxK - highest)
    if visibility.lengths is not None:  # A query may see no key.
        numerators = jnp.where(visible_1xBxLxK, numerators, constants.zero)
    # The sum is at least 1 where a key is seen.
    total = jnp.maximum(jnp.sum(numerators, axis=-1, keepdims=True), 1)

    # Without the barrier XLA stores the numerators in float32 for both passes.
    probabilities = jax.lax.optimization_barrier((numerators / total).astype(value.dtype))
    probabilities = mark_as_saved(probabilities, PROBABILITIES)
    dropped = _drop(probabilities, dropout, zero=constants.zero)
    output = product("hblk,hbke->hble", dropped, value).astype(value.dtype)
    output = mark_as_saved(output, OUTPUT)
    return output, _StoredResiduals(operands, dropout, probabilities, output)


class _Constants(NamedTuple):
    """Parts of the masks of all layers."""

    bounds: KeyBounds
    hidden: jax.Array  # [], wide, the score of a hidden pair.
    zero: jax.Array  # [], wide, the weight of a hidden or dropped pair.


def _per_layer(visibility: Visibility, query: jax.Array) -> _Constants:
    """Returns the constants of the masks in a form that depends on the layer's query.

    When JAX differentiates the scan over layers, it computes before the loop whatever does not
    depend on the layer: the mask [B, L, K] and -1e30 in each place of [H, B, L, K]. Each layer
    would then read these arrays from memory, 9.4 of the 222 GB that a training step of enwik8_24l
    moves on an H200. Behind a barrier together with the query they are computed where they are
    used, as a part of the loop over the scores.
    """
    wide = wide_type(query)
    constants = _Constants(
        bounds=visibility.bounds(),
        hidden=jnp.asarray(_HIDDEN, wide),
        zero=jnp.asarray(0, wide),
    )
    constants, _ = jax.lax.optimization_barrier((constants, query))
    return constants


def _backward(residuals: _StoredResiduals, gradient: jax.Array) -> tuple[Operands, None, None]:
    """Returns the gradients of the operands, in their shapes and dtypes."""
    operands = residuals.operands
    dropout = residuals.dropout
    probabilities = residuals.probabilities
    query = operands.query
    width = query.shape[-1]
    wide = wide_type(query)
    dtype = query.dtype

    # The gradient of a softmax: probability * (gradient of the probability - their weighted mean).
    # The mean over a query's keys is the product of the output and its gradient.
    of_value = product("hblk,hble->hbke", _drop(probabilities, dropout), gradient)
    of_weights = product("hble,hbke->hblk", gradient, operands.value).astype(dtype)
    mean = jnp.sum(gradient.astype(wide) * residuals.output.astype(wide), axis=-1, keepdims=True)
    of_scores = probabilities.astype(wide) * (_drop(of_weights.astype(wide), dropout) - mean)
    of_scores = (of_scores * width**-0.5).astype(dtype)

    # Scores by content, (q + u) . k.
    of_content_query = product("hblk,hbke->hble", of_scores, operands.key)
    content_query = _biased(query, operands.content_bias)
    of_key = product("hblk,hble->hbke", of_scores, content_query)

    # Scores by distance, (q + v) . r + s.
    of_query = of_content_query
    of_position_key = None
    of_position_bias = None
    of_position_score = None
    n_positions = _n_positions(operands)
    if n_positions is not None:
        of_by_distance = _columns_of_distances(of_scores, n_positions)
        if operands.position_score is not None:
            of_position_score = jnp.sum(of_by_distance.astype(wide), axis=1)[:, :n_positions]
        if operands.position_key is not None:
            padded_key = _padded(operands.position_key)
            of_position_rows = product("hnw,hwe->hne", of_by_distance, padded_key)
            of_position_query = of_position_rows.reshape(query.shape)
            of_position_bias = jnp.sum(of_position_query, axis=(1, 2))
            of_padded_key = product("hnw,hne->hwe", of_by_distance, _position_rows(operands))
            of_position_key = of_padded_key[:, :n_positions]
            of_query += of_position_query

    gradients = Operands(
        query=of_query,
        key=of_key,
        value=of_value,
        position_key=of_position_key,
        content_bias=jnp.sum(of_content_query, axis=(1, 2)),
        position_bias=of_position_bias,
        position_score=of_position_score,
    )
    return _like(gradients, operands), None, None


_attend.defvjp(_forward, _backward)


def _like(gradients: Operands, operands: Operands) -> Operands:
    """Returns the gradients of the arrays that are not None, in their dtypes."""
    cast = {}
    for name, array in operands._asdict().items():
        if array is not None:
            cast[name] = getattr(gradients, name).astype(array.dtype)
    return Operands(**cast)


def _scores_by_distance(operands: Operands) -> jax.Array | None:
    """Returns scores by distance [H, B or 1, L, W], or None without position keys and scores."""
    n_head, batch, n_query, _ = operands.query.shape
    score_Hx1x1xW = None
    if operands.position_score is not None:
        score = _padded(operands.position_score).astype(wide_type(operands.query))
        score_Hx1x1xW = score[:, None, None, :]

    if operands.position_key is None:
        if score_Hx1x1xW is None:
            return None
        return jnp.broadcast_to(score_Hx1x1xW, (n_head, 1, n_query, score_Hx1x1xW.shape[-1]))

    padded_key = _padded(operands.position_key)
    scores = product("hne,hwe->hnw", _position_rows(operands), padded_key)
    scores = scores.reshape(n_head, batch, n_query, -1)
    if score_Hx1x1xW is not None:
        scores = scores + score_Hx1x1xW
    return scores


def _n_positions(operands: Operands) -> int | None:
    """Returns P, the number of distances, or None without position keys and scores."""
    if operands.position_key is not None:
        return operands.position_key.shape[1]
    if operands.position_score is not None:
        return operands.position_score.shape[1]
    return None


def _columns_of_distances(of_scores: jax.Array, n_positions: int) -> jax.Array:
    """Moves the scores' gradient to the columns of the distances: [H, B, L, K] -> [H, B L, W]."""
    n_head, batch, n_query, _ = of_scores.shape
    n_columns = n_positions + _behind(n_positions)
    return unskew(of_scores, n_columns).reshape(n_head, batch * n_query, -1)


def _position_rows(operands: Operands) -> jax.Array:
    """Returns q + v of all rows: [H, B L, E]."""
    n_head = operands.query.shape[0]
    width = operands.query.shape[-1]
    return _biased(operands.query, operands.position_bias).reshape(n_head, -1, width)


def _padded(by_distance: jax.Array) -> jax.Array:
    """Puts zeros behind the distances: [H, P, ..] -> [H, W, ..]."""
    behind = _behind(by_distance.shape[1])
    other_axes = [(0, 0)] * (by_distance.ndim - 2)
    return jnp.pad(by_distance, [(0, 0), (0, behind), *other_axes])


def _behind(n_positions: int) -> int:
    """Returns W - P, at least the one column that the shift of causal scores needs."""
    return 1 + -(n_positions + 1) % _ALIGNED


def _drop(
    array: jax.Array, dropout: ProbabilityDropout | None, zero: jax.Array | int = 0
) -> jax.Array:
    """Applies the mask of dropout to [H, B, L, K], and divides by 1 - rate.

    Dropped entries become `zero`, which in the forward pass is the layer's own (`_per_layer`). The
    backward pass is not differentiated, so nothing of it is computed before the loop.
    """
    if dropout is None:
        return array
    n_head, batch, n_query, n_key = array.shape
    kept = dropout.mask(batch, n_head, n_query, n_key).swapaxes(0, 1)
    scaled = array / jnp.asarray(1 - dropout.rate, array.dtype)
    return jnp.where(kept, scaled, jnp.asarray(zero, array.dtype))


def _biased(rows: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias per head: [H, B, L, E] and [H, E] or None -> [H, B, L, E]."""
    if bias is None:
        return rows
    return rows + bias[:, None, None, :]


def _narrow(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds scores to float16 if arrays of the model have 16 bits."""
    if dtype.itemsize > 2:
        return scores
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(scores, -largest, largest).astype(jnp.float16)
