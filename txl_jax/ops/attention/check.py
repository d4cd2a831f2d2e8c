"""Checks the arguments of attention: shapes, dtypes, and visibility.

Without these checks, wrong arguments would cause XLA errors about shapes that the caller never
wrote or, with integers, meaningless results.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import CachedOperands, Operands
from txl_jax.ops.matmul import Int8

# The letters of each array's axes (`txl_jax.ops.attention`).
_AXES = {
    "query": "BHLE",
    "key": "BHKE",
    "value": "BHKE",
    "position_key": "HPE",
    "content_bias": "HE",
    "position_bias": "HE",
    "position_score": "HP",
}
_CACHED_AXES = {
    "query": "BHLE",
    "key": "BHLE",
    "value": "BHLE",
    "ring key": "BHER",
    "ring value": "BHRE",
    "position query": "BHLE",
    "position key": "HEP",
    "position score": "HP",
}


def operands_fit(operands: Operands, visibility: Visibility) -> None:
    """Checks the arrays of `attention`.

    Raises:
      ValueError: If they do not match each other or the visibility.
    """
    arrays = _present(operands._asdict())
    biases = [name for name in ("content_bias", "position_bias") if name in arrays]
    if biases and "position_key" not in arrays:
        raise ValueError(
            f"position_key must be an array [H, P, E] with {' and '.join(biases)}, got None"
        )
    sizes = _query_sizes(arrays["query"].shape, visibility.segment_len)
    if visibility.mem_len < 0:
        raise ValueError(
            "visibility.mem_len must be at least 0 (keys include the segment's), got "
            f"{visibility.mem_len}"
        )
    sizes["K"] = visibility.n_keys
    sizes["P"] = visibility.n_positions

    context = (
        f"with query {arrays['query'].shape}, L {visibility.segment_len}, M {visibility.mem_len} "
        f"and causal={visibility.causal}"
    )
    _check_arrays(arrays, _AXES, sizes, context, of_any_dtype={"position_score"})
    _check_visibility(visibility, sizes["B"])
    if visibility.lengths is not None:
        _check_integers("lengths", visibility.lengths, (sizes["B"],))


def cached_operands_fit(operands: CachedOperands, visibility: CachedVisibility) -> None:
    """Checks the arrays of `cached_attention`.

    Raises:
      ValueError: If they do not match each other or the visibility.
    """
    position_query, position_key, position_score = operands.position or (None, None, None)
    if operands.position is not None and position_key is None and position_score is None:
        raise ValueError("position must have keys [H, E, P], scores [H, P] or both, or be None")
    ring_key, ring_value = operands.ring
    arrays = _present(
        {
            "query": operands.query,
            "key": operands.key,
            "value": operands.value,
            "ring key": ring_key,
            "ring value": ring_value,
            "position query": position_query,
            "position key": position_key,
            "position score": position_score,
        }
    )
    sizes = _query_sizes(arrays["query"].shape, visibility.segment_len)
    sizes["R"] = visibility.capacity
    # P follows from the position keys or scores, whose last axis it is.
    table = position_score if position_key is None else position_key
    sizes["P"] = 0
    if table is not None and table.shape:
        sizes["P"] = table.shape[-1]

    context = f"with query {arrays['query'].shape} and R {visibility.capacity}"
    of_any_dtype = {"ring key", "ring value", "position score"}
    _check_arrays(arrays, _CACHED_AXES, sizes, context, of_any_dtype=of_any_dtype)
    _check_visibility(visibility, sizes["B"])
    _check_integers("write_index", visibility.write_index, ())


def _present(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that are not None, and raises `ValueError` if one is not an array."""
    present = {name: array for name, array in arrays.items() if array is not None}
    for name, array in present.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    return present


def _query_sizes(shape: tuple[int, ...], segment_len: int) -> dict[str, int]:
    """Checks the query's shape, and returns B, H, L and E by these letters."""
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"query must have shape [B, H, L, E], none of them 0, got {shape}")
    if shape[2] != segment_len:
        # Such as the arrays of `jax.nn.dot_product_attention`.
        has_heads_last = shape[1] == segment_len
        hint = ". Arrays [B, L, H, E] need .transpose(0, 2, 1, 3)" if has_heads_last else ""
        raise ValueError(
            f"query must have shape [B, H, L, E] with L = visibility.segment_len ({segment_len}), "
            f"got {shape}{hint}"
        )
    return dict(zip("BHLE", shape, strict=True))


