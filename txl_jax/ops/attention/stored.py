"""Attention with its own backward pass in plain XLA, which stores the probabilities once: the path of GPUs.

The definition is `relative.py`, and without position keys `dot_product.py`; tests/ops/attention/test_training.py holds
values, gradients and dropout masks equal to them. Left to XLA's differentiation, the reference keeps seven arrays of
the scores' size for the backward pass in 16 bits, and moves such arrays some 40 times. Here one is kept, the
probabilities before dropout, and they move some 25 times:

- Scores are stored in 16 bits where the arrays have 16: in float16, which keeps 11 bits of a number where bfloat16
  keeps 8, clipped to its range, as infinity would become nan.
- Scores by distance are stored with columns of zeros around them, so that the relative shift reads the rows of another
  length from the same buffer.
- Arrays are heads first, [H, B, L, K], the order in which the products of position keys have them.

Letters as in `txl_jax.ops.attention`, and W columns of the scores by distance.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility

_HIDDEN = -1e30  # Finite, so that a query that sees no key yields no nan.
_ALIGNED = 8  # Columns: rows that begin at multiples of 16 bytes suit the libraries of matrix products.


class _Operands(NamedTuple):
    """Arguments with gradients, heads first."""

    query: jax.Array  # [H, B, L, E]
    key: jax.Array  # [H, B, K, E]
    value: jax.Array  # [H, B, K, E]
    position_key: jax.Array | None  # [H, P, E]
    content_bias: jax.Array | None  # [H, E]
    position_bias: jax.Array | None  # [H, E]
    position_score: jax.Array | None  # [H, P]

    @property
    def wide(self) -> jnp.dtype:
        """The type of sums."""
        return jnp.promote_types(self.query.dtype, jnp.float32)

    @property
    def scale(self) -> float:
        """1 / sqrt(E)."""
        return self.query.shape[-1] ** -0.5

    @property
    def n_positions(self) -> int:
        """P, or 0 if nothing depends on distances."""
        given = self.position_score if self.position_key is None else self.position_key
        return 0 if given is None else given.shape[1]

    def content_rows(self) -> jax.Array:
        """Returns q + u: [H, B, L, E]."""
        return _biased(self.query, self.content_bias)

    def position_rows(self) -> jax.Array:
        """Returns q + v: [H, B L, E]."""
        n_head, *_, width = self.query.shape
        return _biased(self.query, self.position_bias).reshape(n_head, -1, width)


def stored_attention(
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
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]; arguments as for `txl_jax.ops.attention.attention`."""
    heads_first = (array.swapaxes(0, 1) for array in (query, key, value))
    operands = _Operands(*heads_first, position_key, content_bias, position_bias, position_score)
    return _attend(operands, visibility, dropout).swapaxes(0, 1)


@jax.custom_vjp
def _attend(operands: _Operands, visibility: Visibility, dropout: Dropout | None) -> jax.Array:
    return _forward(operands, visibility, dropout)[0]


def _forward(operands: _Operands, visibility: Visibility, dropout: Dropout | None) -> tuple[jax.Array, Any]:
    o = operands
    scores = _narrow(_product("hble,hbke->hblk", o.content_rows(), o.key) * o.scale, o).astype(o.wide)
    table = _scores_by_distance(o)
    if table is not None:
        scores += _by_key(table, visibility.n_keys).astype(o.wide)
    visible_1xBxLxK = visibility.mask()[None]
    scores = jnp.where(visible_1xBxLxK, scores, _HIDDEN)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    if visibility.may_hide_all:
        weights = jnp.where(visible_1xBxLxK, weights, 0)
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)  # It is at least 1 where a key is seen.
    # Without the barrier XLA stores the weights in float32 for both passes.
    probabilities = jax.lax.optimization_barrier((weights / total).astype(o.value.dtype))
    output = _product("hblk,hbke->hble", _drop(probabilities, dropout), o.value).astype(o.value.dtype)
    return output, (operands, dropout, probabilities, output)


