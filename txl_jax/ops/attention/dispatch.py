"""The entry to attention, which checks the arguments and runs the chosen implementation.

The implementation runs over the shards of the ambient mesh.

All paths give the same numbers up to rounding, and draw the same dropout masks. Those other than
the reference are imported when they are first used: Pallas takes a while.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from txl_jax.ops.attention import check, choose, problem, reference
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import (
    AttentionCall,
    CachedOperands,
    Implementation,
    Operands,
    Position,
    Ring,
)
from txl_jax.ops.matmul import Int8
from txl_jax.sharding import axes
from txl_jax.sharding.activations import batch_spec, shard_map
from txl_jax.sharding.mesh import DATA, FSDP, TENSOR, ambient_mesh


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
    implementation: Implementation | str = choose.AUTO,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . r_(i-j) + s_(i-j)) / sqrt(E),
    with M + i - j in place of i - j where M keys are memory (Dai et al., 2019, section 3.3). Keys
    may lie before the segment only, or on both sides (`Visibility.causal`). Only the reference has
    forward-mode derivatives (`jax.jvp`).

    Args:
      query: [B, H, L, E], of any floating-point type, which all others have too (`position_score`
        aside).
      key, value: [B, H, K, E], memory first.
      position_key: [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`), or None for
        none and no biases.
      content_bias, position_bias: [H, E], u and v, or None.
      position_score: [H, P], added to these distances' scores before the division, also without
        keys, or None.
      visibility: Which keys a query sees. One that sees none gets zeros.
      dropout: Dropout on the probabilities, as (rate, seed) with a seed uint32 [] that is new in
        each layer and update,
        or None.
      implementation: A path ("auto", "reference", "tiled", "stored", "fused"), or an earlier choice
        (`choose.resolve`).

    Raises:
      ValueError: If shapes or dtypes do not match, a bias has no position keys, or a rate is not in
        [0, 1).
      UserError: If the path is unknown, or cannot serve this call.
    """
    operands = Operands(
        query, key, value, position_key, content_bias, position_bias, position_score
    )
    check.operands_fit(operands, visibility)
    dropout = check.dropout_of(dropout, query.shape[1])
    # In a run `runs.build` has chosen; its choice stays if it can serve this call.
    call = describe(operands, visibility, dropout)
    implementation = choose.resolve(implementation, call)
    if implementation.path == "reference":
        return reference.attention(operands, visibility, dropout)
    compute, shards = _function_of(implementation, call), shards_of(*query.shape[:2])
    if shards is None:
        return compute(operands, visibility, dropout)

    def on_one(operands: Operands, visibility: Visibility, dropout: Dropout | None) -> jax.Array:
        if dropout is not None:  # The masks of the whole batch.
            row = jax.lax.axis_index(shards.rows) * shards.batch if shards.rows else 0
            head = jax.lax.axis_index(shards.heads) * shards.n_head if shards.heads else 0
            dropout = dropout.replace(
                first_row=dropout.first_row + row, first_head=dropout.first_head + head
            )
        return compute(operands, visibility, dropout)

    specs = (
        shards.specs(operands),
        jax.tree.map(lambda _: shards.by_row(), visibility),
        jax.tree.map(lambda _: PartitionSpec(), dropout),
    )
    return shard_map(on_one, in_specs=specs, out_specs=shards.by_both())(
        operands, visibility, dropout
    )


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Ring,
    position: Position,
    visibility: CachedVisibility,
    *,
    implementation: Implementation | str = choose.AUTO,
) -> jax.Array:
    """Computes weighted sums of the values of a KV cache and of the segment: [B, H, L, E].

    For inference only.

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key, value: [B, H, L, E], of the segment.
      ring: Stored keys [B, H, E, R] and values [B, H, R, E], of any type, int8 with a scale per
        slot included.
      position: Queries [B, H, L, E] with v instead of u, position keys [H, E, P] or None, and
        scores [H, P] to add,
        divided by sqrt(E), or None: keys, scores or both, of the distances P - 1, .., 0, of which
          the largest stands for all beyond it. None without relative positions.
      implementation: A path, or an earlier choice. A segment of one token always uses the
        reference.

    Raises:
      ValueError: If shapes or dtypes do not match, or `position` has neither keys nor scores.
      UserError: If the path is unknown, or cannot serve this call.
    """
    operands = CachedOperands(query, key, value, ring, position)
    check.cached_operands_fit(operands, visibility)
    call = describe_cached(operands, visibility)
    implementation = choose.resolve(implementation, call)
    if implementation.path == "reference":
        return reference.cached_attention(operands, visibility)
    compute = _function_of(implementation, call)
    operands = jax.tree.map(  # The other implementations multiply floating-point numbers only.
        lambda array: array.dequantize(query.dtype) if isinstance(array, Int8) else array,
        operands,
        is_leaf=lambda array: isinstance(array, Int8),
    )
    shards = shards_of(*query.shape[:2])
    if shards is None:
        return compute(operands, visibility)
    of_visibility = jax.tree.map(lambda _: shards.by_row(), visibility).replace(
        write_index=PartitionSpec()
    )
    specs = shards.specs(operands), of_visibility
    return shard_map(compute, in_specs=specs, out_specs=shards.by_both())(operands, visibility)


