"""The entry to attention: runs the implementation that was chosen, over the shards of the ambient mesh.

    reference  whole scores [B, H, L, K] (`relative.py`, `dot_product.py`, `cached.py`): the definition of correct
    tiled      XLA loops over tiles of the scores (`tiled/`), on any platform
    stored     plain XLA with its own backward pass (`stored.py`), in training on any platform: what GPUs take
    fused      Pallas kernels for TPUs (`tpu/`)

All give the same numbers up to rounding, and draw the same dropout masks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from txl_jax.ops.attention import arguments, cached, choice, kernels
from txl_jax.ops.attention.cached import CachedVisibility, Position, Ring
from txl_jax.ops.attention.device import default_device
from txl_jax.ops.attention.dot_product import dot_product_attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Implementation, Problem
from txl_jax.ops.attention.relative import relative_attention
from txl_jax.ops.attention.shards import Shards, shards_of
from txl_jax.ops.matmul import Int8
from txl_jax.sharding.activations import shard_map


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array | None = None,
    *,
    content_bias: jax.Array | None = None,
    position_bias: jax.Array | None = None,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    dropout: Dropout | tuple[float | jax.Array, jax.Array] | None = None,
    implementation: Implementation | str = choice.AUTO,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . r_(i-j) + s_(i-j)) / sqrt(E), with M + i - j in
    place of i - j where M keys are memory (Dai et al., 2019, section 3.3). Keys may lie before the segment only, or on
    both sides (`Visibility.causal`). Only the reference has forward-mode derivatives (`jax.jvp`).

    Args:
      query: [B, H, L, E], of any floating-point type, which all others have too (`position_score` aside).
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`); None: without, and then without
        biases too.
      content_bias: [H, E], u; None: without.
      position_bias: [H, E], v; None: without.
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E), with or without
        position keys; None: nothing.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities, as (rate, seed) with a seed uint32 [] that is new in each layer and update;
        None: none.
      implementation: a path ("auto", "reference", "tiled", "stored", "fused"), or what was chosen before
        (`choice.resolve`).

    Raises:
      ValueError: shapes or types that do not fit each other, a bias without position keys, a rate not in [0, 1).
      UserError: an unknown path, or one that cannot serve this call.
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "position_key": position_key,
        "content_bias": content_bias,
        "position_bias": position_bias,
        "position_score": position_score,
    }
    arguments.check(arrays, visibility)
    dropout = arguments.dropout_of(dropout, query.shape[1])
    problem = describe(query, position_key, position_score, visibility, dropout)
    implementation = choice.resolve(implementation, problem)
    compute = _of_training(implementation)
    shards = shards_of(query.shape[0], query.shape[1])
    if implementation.path == "reference" or shards is None:
        return compute(arrays, visibility, dropout)
    return _over_shards(compute, arrays, visibility, dropout, shards)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Ring,
    position: Position,
    visibility: CachedVisibility,
    *,
    implementation: Implementation | str = choice.AUTO,
) -> jax.Array:
    """Computes weighted sums of the values of a KV cache and of the segment: [B, H, L, E]; for inference only.

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key: [B, H, L, E], of the segment.
      value: [B, H, L, E].
      ring: stored keys [B, H, E, R] and values [B, H, R, E], of any type, int8 with a scale per slot included.
      position: as of `cached.cached_attention`.
      visibility: which keys a query sees.
      implementation: a path, or what was chosen before; a segment of one token is always the reference's.

    Raises:
      ValueError: shapes or types that do not fit each other; `position` has neither keys nor scores.
      UserError: an unknown path, or one that cannot serve this call.
    """
    arguments.check_cached({"query": query, "key": key, "value": value}, ring, position, visibility)
    problem = describe_cached(query, ring, position, visibility)
    implementation = choice.resolve(implementation, problem)
    if implementation.path == "reference":
        return cached.cached_attention(query, key, value, ring, position, visibility)
    compute = kernels.cached(implementation)
    ring, position = jax.tree.map(  # The other implementations multiply floating-point numbers only.
        lambda array: array.dequantize(query.dtype) if isinstance(array, Int8) else array,
        (ring, position),
        is_leaf=lambda array: isinstance(array, Int8),
    )
    shards = shards_of(query.shape[0], query.shape[1])
    if shards is None:
        return compute(query, key, value, ring, position, visibility)
    return _cached_over_shards(compute, (query, key, value), ring, position, visibility, shards)


def describe(
    query: jax.Array,
    position_key: jax.Array | None,
    position_score: jax.Array | None,
    visibility: Visibility,
    dropout: Dropout | None,
) -> Problem:
    """Returns the description of a call of `attention` on one device of the ambient mesh."""
    device, (batch, n_head) = default_device(), _on_one_device(query.shape[0], query.shape[1])
    return Problem(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=query.dtype.name,
        batch=batch,
        n_head=n_head,
        segment_len=query.shape[2],
        n_keys=visibility.n_keys,
        d_head=query.shape[3],
        n_positions=0 if position_key is None else position_key.shape[1],
        has_position_score=position_score is not None,
        causal=visibility.causal,
        window=visibility.window,
        dropout=dropout is not None,
        documents=visibility.document_start is not None,
    )


def describe_cached(query: jax.Array, ring: Ring, position: Position, visibility: CachedVisibility) -> Problem:
    """Returns the description of a call of `cached_attention` on one device of the ambient mesh."""
    device, (batch, n_head) = default_device(), _on_one_device(query.shape[0], query.shape[1])
    _, position_key, position_score = position or (None, None, None)
    return Problem(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=query.dtype.name,
        batch=batch,
        n_head=n_head,
        segment_len=query.shape[2],
        n_keys=visibility.capacity + query.shape[2],
        d_head=query.shape[3],
        n_positions=0 if position_key is None else position_key.shape[2],
        has_position_score=position_score is not None,
        window=visibility.window,
        capacity=visibility.capacity,
        cache_dtype=None if isinstance(ring[0], Int8) else ring[0].dtype.name,
        documents=visibility.document_start is not None,
    )


def _on_one_device(batch: int, n_head: int) -> tuple[int, int]:
    """Returns the rows and heads of a device of the ambient mesh."""
    shards = shards_of(batch, n_head)
    return (batch, n_head) if shards is None else (shards.batch, shards.n_head)


def _of_training(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function (arrays by name, visibility, dropout) -> [B, H, L, E]."""
    if implementation.path == "reference":
        return _reference
    function = kernels.training(implementation)
    return lambda arrays, visibility, dropout: function(**arrays, visibility=visibility, dropout=dropout)


