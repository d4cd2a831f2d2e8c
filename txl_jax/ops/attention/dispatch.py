"""The entry to attention: checks the arguments, and runs the chosen implementation over the shards of the ambient mesh.

    reference  whole scores [B, H, L, K] (`reference.py`): the definition of correct
    tiled      XLA loops over tiles of the scores (`tiled/`), on any platform
    stored     plain XLA with its own backward pass (`stored.py`), in training on any platform: the path of GPUs
    fused      Pallas kernels for TPUs (`tpu/`)

All give the same numbers up to rounding, and draw the same dropout masks. The others are imported when they are first
used: Pallas takes a while. They rely on shapes and types: without the checks, wrong ones would end in an error of XLA
about shapes that the caller never wrote or, as with integers, in numbers without a meaning.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from txl_jax.ops.attention import choose, reference
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import Implementation, Operands, Position, Problem, Ring, Tile, default_device
from txl_jax.ops.matmul import Int8
from txl_jax.sharding import DATA, FSDP, TENSOR, ambient_mesh, axes, spec
from txl_jax.sharding.activations import batch_spec, shard_map


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

    The score of query i and key j is ((q_i + u) . k_j + (q_i + v) . r_(i-j) + s_(i-j)) / sqrt(E), with M + i - j in
    place of i - j where M keys are memory (Dai et al., 2019, section 3.3). Keys may lie before the segment only, or on
    both sides (`Visibility.causal`). Only the reference has forward-mode derivatives (`jax.jvp`).

    Args:
      query: [B, H, L, E], of any floating-point type, which all others have too (`position_score` aside).
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`), or None for none and no biases.
      content_bias: [H, E], u, or None.
      position_bias: [H, E], v, or None.
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E), with or without
        position keys, or None.
      visibility: Which keys a query sees. One that sees none gets zeros.
      dropout: Dropout on the probabilities, as (rate, seed) with a seed uint32 [] that is new in each layer and update,
        or None.
      implementation: A path ("auto", "reference", "tiled", "stored", "fused"), or what was chosen before
        (`choose.resolve`).

    Raises:
      ValueError: If shapes or types do not fit each other, a bias has no position keys, or a rate is not in [0, 1).
      UserError: If the path is unknown, or cannot serve this call.
    """
    operands = Operands(query, key, value, position_key, content_bias, position_bias, position_score)
    _check(operands, visibility)
    dropout = dropout_of(dropout, query.shape[1])
    # In a run `runs.build` has chosen; its choice stays if it can serve this call.
    implementation = choose.resolve(implementation, describe(operands, visibility, dropout))
    if implementation.path == "reference":
        return reference.attention(operands, visibility, dropout)
    compute, shards = _of_training(implementation), shards_of(query.shape[0], query.shape[1])
    if shards is None:
        return compute(operands, visibility, dropout)

    def on_one(operands: Operands, visibility: Visibility, dropout: Dropout | None) -> jax.Array:
        if dropout is not None:  # The masks of the whole batch.
            dropout = dropout.replace(
                first_row=dropout.first_row + (jax.lax.axis_index(shards.rows) * shards.batch if shards.rows else 0),
                first_head=dropout.first_head
                + (jax.lax.axis_index(shards.heads) * shards.n_head if shards.heads else 0),
            )
        return compute(operands, visibility, dropout)

    specs = (
        jax.tree.map(lambda array: shards.by_both() if array.ndim == 4 else shards.by_head(), operands),
        jax.tree.map(lambda _: shards.by_row(), visibility),
        jax.tree.map(lambda _: PartitionSpec(), dropout),
    )
    mapped = shard_map(on_one, in_specs=specs, out_specs=shards.by_both())
    result: jax.Array = mapped(operands, visibility, dropout)
    return result


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
    """Computes weighted sums of the values of a KV cache and of the segment: [B, H, L, E]; for inference only.

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key: [B, H, L, E], of the segment.
      value: [B, H, L, E].
      ring: Stored keys [B, H, E, R] and values [B, H, R, E], of any type, int8 with a scale per slot included.
      position: As for `reference.cached_attention`.
      visibility: Which keys a query sees.
      implementation: A path, or what was chosen before. A segment of one token is always the reference's.

    Raises:
      ValueError: If shapes or types do not fit each other, or `position` has neither keys nor scores.
      UserError: If the path is unknown, or cannot serve this call.
    """
    _check_cached({"query": query, "key": key, "value": value}, ring, position, visibility)
    implementation = choose.resolve(implementation, describe_cached(query, ring, position, visibility))
    if implementation.path == "reference":
        return reference.cached_attention(query, key, value, ring, position, visibility)
    compute = _of_inference(implementation)
    ring, position = jax.tree.map(  # The other implementations multiply floating-point numbers only.
        lambda array: array.dequantize(query.dtype) if isinstance(array, Int8) else array,
        (ring, position),
        is_leaf=lambda array: isinstance(array, Int8),
    )
    given = query, key, value, ring, position, visibility
    shards = shards_of(query.shape[0], query.shape[1])
    if shards is None:
        return compute(*given)
    both, by_head = shards.by_both(), shards.by_head()
    of_position = None if position is None else (both, *[None if x is None else by_head for x in position[1:]])
    of_visibility = jax.tree.map(lambda _: shards.by_row(), visibility).replace(write_index=PartitionSpec())
    specs = both, both, both, (both, both), of_position, of_visibility
    result: jax.Array = shard_map(compute, in_specs=specs, out_specs=both)(*given)
    return result