def _function_of(implementation: Implementation, call: AttentionCall) -> Callable[..., jax.Array]:
    """Returns the function of a path other than the reference.

    The function takes operands, visibility and, in training, dropout.
    """
    if implementation.path == "stored":
        from txl_jax.ops.attention.stored import stored_attention

        return stored_attention
    options: dict[str, Any] = {"tile": implementation.tile}
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled import cached, training

        tiled: Any = cached.tiled_cached_attention if call.cached else training.tiled_attention
        return functools.partial(tiled, **options)
    from txl_jax.ops.attention.tpu import cached as cached_kernel
    from txl_jax.ops.attention.tpu import kernels

    options["interpret"] = implementation.interpret
    if call.cached:
        return functools.partial(cached_kernel.tpu_cached_attention, call, **options)
    options["kernel"] = implementation.kernel
    return functools.partial(kernels.tpu_attention, call, **options)


# The part of a call that one device of the ambient mesh computes: rows over data x fsdp, heads over
# tensor.


class Shards(NamedTuple):
    """A division of rows and heads among devices."""

    rows: tuple[str, ...]  # Mesh axes that share the rows, or () if each device has all.
    heads: str | None  # Mesh axis that shares the heads, or None if each device has all.
    batch: int  # Rows of one device.
    n_head: int  # Heads of one device.

    def by_row(self) -> PartitionSpec:
        """Returns the sharding of an array [B, ...]."""
        return PartitionSpec(self.rows or None)

    def by_both(self) -> PartitionSpec:
        """Returns the sharding of an array [B, H, ...]."""
        return PartitionSpec(self.rows or None, self.heads)

    def specs(self, operands: Operands | CachedOperands) -> Any:
        """Returns the shardings of arrays [B, H, ., .], and of others, which begin with H."""
        of_heads = PartitionSpec(self.heads)
        return jax.tree.map(lambda array: self.by_both() if array.ndim == 4 else of_heads, operands)


def shards_of(batch: int, n_head: int) -> Shards | None:
    """Returns how B rows and H heads are divided, or None if they are not divided here.

    They are not if there is one device, if the ambient mesh is the caller's with axes of other
    names, or if the call is inside the caller's own `shard_map`, where arrays are already one
    device's.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types.get(name, AxisType.Manual) == AxisType.Manual for name in (DATA, FSDP, TENSOR)):
        return None
    rows, [heads] = batch_spec(batch), axes.spec(axes.HEADS)
    if n_head % mesh.shape[heads]:
        heads = None
    num_heads = 1 if heads is None else mesh.shape[heads]
    return Shards(
        rows, heads, batch // math.prod(mesh.shape[name] for name in rows), n_head // num_heads
    )


def describe(operands: Operands, visibility: Visibility, dropout: Dropout | None) -> AttentionCall:
    """Returns the description of a call of `attention` on one device of the ambient mesh."""
    return _describe(
        operands.query,
        visibility,
        n_keys=visibility.n_keys,
        n_positions=0 if operands.position_key is None else operands.position_key.shape[1],
        has_position_score=operands.position_score is not None,
        causal=visibility.causal,
        dropout=dropout is not None,
    )


def describe_cached(operands: CachedOperands, visibility: CachedVisibility) -> AttentionCall:
    """Returns the description of a call of `cached_attention` on one device of the ambient mesh."""
    _, position_key, position_score = operands.position or (None, None, None)
    stored = operands.ring[0]
    return _describe(
        operands.query,
        visibility,
        n_keys=visibility.capacity + visibility.segment_len,
        n_positions=0 if position_key is None else position_key.shape[2],
        has_position_score=position_score is not None,
        capacity=visibility.capacity,
        cache_dtype=None if isinstance(stored, Int8) else stored.dtype.name,
    )


def _describe(
    query: jax.Array, visibility: Visibility | CachedVisibility, **others: Any
) -> AttentionCall:
    device, (batch, n_head, segment_len, width) = problem.default_device(), query.shape
    shards = shards_of(batch, n_head)
    return AttentionCall(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=query.dtype.name,
        batch=batch if shards is None else shards.batch,
        n_head=n_head if shards is None else shards.n_head,
        segment_len=segment_len,
        d_head=width,
        window=visibility.window,
        documents=visibility.document_start is not None,
        **others,
    )
