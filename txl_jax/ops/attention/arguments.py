"""Checks of the arguments of `attention` and `cached_attention`: what does not fit is refused before any computation.

An implementation may then rely on shapes and types. Without these checks a wrong one ends in an error of XLA about
shapes that the caller never wrote, or, as with integers, in numbers without a meaning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention.cached import CachedVisibility, Position
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.matmul import Int8

_AXES = "[B, H, L, E]"


def check(arrays: Mapping[str, Any], visibility: Visibility) -> None:
    """Raises `ValueError` for arrays that do not fit each other or the description of what is visible.

    Args:
      arrays: those of `attention` by name; None: not given.
      visibility: lengths of segment and memory, and what a query sees.
    """
    given = _given(arrays)
    biases = [name for name in ("content_bias", "position_bias") if name in given]
    if biases and "position_key" not in given:
        raise ValueError(
            f"{' and '.join(biases)} given and position_key is None; give position_key [H, P, E] too, or no bias"
        )
    _check_shapes(given, visibility)
    _check_types(given, free=("position_score",))
    batch = given["query"].shape[0]
    _check_window(visibility.window)
    _check_integers("valid", visibility.valid, (batch,))
    if visibility.lengths is not None:
        _check_integers("lengths", visibility.lengths, (batch,))
    _check_documents(visibility, batch)


def check_cached(
    heads: Mapping[str, Any], ring: tuple[Any, Any], position: Position, visibility: CachedVisibility
) -> None:
    """Raises `ValueError` for arguments of `cached_attention` that do not fit each other.

    Args:
      heads: query, key and value by name.
      ring: stored keys and values.
      position: position queries, keys and scores.
      visibility: lengths of segment and ring, and what a query sees.
    """
    position_query, position_key, position_score = position or (None, None, None)
    if position is not None and position_key is None and position_score is None:
        raise ValueError(
            "position has neither keys nor scores; give keys [H, E, P], scores [H, P] or both, or position=None"
        )
    of_position = {"position query": position_query, "position key": position_key, "position score": position_score}
    stored = dict(zip(("stored key", "stored value"), ring, strict=True))
    given = _given({**heads, **stored, **of_position})
    shape = given["query"].shape
    _check_query(shape, visibility.segment_len)
    (batch, n_head, _, width), capacity = shape, visibility.capacity
    table = position_score if position_key is None else position_key
    n_positions = 0 if table is None or not table.shape else table.shape[-1]
    expected = {
        **dict.fromkeys(("query", "key", "value", "position query"), shape),
        "stored key": (batch, n_head, width, capacity),
        "stored value": (batch, n_head, capacity, width),
        "position key": (n_head, width, n_positions),
        "position score": (n_head, n_positions),
    }
    for name, array in given.items():
        if array.shape != expected[name]:
            raise ValueError(
                f"{name} has the shape {array.shape}; with query {shape} and R {capacity} it must be {expected[name]}"
            )
    floating = {name: array for name, array in given.items() if not isinstance(array, Int8)}
    _check_types(floating, free=("stored key", "stored value", "position score"))
    _check_window(visibility.window)
    _check_integers("valid", visibility.valid, (batch,))
    _check_integers("write_index", visibility.write_index, ())
    _check_documents(visibility, batch)


def dropout_of(dropout: Dropout | tuple[Any, Any] | None, n_head: int) -> Dropout | None:
    """Returns the description of dropout that is given as such, or as (rate, seed) of `n_head` heads.

    Raises:
      ValueError: it is neither, the rate is not in [0, 1), the seed is no single integer, or there are more
        heads than `Dropout.n_head`.
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


def _given(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that are not None; raises `ValueError` for what is no array."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be an array")
    return given


def _check_query(shape: tuple[int, ...], segment_len: int) -> None:
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"query has the shape {shape}; it must be {_AXES}, none of them 0")
    if shape[2] != segment_len:
        raise ValueError(
            f"query has the shape {shape}, {_AXES}, thus L {shape[2]}; visibility.segment_len is {segment_len}"
        )


def _check_shapes(given: Mapping[str, Any], visibility: Visibility) -> None:
    shape = given["query"].shape
    _check_query(shape, visibility.segment_len)
    batch, n_head, _, width = shape
    if visibility.mem_len < 0:
        raise ValueError(
            f"visibility.mem_len is {visibility.mem_len}; it must be at least 0: keys include the segment's"
        )
    of_keys, n_positions = (batch, n_head, visibility.n_keys, width), visibility.n_positions
    expected = {
        "query": shape,
        "key": of_keys,
        "value": of_keys,
        "position_key": (n_head, n_positions, width),
        "content_bias": (n_head, width),
        "position_bias": (n_head, width),
        "position_score": (n_head, n_positions),
    }
    for name, array in given.items():
        if array.shape != expected[name]:
            raise ValueError(
                f"{name} has the shape {array.shape}; with query {shape}, L {visibility.segment_len}, "
                f"M {visibility.mem_len} and causal={visibility.causal} it must be {expected[name]}"
            )


def _check_types(given: Mapping[str, Any], *, free: Sequence[str]) -> None:
    """Checks that all have the query's type but those that are converted: scores of distances, and a ring."""
    of_query = given["query"].dtype
    for name, array in given.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has the type {array.dtype.name}; it must be a floating-point type")
        if array.dtype != of_query and name not in free:
            raise ValueError(
                f"{name} has the type {array.dtype.name} and query {of_query.name}; they must be the same: cast one "
                "with .astype"
            )


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"visibility.window is {window}; it must be at least 1, the query's own key")


def _check_documents(visibility: Visibility | CachedVisibility, batch: int) -> None:
    if visibility.document_start is not None:
        _check_integers("document_start", visibility.document_start, (batch, visibility.segment_len))


def _check_integers(name: str, given: Any, shape: tuple[int, ...]) -> None:
    """Checks an array of the visibility: one integer, or one for each row or query."""
    found, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if found != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        text = type(given).__name__ if dtype is None else f"{dtype.name} {list(found or ())}"
        each = ("", ", one number for each row", ", one number for each query")[len(shape)]
        raise ValueError(f"visibility.{name} is {text}; it must be int32 {list(shape)}{each}")
