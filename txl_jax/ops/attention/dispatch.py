"""The entry point of attention: checks the arguments and runs the chosen implementation.

All implementations except the reference run over the shards of the ambient mesh (`shard_map`). The
reference consists of plain array operations, which XLA partitions automatically.

All paths give the same numbers up to rounding, and sample the same dropout masks. Paths other than
the reference are imported when they are first used, because importing Pallas takes a while.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from txl_jax.ops.attention import check, choose, reference
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import (
    AttentionCall,
    CachedOperands,
    Implementation,
    Operands,
    Position,
    Ring,
    default_device,
)
from txl_jax.ops.attention.saved import POSITION_KEYS, mark_as_saved
from txl_jax.ops.matmul import Int8
from txl_jax.sharding import axes
from txl_jax.sharding.activations import batch_spec, gather_last_axis, shard_map
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
    dropout: ProbabilityDropout | tuple[float | jax.Array, jax.Array] | None = None,
    implementation: Implementation | str = choose.AUTO,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . r_(i-j) + s_(i-j)) / sqrt(E),
    with M + i - j instead of i - j if M keys are memory (Dai et al., 2019, section 3.3). A query
    attends only to keys up to its own position, or to keys on both sides (`Visibility.causal`).
    Only the reference has forward-mode derivatives (`jax.jvp`).

    Args:
      query: [B, H, L, E], of any floating-point dtype. All other arrays must have the same dtype,
        except `position_score`. An `nnx.Param` may be passed for any array.
      key, value: [B, H, K, E], memory first.
      position_key: [H, P, E], position keys for P distances from K - 1 down
        (`Visibility.n_positions`). None disables position keys and both biases.
      content_bias, position_bias: [H, E], u and v, or None.
      position_score: [H, P], a number per distance, added to the scores before the division, or
        None. It does not require `position_key`.
      visibility: The keys that each query attends to. A query without keys gets zeros.
      dropout: Dropout on the probabilities, as a `ProbabilityDropout`, or as (rate, seed) with a
        seed uint32 [] that is new in each layer and update, or None.
      implementation: A path ("auto", "reference", "tiled", "stored", "fused"), or an earlier choice
        (`choose.resolve`).

    Raises:
      ValueError: If shapes or dtypes do not match, a bias has no position keys, or a rate is not in
        [0, 1).
      UserError: If the path is unknown, or does not support this call.
    """
    operands = Operands(
        query=query,
        key=key,
        value=value,
        position_key=position_key,
        content_bias=content_bias,
        position_bias=position_bias,
        position_score=position_score,
    )
    check.operands_fit(operands, visibility)
    operands = _as_arrays(operands)
    # Rows and heads of all devices.
    batch, n_head = query.shape[:2]
    # A pair (rate, seed) becomes a `ProbabilityDropout`.
    dropout = check.dropout_of(dropout, n_head)

    # A run has chosen before (`runs.attention_choice`). Its choice is kept if it supports the call.
    call = describe(operands, visibility, dropout)
    implementation = choose.resolve(implementation, call)
    # XLA divides the reference over the devices by itself.
    if implementation.path == "reference":
        return reference.attention(operands, visibility, dropout)

    compute = _function_of(implementation, call)
    shards = shards_of(batch, n_head)
    if shards is None:
        return compute(operands, visibility, dropout)

    # Each device computes a part of the position keys, if they are from `ops.head_projections`.
    part_axis = None
    if operands.position_key is not None:
        part_axis = axes.head_part_axis(query.shape[3])

    def compute_shard(
        operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
    ) -> jax.Array:
        if part_axis is not None:
            operands = _with_whole_position_keys(operands, part_axis)
        if dropout is not None:
            dropout = _dropout_of_shard(dropout, shards)
        return compute(operands, visibility, dropout)

    # All arrays of the visibility begin with B. Each device has the dropout of the whole batch.
    operand_specs = shards.specs(operands)
    if part_axis is not None:
        position_key_spec = PartitionSpec(shards.heads, None, part_axis)
        operand_specs = operand_specs._replace(position_key=position_key_spec)
    specs = (
        operand_specs,
        jax.tree.map(lambda _: shards.by_row(), visibility),
        jax.tree.map(lambda _: PartitionSpec(), dropout),
    )
    mapped = shard_map(compute_shard, in_specs=specs, out_specs=shards.by_both())
    return mapped(operands, visibility, dropout)


