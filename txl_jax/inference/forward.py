"""Inference: the forward pass with a KV cache and prepared parameters (`inference.prepare`).

    cache = init_cache(params, batch_size=1, segment_len=128, mem_len=3800)
    hidden, cache = forward(params, tokens, cache)

It mirrors the training forward pass, which is the definition: `modules.transformer_xl` (embedding
and end), `modules.block` (`_forward_layer`) and `modules.attention`. In training, the whole memory
must be projected to keys and values, and positional encodings to position keys, in every segment
and layer. At inference the cache contains keys and values, and position keys are computed once.
Both passes share `ops` and the objects of `modules.positions`. tests/inference/test_forward.py
checks that the numbers are equal up to rounding, for every kind of model, over ten segments.

This works for every encoding: with relative positions (the paper's and Shaw's) keys do not depend
on their position, and absolute positions are part of the stored states, which are reused unchanged.
An RNN has no keys (`inference.scorer`).

Layers are unrolled instead of a `lax.scan`, which would slice, and thereby copy, each layer's
parameters and cache out of stacked arrays in every step. Compile time therefore grows with N (0.2 s
per layer on a CPU).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import NormPlace
from txl_jax.config.config_tree import require
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.cache import KVCache
from txl_jax.inference.prepare import DecodeParams, Layer, apply, norm_of, query_key_value
from txl_jax.modules.block import feed_forward
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.attention import CachedVisibility, cached_attention
from txl_jax.ops.attention.problem import Position, Ring
from txl_jax.ops.attention.reference import biased
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


def init_cache(
    params: DecodeParams,
    *,
    batch_size: int,
    mem_len: int,
    segment_len: int,
    dtype: jnp.dtype | None = None,
) -> KVCache:
    """Returns the cache before the first segment, stored as `dtype`.

    If `dtype` is None, the cache is stored in the model's compute dtype.
    """
    config = params.model.config
    cache_dtype = dtype or jnp.dtype(config.dtype)
    capacity = cache_lib.cache_capacity(mem_len=mem_len, segment_len=segment_len)

    # Every slot has the key and value of a zero state. Keys are [B, H, E, R], values [B, H, R, E].
    keys = []
    values = []
    for key, value in zip(params.initial.keys, params.initial.values, strict=True):
        n_head, d_head = key.shape
        ring_key = jnp.broadcast_to(key[None, :, :, None], (batch_size, n_head, d_head, capacity))
        ring_value = jnp.broadcast_to(
            value[None, :, None, :], (batch_size, n_head, capacity, d_head)
        )
        keys.append(cache_lib.as_cache_dtype(ring_key, cache_dtype, axis=2))
        values.append(cache_lib.as_cache_dtype(ring_value, cache_dtype, axis=3))

    start_valid = memory_lib.start_valid(mem_len, config.compat.memory_start)
    return KVCache(
        keys=tuple(keys),
        values=tuple(values),
        valid=jnp.full((batch_size,), start_valid, jnp.int32),
        write_index=jnp.zeros((), jnp.int32),
        mem_len=mem_len,
    )


def forward(params: DecodeParams, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Computes the hidden states of a segment like `TransformerXL.__call__`, without dropout.

    Args:
      params: Parameters prepared for at least these lengths.
      tokens: int [B, L]. L is 1 if each row of the cache has its own index.
      cache: The cache before the segment.

    Returns:
      Hidden states [B, L, D] of the last layer, and the cache advanced by L positions.

    Raises:
      UserError: If L does not divide the cache's capacity, or the parameters were prepared for
        shorter lengths.
    """
    segment_len = tokens.shape[1]
    sizes = f"the cache has {cache.capacity} slots and the segment {segment_len} tokens"
    # Position keys were prepared for at most this many keys: M + 1 if tokens are read one by one.
    require(
        cache.capacity + segment_len <= params.max_keys,
        f"{sizes}, but together they must be at most {params.max_keys}. "
        "Prepare the parameters for these lengths.",
    )
    require(
        cache.capacity % segment_len == 0,
        f"{sizes}, but the slots must be a multiple of the tokens. "
        "Make the cache for this segment length.",
    )

    hidden, keys, values = apply_layers(params, tokens, cache)
    # `hidden` is computed from all reads of the cache. XLA must not write before them, or it would
    # keep a copy of the cache.
    cache = cache_lib.write(cache, keys, values, after=hidden)

    # Later queries do not attend to a document that has ended in the segment.
    documents = memory_lib.documents(tokens, params.model.end_token)
    if documents is not None:
        cache = cache.replace(valid=documents.valid(cache.valid))
    return finish(params, hidden), cache


def apply_layers(
    params: DecodeParams, tokens: jax.Array, cache: KVCache
) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]:
    """Computes the part of `forward` before `finish`, without writing to the cache.

    Args:
      params: Parameters prepared for at least these lengths.
      tokens: int [B, L].
      cache: The cache before the segment. Its index may have any value, and may be [B].

    Returns:
      Hidden states [B, L, D], and the segment's keys and values of each layer, [B, H, L, E].
    """
    model = params.model
    # None unless data.reset_at keeps documents apart.
    documents = memory_lib.documents(tokens, model.end_token)
    document_start = None if documents is None else documents.start
    visibility = CachedVisibility(
        valid=cache.valid,
        write_index=cache.write_index,
        segment_len=tokens.shape[1],
        capacity=cache.capacity,
        window=params.window,
        document_start=document_start,
    )

    # The softmax's and the layers' parameters are missing here: flax asks only for those of the
    # submodules that the method calls.
    hidden = apply(
        model, params.embed_and_norm, tokens, clamp_len=params.clamp_len, method=model.embed
    )
    keys = []
    values = []
    for layer, ring_key, ring_value in zip(params.layers, cache.keys, cache.values, strict=True):
        hidden, key, value = _forward_layer(
            layer, model, hidden, (ring_key, ring_value), visibility
        )
        hidden = constrain(hidden, axes.BATCH, axes.LENGTH, None)
        keys.append(key)
        values.append(value)
    return hidden, keys, values