def _backward(residuals: Any, gradient: jax.Array) -> tuple[_Operands, None, None]:
    o, dropout, probabilities, output = residuals
    dtype = o.query.dtype
    of_value = _product("hblk,hble->hbke", _drop(probabilities, dropout), gradient)
    of_weighted = _product("hble,hbke->hblk", gradient, o.value).astype(dtype)
    mean = jnp.sum(gradient.astype(o.wide) * output.astype(o.wide), axis=-1, keepdims=True)
    of_probabilities = _drop(of_weighted.astype(o.wide), dropout) - mean
    of_scores = (probabilities.astype(o.wide) * of_probabilities * o.scale).astype(dtype)
    of_query = of_content_rows = _product("hblk,hbke->hble", of_scores, o.key)
    of_key = _product("hblk,hble->hbke", of_scores, o.content_rows())
    found = {"key": of_key, "value": of_value, "content_bias": jnp.sum(of_content_rows, axis=(1, 2))}
    if o.n_positions:
        of_table = _by_distance(of_scores, 1 + o.n_positions + _behind(o.n_positions))
        if o.position_key is not None:
            of_position_rows = _product("hnw,hwe->hne", of_table, _padded(o.position_key)).reshape(o.query.shape)
            of_query += of_position_rows
            found["position_key"] = _unpadded(_product("hnw,hne->hwe", of_table, o.position_rows()), o)
            found["position_bias"] = jnp.sum(of_position_rows, axis=(1, 2))
        found["position_score"] = _unpadded(jnp.sum(of_table.astype(o.wide), axis=1), o)
    found["query"] = of_query
    gradients = _Operands(
        *(None if given is None else found[name].astype(given.dtype) for name, given in o._asdict().items())
    )
    return gradients, None, None


_attend.defvjp(_forward, _backward)


def _scores_by_distance(operands: _Operands) -> jax.Array | None:
    """Returns scores of all distances [H, B or 1, L, W], or None if there are neither position keys nor scores."""
    o = operands
    n_head, batch, n_query, _ = o.query.shape
    if o.position_key is not None:
        table = _product("hne,hwe->hnw", o.position_rows(), _padded(o.position_key))
        table = table.reshape(n_head, batch, n_query, -1)
        if o.position_score is not None:
            table += _padded(o.position_score).astype(o.wide)[:, None, None, :]
    elif o.position_score is not None:
        row = _padded(o.position_score).astype(o.wide)[:, None, None, :]
        table = jnp.broadcast_to(row, (n_head, 1, n_query, row.shape[-1]))
    else:
        return None
    return _narrow(table * o.scale, o)


def _padded(by_distance: jax.Array) -> jax.Array:
    """Puts zeros around [H, P, ..]: [H, W, ..]. The first column is what the shift of causal scores takes away."""
    behind = _behind(by_distance.shape[1])
    return jnp.pad(by_distance, [(0, 0), (1, behind), *[(0, 0)] * (by_distance.ndim - 2)])


def _behind(n_positions: int) -> int:
    return -(n_positions + 1) % _ALIGNED


def _unpadded(by_column: jax.Array, operands: _Operands) -> jax.Array:
    """[H, W, ..] -> [H, P, ..]."""
    return by_column[:, 1 : operands.n_positions + 1]


def _by_key(table: jax.Array, n_keys: int) -> jax.Array:
    """Moves scores from "column = distance" to "column = key": [H, B, L, W] -> [H, B, L, K].

    Query i meets key j in column 1 + (L - 1 - i) + j, so that it is number i (W - 1) + j behind the first L numbers.
    Pairs of a causal segment whose column does not exist read the next row.
    """
    *lead, n_query, width = table.shape
    behind = table.reshape(*lead, n_query * width)[..., n_query:]
    return behind.reshape(*lead, n_query, width - 1)[..., :n_keys]


def _by_distance(scores: jax.Array, width: int) -> jax.Array:
    """Returns the transpose of `_by_key`, where those pairs are 0: [H, B, L, K] -> [H, B L, W]."""
    n_head, batch, n_query, n_keys = scores.shape
    wide = jnp.pad(scores, [(0, 0)] * 3 + [(0, width - 1 - n_keys)]).reshape(n_head, batch, -1)
    return jnp.pad(wide, [(0, 0), (0, 0), (n_query, 0)]).reshape(n_head, batch * n_query, width)


def _drop(array: jax.Array, dropout: Dropout | None) -> jax.Array:
    """Applies the mask of dropout to [H, B, L, K], and divides by 1 - rate."""
    if dropout is None:
        return array
    n_head, batch, *lengths = array.shape
    kept = dropout.mask(batch, n_head, *lengths).swapaxes(0, 1)
    return jnp.where(kept, array / jnp.asarray(1 - dropout.rate, array.dtype), 0)


def _biased(rows: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[H, B, L, E] and [H, E] -> [H, B, L, E]."""
    return rows if bias is None else rows + bias[:, None, None, :]


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies, and adds in at least float32."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(equation, left, right, preferred_element_type=wide)


def _narrow(scores: jax.Array, operands: _Operands) -> jax.Array:
    if operands.query.dtype.itemsize > 2:
        return scores
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(scores, -largest, largest).astype(jnp.float16)