def _check_arrays(
    arrays: Mapping[str, Any],
    axes: Mapping[str, str],
    sizes: Mapping[str, int],
    context: str,
    *,
    of_any_dtype: set[str],
) -> None:
    """Checks the shapes and dtypes of arrays.

    Args:
      arrays: Arrays by name, "query" among them.
      axes: Letters of each array's axes, by name.
      sizes: The size of each letter.
      context: Origin of the sizes, for the error message.
      of_any_dtype: Names of arrays that are converted. All others must have the query's dtype,
        except `Int8`.

    Raises:
      ValueError: If a shape or dtype does not match, or a dtype is not a floating-point one.
    """
    query_dtype = arrays["query"].dtype
    for name, array in arrays.items():
        expected = tuple(sizes[axis] for axis in axes[name])
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected} {context}, got {array.shape}")
        if isinstance(array, Int8):
            continue
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must have a floating-point dtype, got {array.dtype.name}")
        if array.dtype != query_dtype and name not in of_any_dtype:
            raise ValueError(
                f"{name} must have the query's dtype {query_dtype.name}, got {array.dtype.name}. "
                "Cast one with .astype."
            )


def _check_visibility(visibility: Visibility | CachedVisibility, batch: int) -> None:
    """Checks the common fields of the visibility in training and over a KV cache."""
    if visibility.window is not None and visibility.window < 1:
        raise ValueError(
            f"visibility.window must be at least 1 (the query's own key), got {visibility.window}"
        )
    _check_integers("valid", visibility.valid, (batch,))
    if visibility.document_start is not None:
        shape = (batch, visibility.segment_len)
        _check_integers("document_start", visibility.document_start, shape)


def _check_integers(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Checks an array of the visibility.

    `shape` is [] for one integer, [B] for one per row, or [B, L] for one per query.
    """
    if not _is_integers(array, shape):
        extent = ("", ", one number for each row", ", one number for each query")[len(shape)]
        raise ValueError(
            f"visibility.{name} must be int32 {list(shape)}{extent}, got {_description(array)}"
        )


def _is_integers(array: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether something is an array of integers of a shape."""
    if not hasattr(array, "dtype") or getattr(array, "shape", None) != shape:
        return False
    return bool(jnp.issubdtype(array.dtype, jnp.integer))


def _description(array: Any) -> str:
    """Returns an array's dtype and shape, or another value's type, for an error message."""
    if not hasattr(array, "dtype"):
        return type(array).__name__
    # A dtype's class, such as jnp.uint32, has a dtype but no shape.
    return f"{array.dtype.name} {list(getattr(array, 'shape', ()))}"


def dropout_of(
    dropout: ProbabilityDropout | tuple[Any, Any] | None, n_head: int
) -> ProbabilityDropout | None:
    """Checks the description of dropout, and returns it as a `ProbabilityDropout`.

    Without dropout it returns None.

    Args:
      dropout: A `ProbabilityDropout`, (rate, seed), or None.
      n_head: The query's heads, on all devices.

    Raises:
      ValueError: If it has another type, the rate is not in [0, 1), the seed is not an integer, or
        the dropout has fewer heads than the query.
    """
    if dropout is None:
        return None
    if isinstance(dropout, tuple) and len(dropout) == 2:
        rate, seed = dropout
        dropout = ProbabilityDropout(rate, _seed(seed), n_head=n_head)
    if not isinstance(dropout, ProbabilityDropout):
        raise ValueError(
            f"dropout must be (rate, seed), such as (0.1, jnp.uint32(7)), or None, got {dropout!r}"
        )
    # A traced rate has no value yet.
    is_number = isinstance(dropout.rate, int | float | np.number)
    if is_number and not 0 <= dropout.rate < 1:
        raise ValueError(f"the dropout rate must be at least 0 and below 1, got {dropout.rate}")
    # With fewer heads, rows of the batch would share masks.
    if dropout.n_head < n_head:
        raise ValueError(
            f"dropout.n_head must be at least the query's {n_head} heads (of all devices), "
            f"got {dropout.n_head}"
        )
    return dropout


def _seed(seed: Any) -> jax.Array:
    """Returns the seed as uint32 [], and raises `ValueError` if it is not one integer."""
    if isinstance(seed, int):
        return jnp.asarray(np.uint32(seed % 2**32))
    if not _is_integers(seed, ()):
        raise ValueError(
            "the dropout seed must be one integer, such as jax.random.bits(key, dtype=jnp.uint32), "
            f"got {_description(seed)}"
        )
    return jnp.asarray(seed).astype(jnp.uint32)
