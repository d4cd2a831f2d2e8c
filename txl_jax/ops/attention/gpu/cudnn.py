"""Attention in cuDNN's kernels, with the position scores as a bias: for where Triton cannot serve.

cuDNN adds a bias [B, H, L, K] to the scores of its flash attention. Here it holds the position scores, moved to where
their keys are, in 16 bits, and what is hidden: of a chunk of rows at a time, which the backward pass computes again.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from txl_jax.ops.attention import positions
from txl_jax.ops.attention.cached import CachedVisibility, Position
from txl_jax.ops.attention.gpu.chunks import rows_per_chunk
from txl_jax.ops.attention.masks import Visibility


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array | None,
    content_bias: jax.Array | None,
    position_bias: jax.Array | None,
    position_score: jax.Array | None,
    *,
    visibility: Visibility,
    interpret: bool = False,
    table_bytes: int | None = None,
) -> jax.Array:
    """Computes weighted sums of the values, without dropout: [B, H, L, E]; arguments as of `gpu_attention`."""
    scale, n_keys = query.shape[3] ** -0.5, key.shape[2]

    @jax.checkpoint
    def of_rows(rows: tuple[jax.Array, jax.Array, jax.Array, Visibility]) -> jax.Array:
        query, key, value, visibility = rows
        mask = visibility.mask()[:, None]
        by_distance = _by_distance(_biased(query, position_bias), position_key, position_score)
        bias = None
        if by_distance is not None:
            bias = (positions.by_key(by_distance, n_keys) * scale).astype(query.dtype)
        output = _attend(_biased(query, content_bias), key, value, bias, mask, scale, interpret)
        if not visibility.may_hide_all:
            return output
        # A query without keys gets their mean.
        return jnp.where(jnp.any(mask, axis=3)[..., None], output, 0)

    batch, n_head, segment_len, _ = query.shape
    size = rows_per_chunk(batch, n_head * segment_len * n_keys * query.dtype.itemsize, table_bytes)
    return _map_chunks(of_rows, (query, key, value, visibility), batch, size)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    position: Position,
    visibility: CachedVisibility,
    *,
    interpret: bool = False,
    table_bytes: int | None = None,
) -> jax.Array:
    """Computes weighted sums of the values of a KV cache: [B, H, L, E]; arguments as of `gpu_cached_attention`."""
    batch, n_head, segment_len, _ = query.shape
    row_L = jnp.arange(segment_len, dtype=jnp.int32)[:, None]
    distance_LxK = row_L + jnp.concatenate([visibility.age(), -row_L[:, 0]])[None, :]
    mask = jnp.concatenate(
        [
            visibility.stored_mask(),
            jnp.broadcast_to(visibility.own_mask(), (batch, segment_len, segment_len)),
        ],
        axis=2,
    )
    position_queries, position_keys, position_scores = position or (None, None, None)
    if position_keys is not None:
        position_keys = position_keys.swapaxes(1, 2)

    def of_rows(rows: Any) -> jax.Array:
        (query, key, value), (stored_key, stored_value), position_query, mask = rows
        key = jnp.concatenate([stored_key.swapaxes(2, 3).astype(key.dtype), key], axis=2)
        value = jnp.concatenate([stored_value.astype(value.dtype), value], axis=2)
        by_distance = _by_distance(position_query, position_keys, position_scores)
        bias = None
        if by_distance is not None:
            largest = by_distance.shape[3] - 1
            column = largest - jnp.clip(distance_LxK, 0, largest)
            column = jnp.broadcast_to(column, (*by_distance.shape[:2], *column.shape))
            bias = jnp.take_along_axis(by_distance, column, axis=3, mode="promise_in_bounds").astype(query.dtype)
        return _attend(query, key, value, bias, mask[:, None], 1.0, interpret)

    row_bytes = n_head * segment_len * distance_LxK.shape[1] * query.dtype.itemsize
    rows = (query, key, value), ring, position_queries, mask
    return _map_chunks(of_rows, rows, batch, rows_per_chunk(batch, row_bytes, table_bytes))


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """Runs cuDNN's attention on [B, H, L, E], a bias [B, H, L, K] and a mask [B, 1, L, K]."""
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    implementation: Literal["xla", "cudnn"] = "xla" if interpret else "cudnn"
    output = jax.nn.dot_product_attention(
        query, key, value, bias=bias, mask=mask, scale=scale, implementation=implementation
    )
    return output.swapaxes(1, 2)


def _biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    return query if bias is None else query + bias[None, :, None, :]


def _by_distance(query: jax.Array | None, position_key: jax.Array | None, score: jax.Array | None) -> jax.Array | None:
    """Returns scores by distance: [B, H, L, E] x [H, P, E] + [H, P] -> [B, H, L, P]; None: there are none."""
    if query is None or (position_key is None and score is None):
        return None
    batch, n_head, segment_len, width = query.shape
    wide = jnp.float32
    if position_key is None:
        assert score is not None
        return jnp.broadcast_to(score.astype(wide)[None, :, None, :], (batch, n_head, segment_len, score.shape[1]))
    query = query.transpose(1, 0, 2, 3).reshape(n_head, batch * segment_len, width)
    scores = jnp.einsum("hne,hpe->hnp", query, position_key, preferred_element_type=wide)
    if score is not None:
        scores += score.astype(wide)[:, None, :]
    return scores.reshape(n_head, batch, segment_len, -1).transpose(1, 0, 2, 3)


def _map_chunks(of_rows: Callable[[Any], jax.Array], rows: Any, batch: int, size: int) -> jax.Array:
    """Runs a function of arrays [b, ..] -> [b, ..] over chunks of the rows, one after the other."""
    if size >= batch:
        return of_rows(rows)
    whole = batch // size * size
    result = jax.lax.map(of_rows, jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), rows))
    result = result.reshape(whole, *result.shape[2:])
    if whole == batch:
        return result
    return jnp.concatenate([result, of_rows(jax.tree.map(lambda x: x[whole:], rows))])
