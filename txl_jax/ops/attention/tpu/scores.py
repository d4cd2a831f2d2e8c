"""Tiles of scores inside kernels: products, the term by distance, and rows of numbers."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from txl_jax.ops.attention.tpu.skew import LANES, Way, skew

HIDDEN = -1e30  # The score of a pair that is masked; finite, as the difference of two infinities is no number.

# Contracted dimensions of a product of two matrices.
NT = ((1,), (1,))  # [n, e] x [m, e] -> [n, m]
NN = ((1,), (0,))  # [n, m] x [m, e] -> [n, e]
TN = ((0,), (0,))  # [n, m] x [n, e] -> [m, e]


def dot(left: jax.Array, right: jax.Array, contracted: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """Multiplies two matrices with sums in float32.

    Float32 is multiplied as float32: by default the matrix unit rounds it to bfloat16. For bfloat16 the precision must
    be given too: Mosaic refuses the highest ("Bad lhs type"), which a global `jax_default_matmul_precision` would set.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(left, right, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def strip_rows(n_query: int) -> int:
    """Returns how many queries of a tile are skewed at a time: the largest divisor of the tile up to 128 in eights.

    Each strip of n queries needs its own m + 128 columns by distance, so strips keep the extra products at 128 / m.
    """
    return max(rows for rows in range(8, LANES + 1, 8) if n_query % rows == 0)


def strips(n_query: int) -> list[tuple[slice, int]]:
    """Returns for each strip of a tile its rows and the column by distance that its first one has in the tile's."""
    rows = strip_rows(n_query)
    return [(slice(at, at + rows), n_query - rows - at) for at in range(0, n_query, rows)]


def position_scores(
    query: jax.Array, position_key: Callable[[int, int], jax.Array], *, n_key: int, way: Way
) -> jax.Array:
    """Computes the term by distance of a tile, shifted: [n, m] in float32.

    Args:
      query: [n, E], with v added; n is a multiple of 8.
      position_key: (at, size) -> [size, E], the position keys of `size` distances from the one on that is `at` smaller
        than that of the tile's last query and first key.
      n_key: m, a multiple of 128.
      way: of `skew`.
    """
    size = n_key + LANES
    parts = [skew(dot(query[rows], position_key(at, size), NT), way) for rows, at in strips(query.shape[0])]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def widen(rows: jax.Array, width: int) -> jax.Array:
    """Widens one number per row, stored as 128 equal lanes, to `width` lanes: [n, 128] -> [n, width].

    Reading one lane of a reference and broadcasting it instead took 30 % longer in the whole forward kernel.
    """
    if width > LANES:
        rows = jnp.tile(rows, (1, math.ceil(width / LANES)))
    return rows if rows.shape[1] == width else rows[:, :width]


def lane_sums(array: jax.Array) -> jax.Array:
    """Adds up the registers of each row, lane by lane: [n, m] -> [n, 128]; the lanes themselves wait for the end."""
    total = array[:, :LANES]
    for at in range(LANES, array.shape[1], LANES):
        total = total + array[:, at : at + LANES]
    return total
