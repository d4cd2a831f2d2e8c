"""Checks of the arguments of `attention`: what does not fit is refused in one sentence, before any computation.

An implementation may then rely on shapes and types. Without these checks a wrong one ends in an error of XLA about
shapes that the caller never wrote, or, as with integers, in numbers without a meaning.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility

_AXES = "[B, H, L, E]"


def check(arrays: Mapping[str, Any], visibility: Visibility) -> None:
    """Raises `ValueError` for arrays that do not fit each other or the description of what is visible.

    Args:
      arrays: those of `attention` by name; None: not given.
      visibility: lengths of segment and memory, and what a query sees.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be an array")
    biases = [name for name in ("content_bias", "position_bias") if name in given]
    if biases and "position_key" not in given:
        raise ValueError(
            f"{' and '.join(biases)} given and position_key is None; give position_key [H, P, E] too, or no bias"
        )
    _check_shapes(given, visibility)
    _check_types(given)
    _check_visibility(visibility, given["query"].shape[0])


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


def _check_shapes(given: Mapping[str, Any], visibility: Visibility) -> None:
    shape = given["query"].shape
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"query has the shape {shape}; it must be {_AXES}, none of them 0")
    batch, n_head, segment_len, width = shape
    if segment_len != visibility.segment_len:
        raise ValueError(
            f"query has the shape {shape}, {_AXES}, thus L {segment_len}; visibility.segment_len is "
            f"{visibility.segment_len}"
        )
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


def _check_types(given: Mapping[str, Any]) -> None:
    """Checks that all have the query's type; scores of distances are added in at least float32 and may have another."""
    of_query = given["query"].dtype
    for name, array in given.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has the type {array.dtype.name}; it must be a floating-point type")
        if array.dtype != of_query and name != "position_score":
            raise ValueError(
                f"{name} has the type {array.dtype.name} and query {of_query.name}; they must be the same: cast one "
                "with .astype"
            )


def _check_visibility(visibility: Visibility, batch: int) -> None:
    if visibility.window is not None and visibility.window < 1:
        raise ValueError(f"visibility.window is {visibility.window}; it must be at least 1, the query's own key")
    for name, per_row in {"valid": visibility.valid, "lengths": visibility.lengths}.items():
        if per_row is None and name == "lengths":
            continue
        shape, dtype = getattr(per_row, "shape", None), getattr(per_row, "dtype", None)
        if shape != (batch,) or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            found = type(per_row).__name__ if dtype is None else f"{dtype.name} {list(shape or ())}"
            raise ValueError(f"visibility.{name} is {found}; it must be int32 [{batch}], one number for each row")