def _as_arrays(operands: Operands) -> Operands:
    """Converts arrays of other libraries, such as an `nnx.Param`, to jax arrays.

    The loops of some paths would reject them.
    """
    converted = {}
    for name, array in operands._asdict().items():
        if hasattr(array, "__jax_array__"):
            converted[name] = jnp.asarray(array)
    return operands._replace(**converted)


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
      key, value: [B, H, L, E], the segment's keys and values.
      ring: Stored keys [B, H, E, R] and values [B, H, R, E], of any dtype, including int8 with a
        scale per slot.
      position: (queries, keys, scores), or None without relative positions. Queries are
        [B, H, L, E] with v instead of u. Keys are [H, E, P] or None. Scores are [H, P], divided by
        sqrt(E) and added to the other scores, or None. Keys, scores or both are for the distances
        P - 1, .., 0, and the largest distance stands for all beyond it.
      visibility: The slots and keys that each query attends to.
      implementation: A path, or an earlier choice. A segment of one token always uses the
        reference.

    Raises:
      ValueError: If shapes or dtypes do not match, or `position` has neither keys nor scores.
      UserError: If the path is unknown, or does not support this call.
    """
    operands = CachedOperands(query=query, key=key, value=value, ring=ring, position=position)
    check.cached_operands_fit(operands, visibility)

    call = describe_cached(operands, visibility)
    implementation = choose.resolve(implementation, call)
    # XLA divides the reference over the devices by itself, as in `attention`.
    if implementation.path == "reference":
        return reference.cached_attention(operands, visibility)

    # The other implementations multiply floating-point numbers only.
    operands = _dequantized(operands)
    compute = _function_of(implementation, call)
    batch, n_head = query.shape[:2]
    shards = shards_of(batch, n_head)
    if shards is None:
        return compute(operands, visibility)

    # All arrays of the visibility begin with B, except the position in the ring.
    visibility_specs = jax.tree.map(lambda _: shards.by_row(), visibility)
    visibility_specs = visibility_specs.replace(write_index=PartitionSpec())
    specs = (shards.specs(operands), visibility_specs)
    # Unlike in `attention` nothing depends on the shard, because there is no dropout.
    return shard_map(compute, in_specs=specs, out_specs=shards.by_both())(operands, visibility)


def _dequantized(operands: CachedOperands) -> CachedOperands:
    """Converts int8 arrays to the query's dtype."""
    dtype = operands.query.dtype

    def dequantize(array: Any) -> Any:
        return array.dequantize(dtype) if isinstance(array, Int8) else array

    return jax.tree.map(dequantize, operands, is_leaf=lambda array: isinstance(array, Int8))


def _function_of(implementation: Implementation, call: AttentionCall) -> Callable[..., jax.Array]:
    """Returns the function of a path other than the reference.

    The function takes operands, visibility and, in training, dropout.
    """
    if implementation.path == "stored":
        from txl_jax.ops.attention.stored import stored_attention

        return stored_attention

    # `Implementation` has checked that the other paths have a tile.
    tile: Any = implementation.tile
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled import cached, training

        if call.cached:
            return functools.partial(cached.tiled_cached_attention, tile=tile)
        return functools.partial(training.tiled_attention, tile=tile)

    from txl_jax.ops.attention.tpu import cached as cached_kernel
    from txl_jax.ops.attention.tpu import kernels

    interpret = implementation.interpret
    if call.cached:
        return functools.partial(
            cached_kernel.tpu_cached_attention, call, tile=tile, interpret=interpret
        )
    kernel: Any = implementation.kernel
    return functools.partial(
        kernels.tpu_attention, call, tile=tile, kernel=kernel, interpret=interpret
    )


class Shards(NamedTuple):
    """The part of a call that each device of the ambient mesh computes.

    Rows are divided over data x fsdp, heads over tensor.
    """

    # Mesh axes that share the rows, or () if each device has all rows.
    rows: tuple[str, ...]
    # Mesh axis that shares the heads, or None if each device has all heads.
    heads: str | None
    # Rows on one device.
    batch: int
    # Heads on one device.
    n_head: int

    def by_row(self) -> PartitionSpec:
        """Returns the sharding of an array [B, ...]."""
        return PartitionSpec(self.rows or None)

    def by_both(self) -> PartitionSpec:
        """Returns the sharding of an array [B, H, ...]."""
        return PartitionSpec(self.rows or None, self.heads)

    def specs(self, operands: Operands | CachedOperands) -> Any:
        """Returns the shardings of all operands.

        Arrays with four axes are [B, H, ., .]. All others begin with H.
        """

        def spec(array: jax.Array) -> PartitionSpec:
            return self.by_both() if array.ndim == 4 else PartitionSpec(self.heads)

        return jax.tree.map(spec, operands)