def _of_training(implementation: Implementation) -> Callable[[Operands, Visibility, Dropout | None], jax.Array]:
    """Returns the function of a path that is not the reference."""
    if implementation.path == "stored":
        from txl_jax.ops.attention.stored import stored_attention

        return stored_attention
    function: Callable[..., jax.Array]
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled.training import tiled_attention

        function = functools.partial(tiled_attention, tile=_tile(implementation))
    else:
        from txl_jax.ops.attention.tpu.kernels import tpu_attention

        options: Any = {"kernel": implementation.kernel, "interpret": implementation.interpret}
        function = functools.partial(tpu_attention, tile=_tile(implementation), **options)
    return lambda operands, visibility, dropout: function(**operands._asdict(), visibility=visibility, dropout=dropout)


def _of_inference(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function with the arguments of `cached_attention`, `implementation` aside."""
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled.cached import tiled_cached_attention

        return functools.partial(tiled_cached_attention, tile=_tile(implementation))
    from txl_jax.ops.attention.tpu.cached import tpu_cached_attention

    return functools.partial(tpu_cached_attention, tile=_tile(implementation), interpret=implementation.interpret)


def _tile(implementation: Implementation) -> Tile:
    assert implementation.tile is not None, "it has a tile"
    return implementation.tile


# The part of a call that one device of the ambient mesh computes: rows over data x fsdp, heads over tensor.


class Shards(NamedTuple):
    """A division of rows and heads among devices."""

    rows: tuple[str, ...]  # Mesh axes that share the rows, or () if each device has all.
    heads: str | None  # Mesh axis that shares the heads, or None if each device has all.
    batch: int  # Rows of one device.
    n_head: int  # Heads of one device.

    def by_row(self) -> PartitionSpec:
        """Returns the sharding of an array [B, ...]."""
        return PartitionSpec(self.rows or None)

    def by_head(self) -> PartitionSpec:
        """Returns the sharding of an array [H, ...]."""
        return PartitionSpec(self.heads)

    def by_both(self) -> PartitionSpec:
        """Returns the sharding of an array [B, H, ...]."""
        return PartitionSpec(self.rows or None, self.heads)


def shards_of(batch: int, n_head: int) -> Shards | None:
    """Returns how B rows and H heads are divided, or None if they are not divided here.

    They are not if there is one device, if the ambient mesh is the caller's with axes of other names, or if the call is
    inside the caller's own `shard_map`, where arrays already are those of one device.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types.get(name, AxisType.Manual) == AxisType.Manual for name in (DATA, FSDP, TENSOR)):
        return None
    rows, [heads] = batch_spec(batch), spec(axes.HEADS)
    if n_head % mesh.shape[heads]:
        heads = None
    num_heads = 1 if heads is None else mesh.shape[heads]
    return Shards(rows, heads, batch // math.prod(mesh.shape[name] for name in rows), n_head // num_heads)


def describe(operands: Operands, visibility: Visibility, dropout: Dropout | None) -> Problem:
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


def describe_cached(query: jax.Array, ring: Ring, position: Position, visibility: CachedVisibility) -> Problem:
    """Returns the description of a call of `cached_attention` on one device of the ambient mesh."""
    _, position_key, position_score = position or (None, None, None)
    return _describe(
        query,
        visibility,
        n_keys=visibility.capacity + query.shape[2],
        n_positions=0 if position_key is None else position_key.shape[2],
        has_position_score=position_score is not None,
        capacity=visibility.capacity,
        cache_dtype=None if isinstance(ring[0], Int8) else ring[0].dtype.name,
    )


def _describe(query: jax.Array, visibility: Visibility | CachedVisibility, **others: Any) -> Problem:
    device, (batch, n_head, segment_len, width) = default_device(), query.shape
    shards = shards_of(batch, n_head)
    return Problem(
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


# Checks of the arguments

_AXES = {  # Of the arrays, by letters; P of a cache are the columns of its position keys or scores.
    "query": "BHLE",
    **dict.fromkeys(("key", "value"), "BHKE"),
    "position_key": "HPE",
    **dict.fromkeys(("content_bias", "position_bias"), "HE"),
    "position_score": "HP",
}
_CACHED_AXES = {
    **dict.fromkeys(("query", "key", "value", "position query"), "BHLE"),
    "stored key": "BHER",
    "stored value": "BHRE",
    "position key": "HEP",
    "position score": "HP",
}


def _check(operands: Operands, visibility: Visibility) -> None:
    """Raises `ValueError` for arrays that do not fit each other or the description of what is visible."""
    given = _given(operands._asdict())
    biases = [name for name in ("content_bias", "position_bias") if name in given]
    if biases and "position_key" not in given:
        raise ValueError(
            f"{' and '.join(biases)} given and position_key is None; give position_key [H, P, E] too, or no bias"
        )
    sizes = _sizes(given["query"].shape, visibility.segment_len)
    if visibility.mem_len < 0:
        raise ValueError(
            f"visibility.mem_len is {visibility.mem_len}; it must be at least 0: keys include the segment's"
        )
    sizes |= {"K": visibility.n_keys, "P": visibility.n_positions}
    lengths = f"L {visibility.segment_len}, M {visibility.mem_len} and causal={visibility.causal}"
    _check_shapes(given, _AXES, sizes, f"with query {given['query'].shape}, {lengths}")
    _check_types(given, free=("position_score",))
    _check_visibility(visibility, sizes["B"])
    if visibility.lengths is not None:
        _check_integers("lengths", visibility.lengths, (sizes["B"],))


def _check_cached(heads: Mapping[str, Any], ring: Ring, position: Position, visibility: CachedVisibility) -> None:
    """Raises `ValueError` for arguments of `cached_attention` that do not fit each other."""
    position_query, position_key, position_score = position or (None, None, None)
    if position is not None and position_key is None and position_score is None:
        raise ValueError(
            "position has neither keys nor scores; give keys [H, E, P], scores [H, P] or both, or position=None"
        )
    stored = dict(zip(("stored key", "stored value"), ring, strict=True))
    of_position = {"position query": position_query, "position key": position_key, "position score": position_score}
    given = _given({**heads, **stored, **of_position})
    table = position_score if position_key is None else position_key
    sizes = _sizes(given["query"].shape, visibility.segment_len) | {"R": visibility.capacity}
    sizes["P"] = 0 if table is None or not table.shape else table.shape[-1]
    _check_shapes(given, _CACHED_AXES, sizes, f"with query {given['query'].shape} and R {visibility.capacity}")
    floating = {name: array for name, array in given.items() if not isinstance(array, Int8)}
    _check_types(floating, free=("stored key", "stored value", "position score"))
    _check_visibility(visibility, sizes["B"])
    _check_integers("write_index", visibility.write_index, ())


def _given(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that are not None."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be an array")
    return given


def _sizes(query: tuple[int, ...], segment_len: int) -> dict[str, int]:
    """Returns the lengths of the query's axes by letters."""
    if len(query) != 4 or 0 in query:
        raise ValueError(f"query has the shape {query}; it must be [B, H, L, E], none of them 0")
    if query[2] != segment_len:
        raise ValueError(
            f"query has the shape {query}, [B, H, L, E], thus L {query[2]}; visibility.segment_len is {segment_len}"
        )
    return dict(zip("BHLE", query, strict=True))


def _check_shapes(given: Mapping[str, Any], of_axes: Mapping[str, str], sizes: Mapping[str, int], because: str) -> None:
    for name, array in given.items():
        expected = tuple(sizes[axis] for axis in of_axes[name])
        if array.shape != expected:
            raise ValueError(f"{name} has the shape {array.shape}; {because} it must be {expected}")


def _check_types(given: Mapping[str, Any], *, free: tuple[str, ...]) -> None:
    """Checks that all have the query's type, except those that are converted: scores of distances, and a ring."""
    of_query = given["query"].dtype
    for name, array in given.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has the type {array.dtype.name}; it must be a floating-point type")
        if array.dtype != of_query and name not in free:
            raise ValueError(
                f"{name} has the type {array.dtype.name} and query {of_query.name}; they must be the same: cast one "
                "with .astype"
            )


def _check_visibility(visibility: Visibility | CachedVisibility, batch: int) -> None:
    if visibility.window is not None and visibility.window < 1:
        raise ValueError(f"visibility.window is {visibility.window}; it must be at least 1, the query's own key")
    _check_integers("valid", visibility.valid, (batch,))
    if visibility.document_start is not None:
        _check_integers("document_start", visibility.document_start, (batch, visibility.segment_len))


def _check_integers(name: str, given: Any, shape: tuple[int, ...]) -> None:
    """Checks an array of the visibility: one integer, or one for each row or query."""
    found, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if found != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        text = type(given).__name__ if dtype is None else f"{dtype.name} {list(found or ())}"
        each = ("", ", one number for each row", ", one number for each query")[len(shape)]
        raise ValueError(f"visibility.{name} is {text}; it must be int32 {list(shape)}{each}")


def dropout_of(dropout: Dropout | tuple[Any, Any] | None, n_head: int) -> Dropout | None:
    """Returns the description of dropout that is passed as such, or as (rate, seed) of `n_head` heads.

    Raises:
      ValueError: If it is neither, the rate is not in [0, 1), the seed is not one integer, or there are more heads than
        `Dropout.n_head`.
    """
    if dropout is None:
        return None
    if isinstance(dropout, tuple) and len(dropout) == 2:
        dropout = Dropout(dropout[0], _seed(dropout[1]), n_head=n_head)
    if not isinstance(dropout, Dropout):
        raise ValueError(f"dropout is {dropout!r}; it must be (rate, seed), such as (0.1, jnp.uint32(7)), or None")
    # A traced rate has no value yet.
    if isinstance(dropout.rate, int | float | np.number) and not 0 <= dropout.rate < 1:
        raise ValueError(f"the rate of dropout is {dropout.rate}; it must be at least 0 and below 1")
    if dropout.n_head < n_head:  # Rows of the batch would share masks.
        raise ValueError(
            f"dropout.n_head is {dropout.n_head} and query has {n_head} heads; it counts those of all devices"
        )
    return dropout


def _seed(seed: Any) -> jax.Array:
    if isinstance(seed, int):
        return jnp.asarray(np.uint32(seed % 2**32))
    dtype, shape = getattr(seed, "dtype", None), getattr(seed, "shape", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.integer):
        found = type(seed).__name__ if dtype is None else f"{dtype} {list(shape or ())}"
        raise ValueError(
            f"the seed of dropout is {found}; it must be one integer, such as jax.random.bits(key, dtype=jnp.uint32)"
        )
    return jnp.asarray(seed).astype(jnp.uint32)
