"""Chunks of the rows of a batch, of which one at a time has its position scores in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TABLE_BYTES = 96 << 20  # Of a chunk, forward; backward there are the gradients of its scores too.


def rows_per_chunk(batch: int, row_bytes: int, table_bytes: int | None) -> int:
    """Returns the rows of a chunk: as many as fit, but rather fewer so that all chunks are alike.

    Args:
      batch: B.
      row_bytes: size of the table of one row.
      table_bytes: size of the largest table, of one row at least; None: `TABLE_BYTES`.
    """
    most = max(1, min(batch, (table_bytes or TABLE_BYTES) // max(1, row_bytes)))
    alike = [size for size in range(most, most // 2, -1) if batch % size == 0]
    return alike[0] if alike else -(-batch // -(-batch // most))


def over_chunks(of_chunk: Callable[..., tuple[Any, Any]], carry: Any, batch: int, size: int) -> tuple[Any, Any]:
    """Runs of_chunk(carry, first row, rows) -> (carry, arrays [rows, ...]) over a batch, one chunk after the other.

    Args:
      of_chunk: the function; the first row may be traced.
      carry: what it starts with.
      batch: B.
      size: rows of a chunk; the last one has what is left.

    Returns:
      (the last carry, arrays [B, ...])
    """
    whole, rest = divmod(batch, size)
    if batch <= size:
        return of_chunk(carry, jnp.int32(0), batch)
    firsts = jnp.arange(whole, dtype=jnp.int32) * size
    carry, arrays = jax.lax.scan(lambda carry, first: of_chunk(carry, first, size), carry, firsts)
    arrays = jax.tree.map(lambda x: x.reshape(whole * size, *x.shape[2:]), arrays)
    if rest:
        carry, last = of_chunk(carry, jnp.int32(whole * size), rest)
        arrays = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), arrays, last)
    return carry, arrays