def finish(params: DecodeParams, hidden: jax.Array) -> jax.Array:
    """Computes the softmax's inputs from the last layer's states: [B, L, D] -> [B, L, D]."""
    return apply(params.model, params.embed_and_norm, hidden, method=params.model.finish)


def nll(params: DecodeParams, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the loss of each target in nats: [B, L, D] and int [B, L] -> [B, L]."""
    cutoffs = params.model.config.cutoffs
    return adaptive_softmax.negative_log_likelihood(hidden, targets, params.clusters, None, cutoffs)


def _forward_layer(
    layer: Layer,
    model: TransformerXL,
    inputs: jax.Array,
    ring: Ring,
    visibility: CachedVisibility,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies a layer as `Block` does.

    Args:
      layer: The layer's prepared parameters.
      model: The model, for its settings.
      inputs: [B, L, D].
      ring: The layer's stored keys [B, H, E, R] and values [B, H, R, E].
      visibility: Which keys a query sees.

    Returns:
      Outputs [B, L, D], and the segment's keys and values [B, H, L, E].
    """
    # Both norms are functions.
    attention_norm = norm_of(model, layer.attention_norm)
    feed_forward_norm = norm_of(model, layer.feed_forward_norm)
    inner, outer = layer.feed_forward
    is_pre_norm = model.config.layer_norm is NormPlace.PRE

    # The vectors end with distance 0, the segment's last token.
    if layer.position_vectors is not None:
        segment_len = inputs.shape[1]
        inputs += layer.position_vectors[-segment_len:][None]
    attention_inputs = attention_norm(inputs) if is_pre_norm else inputs
    # The query is divided by sqrt(E) already, as are u and v: its matrix was prepared so.
    query, key, value = query_key_value(layer, attention_inputs)
    query = _constrain_heads(query)
    key = _constrain_heads(key)
    value = _constrain_heads(value)

    # Relative positions have scores of their own, of queries to which v is added instead of u.
    position = None
    if layer.position_keys is not None:
        position_query = biased(query, layer.position_keys.bias)
        position = (position_query, layer.position_keys.key, layer.position_keys.score)
    attended = _attend(
        biased(query, layer.content_bias),
        key,
        value,
        ring,
        position,
        visibility,
        # Attention over a KV cache has an implementation of its own, apart from training's.
        implementation=model.implementations.cached,
    )
    attended = project(_join_heads(attended), layer.output)

    if is_pre_norm:
        middle = inputs + attended
        outputs = middle + feed_forward(feed_forward_norm(middle), inner, outer)
    else:
        middle = attention_norm(inputs + attended)
        outputs = feed_forward_norm(middle + feed_forward(middle, inner, outer))
    return outputs, key, value


def _constrain_heads(states: jax.Array) -> jax.Array:
    """Constrains the sharding of queries, keys or values, [B, H, L, E]."""
    return constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM)


def _join_heads(states: jax.Array) -> jax.Array:
    """Returns the heads' results side by side: [B, H, L, E] -> [B, L, H * E]."""
    batch, _, segment_len, _ = states.shape
    return states.swapaxes(1, 2).reshape(batch, segment_len, -1)


class _RowOperands(NamedTuple):
    """The arrays of `cached_attention` that differ between rows: [B, ..], or [..] of one row."""

    query: jax.Array  # [B, H, L, E]
    key: jax.Array  # [B, H, L, E]
    value: jax.Array  # [B, H, L, E]
    ring: Ring  # Stored keys [B, H, E, R] and values [B, H, R, E].
    position_query: jax.Array | None  # [B, H, L, E], or None without relative positions.
    valid: jax.Array  # int32 [B], how many of the latest slots may be seen.
    document_start: jax.Array | None  # int32 [B, L], or None unless documents are kept apart.


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Ring,
    position: Position,
    visibility: CachedVisibility,
    implementation: Any,
) -> jax.Array:
    """Computes `cached_attention`, row by row if each has its own index.

    Only attention is computed row by row. With `vmap` over the whole step, products of 16 rows with
    a matrix would be computed like products of one row (`ops.matmul`), and the server would write
    138 instead of 152 tokens/s (wt103_base, AMD EPYC).
    """
    has_shared_index = jnp.ndim(visibility.write_index) == 0
    if has_shared_index:
        return cached_attention(
            query, key, value, ring, position, visibility, implementation=implementation
        )

    # Position keys and scores are the same for all rows.
    position_query = None
    if position is not None:
        position_query, position_key, position_score = position

    def attend_row(row: _RowOperands, write_index: jax.Array) -> jax.Array:
        # A row is a batch of one, whose index is the shared one.
        batch = jax.tree.map(lambda array: array[None], row)
        row_visibility = dataclasses.replace(
            visibility,
            valid=batch.valid,
            write_index=write_index,
            document_start=batch.document_start,
        )
        row_position = None
        if position is not None:
            row_position = (batch.position_query, position_key, position_score)
        attended = cached_attention(
            batch.query,
            batch.key,
            batch.value,
            batch.ring,
            row_position,
            row_visibility,
            implementation=implementation,
        )
        return attended[0]

    rows = _RowOperands(
        query=query,
        key=key,
        value=value,
        ring=ring,
        position_query=position_query,
        valid=visibility.valid,
        document_start=visibility.document_start,
    )
    return jax.vmap(attend_row)(rows, visibility.write_index)