def _reference(arrays: Mapping[str, Any], visibility: Visibility, dropout: Dropout | None) -> jax.Array:
    if arrays["position_key"] is not None:
        return relative_attention(**arrays, visibility=visibility, dropout=dropout)
    given = {name: arrays[name] for name in ("query", "key", "value", "position_score")}
    return dot_product_attention(**given, visibility=visibility, dropout=dropout)


def _over_shards(
    compute: Callable[..., jax.Array],
    arrays: Mapping[str, jax.Array | None],
    visibility: Visibility,
    dropout: Dropout | None,
    shards: Shards,
) -> jax.Array:
    """Computes each device's rows and heads there, with the dropout masks of the whole batch."""
    specs = {
        name: shards.by_both() if name in ("query", "key", "value") else shards.by_head()
        for name, array in arrays.items()
        if array is not None
    }
    of_visibility = jax.tree.map(lambda _: shards.by_row(), visibility)
    of_dropout = jax.tree.map(lambda _: PartitionSpec(), dropout)

    def on_one(given: Any, visibility: Visibility, dropout: Dropout | None) -> jax.Array:
        if dropout is not None:
            dropout = dropout.replace(
                first_row=dropout.first_row + (jax.lax.axis_index(shards.rows) * shards.batch if shards.rows else 0),
                first_head=dropout.first_head
                + (jax.lax.axis_index(shards.heads) * shards.n_head if shards.heads else 0),
            )
        return compute({name: given.get(name) for name in arrays}, visibility, dropout)

    mapped = shard_map(on_one, in_specs=(specs, of_visibility, of_dropout), out_specs=shards.by_both())
    result: jax.Array = mapped({name: arrays[name] for name in specs}, visibility, dropout)
    return result


def _cached_over_shards(
    compute: Callable[..., jax.Array],
    heads_of: tuple[jax.Array, jax.Array, jax.Array],
    ring: tuple[jax.Array, jax.Array],
    position: Position,
    visibility: CachedVisibility,
    shards: Shards,
) -> jax.Array:
    """Computes each device's rows and heads of the KV cache there."""
    by_both, by_head = shards.by_both(), shards.by_head()
    of_position = None
    if position is not None:
        _, position_key, position_score = position
        of_position = (
            by_both,
            None if position_key is None else by_head,
            None if position_score is None else by_head,
        )
    placed: Any = {"valid": shards.by_row(), "write_index": PartitionSpec()}
    of_visibility = dataclasses.replace(visibility, **placed)
    specs = ((by_both,) * 3, (by_both,) * 2, of_position, of_visibility)
    mapped = shard_map(
        lambda own, ring, position, visibility: compute(*own, ring, position, visibility),
        in_specs=specs,
        out_specs=by_both,
    )
    result: jax.Array = mapped(heads_of, ring, position, visibility)
    return result