def shards_of(batch: int, n_head: int) -> Shards | None:
    """Returns the division of B rows and H heads over devices, or None if they are not divided.

    They are not divided on one device, if the caller's ambient mesh has other axis names, or if the
    call is inside the caller's own `shard_map`, where arrays already belong to one device.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return None

    # An axis is missing in a mesh of the caller's, and manual inside the caller's `shard_map`.
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in (DATA, FSDP, TENSOR):
        if types.get(name, AxisType.Manual) == AxisType.Manual:
            return None

    # `batch_spec` is empty if the rows cannot be divided evenly.
    row_axes = batch_spec(batch)
    row_devices = math.prod(mesh.shape[name] for name in row_axes)

    # Heads that cannot be divided evenly are all computed by each device.
    [head_axis] = axes.spec(axes.HEADS)
    head_devices = mesh.shape[head_axis]
    if n_head % head_devices:
        head_axis = None
        head_devices = 1
    return Shards(
        rows=row_axes,
        heads=head_axis,
        batch=batch // row_devices,
        n_head=n_head // head_devices,
    )


def _with_whole_position_keys(operands: Operands, mesh_axis: str) -> Operands:
    """Gathers the position keys [H, P, E] from parts of E, inside `shard_map`.

    Their gradient is then summed for each part. If `shard_map` got whole keys, devices would
    all-reduce the gradient of all keys, which sends twice as much. Where all devices have the same
    rows of the batch, `shard_map` has divided the gradient by their number, and the sum is right.
    """
    whole = gather_last_axis(operands.position_key, mesh_axis)
    # Activation checkpointing must keep the whole keys, or the backward pass gathers them again.
    whole = mark_as_saved(whole, POSITION_KEYS)
    return operands._replace(position_key=whole)


def _dropout_of_shard(dropout: ProbabilityDropout, shards: Shards) -> ProbabilityDropout:
    """Returns the dropout of this device's rows and heads, inside `shard_map`.

    Masks depend on the index of a row and a head in the whole batch.
    """
    first_row = dropout.first_row
    if shards.rows:
        first_row += jax.lax.axis_index(shards.rows) * shards.batch
    first_head = dropout.first_head
    if shards.heads:
        first_head += jax.lax.axis_index(shards.heads) * shards.n_head
    return dropout.replace(first_row=first_row, first_head=first_head)


def describe(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None
) -> AttentionCall:
    """Returns the description of a call of `attention` on one device of the ambient mesh."""
    query = operands.query
    n_positions = 0
    if operands.position_key is not None:
        n_positions = operands.position_key.shape[1]

    device = default_device()
    batch, n_head = _rows_and_heads_of_device(query)
    return AttentionCall(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=query.dtype.name,
        batch=batch,
        n_head=n_head,
        segment_len=query.shape[2],
        n_keys=visibility.n_keys,
        d_head=query.shape[3],
        n_positions=n_positions,
        has_position_score=operands.position_score is not None,
        causal=visibility.causal,
        window=visibility.window,
        dropout=dropout is not None,
        documents=visibility.document_start is not None,
    )


def describe_cached(operands: CachedOperands, visibility: CachedVisibility) -> AttentionCall:
    """Returns the description of a call of `cached_attention` on one device of the ambient mesh."""
    query = operands.query
    _, position_key, position_score = operands.position or (None, None, None)
    n_positions = 0
    if position_key is not None:
        n_positions = position_key.shape[2]

    stored_key, _ = operands.ring
    # int8 is converted to the query's dtype before an implementation reads it.
    cache_dtype = None if isinstance(stored_key, Int8) else stored_key.dtype.name

    device = default_device()
    batch, n_head = _rows_and_heads_of_device(query)
    return AttentionCall(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=query.dtype.name,
        batch=batch,
        n_head=n_head,
        segment_len=query.shape[2],
        n_keys=visibility.capacity + visibility.segment_len,
        d_head=query.shape[3],
        n_positions=n_positions,
        has_position_score=position_score is not None,
        window=visibility.window,
        capacity=visibility.capacity,
        cache_dtype=cache_dtype,
        documents=visibility.document_start is not None,
    )


def _rows_and_heads_of_device(query: jax.Array) -> tuple[int, int]:
    """Returns (B, H) of the part of a query [B, H, L, E] that one device computes."""
    batch, n_head = query.shape[:2]
    shards = shards_of(batch, n_head)
    if shards is None:
        return batch, n_head
    return shards.batch, shards.n_head
