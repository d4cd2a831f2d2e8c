"""Inference: the forward pass with a KV cache and prepared parameters (`inference.prepare`).

    cache = init_cache(params, batch_size=1, segment_len=128, mem_len=3800)
    hidden, cache = forward(params, tokens, cache)

Its mirror is training's forward pass, the definition: `modules.transformer_xl` (embedding, end),
`modules.block` (`_forward_layer` here) and `modules.attention`. Training projects the whole memory
to keys and values, and the position codes to position keys, in every segment and layer, as it must.
Here the cache holds keys and values, and position keys are computed once. Both passes share `ops`
and the objects of `modules.positions`. tests/inference/test_forward.py holds the numbers equal up
to rounding, for every kind of model, over ten segments.

Every encoding admits it: with relative positions (as the paper's and Shaw's) keys do not depend on
their position, and absolute positions are in the stored states, which are reused as they are. An
RNN has no keys (`inference.scorer`).

Layers are unrolled and not a `lax.scan`: a scan would slice each layer's parameters and cache out
of stacked arrays, that is copy them, in every step. Compile time therefore grows with N (0.2 s a
layer on a CPU).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

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
from txl_jax.ops.attention.reference import biased
from txl_jax.ops.matmul import Int8, project
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
    c, initial = params.model.config, params.initial
    capacity = cache_lib.cache_capacity(mem_len=mem_len, segment_len=segment_len)
    lead = (batch_size, *initial.keys[0].shape)

    def fill(row: jax.Array, axis: int) -> jax.Array | Int8:
        ring = jnp.broadcast_to(
            jnp.expand_dims(row[None], axis), (*lead[:axis], capacity, *lead[axis:])
        )
        return cache_lib.as_cache_dtype(ring, dtype or jnp.dtype(c.dtype), axis=5 - axis)

    return KVCache(
        keys=tuple(fill(row, 3) for row in initial.keys),
        values=tuple(fill(row, 2) for row in initial.values),
        valid=jnp.full(
            (batch_size,), memory_lib.start_valid(mem_len, c.compat.memory_start), jnp.int32
        ),
        write_index=jnp.zeros((), jnp.int32),
        mem_len=mem_len,
    )


def forward(params: DecodeParams, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Computes the hidden states of a segment as `TransformerXL.__call__` does, without dropout.

    int [B, L] -> hidden states [B, L, D] of the last layer, and the cache moved on by L positions.
    L is 1 if each row of the cache has its own index. Raises `UserError` if L does not divide the
    cache's capacity, or the parameters were prepared for shorter lengths.
    """
    segment_len = tokens.shape[1]
    found = f"the cache has {cache.capacity} slots and the segment {segment_len} tokens"
    wrong = f"{found}, but together they must be at most {params.max_keys}"
    require(
        cache.capacity + segment_len <= params.max_keys,
        f"{wrong}. Prepare the parameters for these lengths.",
    )
    wrong = f"{found}, but the slots must be a multiple of the tokens"
    require(cache.capacity % segment_len == 0, f"{wrong}. Make the cache for this segment length.")
    hidden, keys, values = apply_layers(params, tokens, cache)
    cache = cache_lib.write(cache, keys, values, after=hidden)
    if (documents := memory_lib.documents(tokens, params.model.end_token)) is not None:
        cache = cache.replace(valid=documents.valid(cache.valid))
    return finish(params, hidden), cache


def apply_layers(
    params: DecodeParams, tokens: jax.Array, cache: KVCache
) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]:
    """Computes the part of `forward` before `finish`, without writing to the cache.

    The cache's index may have any value, and may be [B].

    int [B, L] -> hidden states [B, L, D], and keys and values per layer, each [B, H, L, E].
    """
    model = params.model
    # None unless data.reset_at keeps documents apart.
    documents = memory_lib.documents(tokens, model.end_token)
    start = None if documents is None else documents.start
    visibility = CachedVisibility(
        cache.valid,
        cache.write_index,
        tokens.shape[1],
        cache.capacity,
        params.window,
        document_start=start,
    )
    hidden = apply(
        model, params.embed_and_norm, tokens, clamp_len=params.clamp_len, method=model.embed
    )
    keys, values = [], []
    for layer, ring_keys, ring_values in zip(params.layers, cache.keys, cache.values, strict=True):
        hidden, key, value = _forward_layer(
            layer, model, hidden, (ring_keys, ring_values), visibility
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
    ring: tuple[Any, Any],
    visibility: CachedVisibility,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies a layer as `Block` does.

    [B, L, D] -> outputs [B, L, D], and the segment's keys and values [B, H, L, E].
    """
    attention_norm, feed_forward_norm = (norm_of(model, scales) for scales in layer.norms)
    pre = model.config.layer_norm is NormPlace.PRE
    if layer.position_vectors is not None:
        inputs += layer.position_vectors[-inputs.shape[1] :][None]
    heads = query_key_value(layer, attention_norm(inputs) if pre else inputs)
    query, key, value = (
        constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM) for states in heads
    )
    position, position_keys = None, layer.position_keys
    if position_keys is not None:
        position = biased(query, position_keys.bias), position_keys.key, position_keys.score
    content = biased(query, layer.content_bias), key, value, ring
    attended = _attend(*content, position, visibility, model.implementations.cached)
    batch, _, segment_len, _ = attended.shape
    attended = project(attended.swapaxes(1, 2).reshape(batch, segment_len, -1), layer.output)
    if pre:
        middle = inputs + attended
        return middle + feed_forward(feed_forward_norm(middle), *layer.feed_forward), key, value
    middle = attention_norm(inputs + attended)
    return feed_forward_norm(middle + feed_forward(middle, *layer.feed_forward)), key, value


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Any,
    position: Any,
    visibility: CachedVisibility,
    path: Any,
) -> jax.Array:
    """Computes `cached_attention`, row by row if each has its own index.

    Only attention is: with `vmap` over all of a step, products of 16 rows with a matrix are made as
    those of one row are (`ops.matmul`), and the server writes 138 tokens/s, not 152 (wt103_base, an
    AMD EPYC).
    """
    if jnp.ndim(visibility.write_index) == 0:
        return cached_attention(query, key, value, ring, position, visibility, implementation=path)
    position_query, *of_all = (None,) if position is None else position

    def of_row(of_one: Any, write_index: jax.Array) -> jax.Array:
        query, key, value, ring, position_query, valid, start = jax.tree.map(
            lambda array: array[None], of_one
        )
        own = dataclasses.replace(
            visibility, valid=valid, write_index=write_index, document_start=start
        )
        place = None if position is None else (position_query, *of_all)
        return cached_attention(query, key, value, ring, place, own, implementation=path)[0]

    rows = query, key, value, ring, position_query, visibility.valid, visibility.document_start
    return jax.vmap(of_row)(rows, visibility.write_index)
