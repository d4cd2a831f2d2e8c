"""Checks of the arguments of attention: shapes, dtypes, and visibility.

Without them wrong arguments would end in an error of XLA about shapes that the caller never wrote
or, as with integers, in numbers without a meaning.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import CachedOperands, Operands
from txl_jax.ops.matmul import Int8

_AXES = {  # Of the arrays, by letters; P of a cache are the columns of its position keys or scores.
    "query": "BHLE",
    **dict.fromkeys(("key", "value"), "BHKE"),
    "position_key": "HPE",
    **dict.fromkeys(("content_bias", "position_bias"), "HE"),
    "position_score": "HP",
}
_CACHED_AXES = {
    **dict.fromkeys(("query", "key", "value"), "BHLE"),
    "ring key": "BHER",
    "ring value": "BHRE",
    "position query": "BHLE",
    "position key": "HEP",
    "position score": "HP",
}


def operands_fit(operands: Operands, visibility: Visibility) -> None:
    """Raises `ValueError` for arrays that do not match each other or the visibility."""
    given = _given(operands._asdict())
    biases = [name for name in ("content_bias", "position_bias") if name in given]
    if biases and "position_key" not in given:
        raise ValueError(
            f"position_key must be an array [H, P, E] with {' and '.join(biases)}, got None"
        )
    sizes = _sizes(given["query"].shape, visibility.segment_len)
    if visibility.mem_len < 0:
        raise ValueError(
            "visibility.mem_len must be at least 0 (keys include the segment's), got "
            f"{visibility.mem_len}"
        )
    sizes |= {"K": visibility.n_keys, "P": visibility.n_positions}
    lengths = f"L {visibility.segment_len}, M {visibility.mem_len} and causal={visibility.causal}"
    because = f"with query {given['query'].shape}, {lengths}"
    _check_arrays(given, _AXES, sizes, because, free={"position_score"})
    _check_visibility(visibility, sizes["B"])
    if visibility.lengths is not None:
        _check_integers("lengths", visibility.lengths, (sizes["B"],))


def cached_operands_fit(operands: CachedOperands, visibility: CachedVisibility) -> None:
    """Raises `ValueError` for arguments of `cached_attention` that do not match."""
    position_query, position_key, position_score = operands.position or (None, None, None)
    if operands.position is not None and position_key is None and position_score is None:
        raise ValueError("position must have keys [H, E, P], scores [H, P] or both, or be None")
    arrays = *operands[:3], *operands.ring, position_query, position_key, position_score
    given = _given(dict(zip(_CACHED_AXES, arrays, strict=True)))
    table = position_score if position_key is None else position_key
    sizes = _sizes(given["query"].shape, visibility.segment_len) | {"R": visibility.capacity}
    sizes["P"] = 0 if table is None or not table.shape else table.shape[-1]
    because = f"with query {given['query'].shape} and R {visibility.capacity}"
    _check_arrays(
        given, _CACHED_AXES, sizes, because, free={"ring key", "ring value", "position score"}
    )
    _check_visibility(visibility, sizes["B"])
    _check_integers("write_index", visibility.write_index, ())


def _given(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that are not None."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    return given


def _sizes(query: tuple[int, ...], segment_len: int) -> dict[str, int]:
    """Returns the lengths of the query's axes by letters."""
    if len(query) != 4 or 0 in query:
        raise ValueError(f"query must have shape [B, H, L, E], none of them 0, got {query}")
    if query[2] != segment_len:
        raise ValueError(
            f"query {query} must have L = visibility.segment_len ({segment_len}), got {query[2]}"
        )
    return dict(zip("BHLE", query, strict=True))


def _check_arrays(
    given: Mapping[str, Any],
    of_axes: Mapping[str, str],
    sizes: Mapping[str, int],
    because: str,
    *,
    free: set[str],
) -> None:
    """Checks the shapes and dtypes of arrays.

    All arrays must have the query's dtype, except `Int8` and the arrays that are converted
    (`free`).
    """
    of_query = given["query"].dtype
    for name, array in given.items():
        expected = tuple(sizes[axis] for axis in of_axes[name])
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected} {because}, got {array.shape}")
        if isinstance(array, Int8):
            continue
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must have a floating-point dtype, got {array.dtype.name}")
        if array.dtype != of_query and name not in free:
            wanted = f"{name} must have the query's dtype {of_query.name}"
            raise ValueError(f"{wanted}, got {array.dtype.name}. Cast one with .astype.")


def _check_visibility(visibility: Visibility | CachedVisibility, batch: int) -> None:
    if visibility.window is not None and visibility.window < 1:
        raise ValueError(
            f"visibility.window must be at least 1 (the query's own key), got {visibility.window}"
        )
    _check_integers("valid", visibility.valid, (batch,))
    if visibility.document_start is not None:
        _check_integers(
            "document_start", visibility.document_start, (batch, visibility.segment_len)
        )


def _check_integers(name: str, given: Any, shape: tuple[int, ...]) -> None:
    """Checks an array of the visibility: one integer, or one for each row or query."""
    found, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if found != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        text = type(given).__name__ if dtype is None else f"{dtype.name} {list(found or ())}"
        each = ("", ", one number for each row", ", one number for each query")[len(shape)]
        raise ValueError(f"visibility.{name} must be int32 {list(shape)}{each}, got {text}")


def dropout_of(dropout: Dropout | tuple[Any, Any] | None, n_head: int) -> Dropout | None:
    """Checks and returns the description of dropout.

    It is passed as a `Dropout`, or as (rate, seed) for `n_head` heads.
    """
    if dropout is None:
        return None
    if isinstance(dropout, tuple) and len(dropout) == 2:
        dropout = Dropout(dropout[0], _seed(dropout[1]), n_head=n_head)
    if not isinstance(dropout, Dropout):
        raise ValueError(
            f"dropout must be (rate, seed), such as (0.1, jnp.uint32(7)), or None, got {dropout!r}"
        )
    # A traced rate has no value yet.
    if isinstance(dropout.rate, int | float | np.number) and not 0 <= dropout.rate < 1:
        raise ValueError(f"the dropout rate must be at least 0 and below 1, got {dropout.rate}")
    if dropout.n_head < n_head:  # Rows of the batch would share masks.
        wanted = f"dropout.n_head must be at least the query's {n_head} heads (of all devices)"
        raise ValueError(f"{wanted}, got {dropout.n_head}")
    return dropout


def _seed(seed: Any) -> jax.Array:
    if isinstance(seed, int):
        return jnp.asarray(np.uint32(seed % 2**32))
    dtype, shape = getattr(seed, "dtype", None), getattr(seed, "shape", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.integer):
        found = type(seed).__name__ if dtype is None else f"{dtype} {list(shape or ())}"
        wanted = (
            "the dropout seed must be one integer, such as jax.random.bits(key, dtype=jnp.uint32)"
        )
        raise ValueError(f"{wanted}, got {found}")
    return jnp.asarray(seed).astype(jnp.uint32)
