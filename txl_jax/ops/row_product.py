"""Products of one row with a matrix, which is read once: the time of generation, a token at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Terms that are added in one loop over a matrix. With 16, 32 and 64 the time is the same within a tenth on an Intel
# Xeon (512 x 2048 of int8). An AMD EPYC (Zen 4), whose L1 cache has 8 ways, takes 58, 51, 96 and 213 us with 8, 12, 16
# and 32. More of them take longer to compile.
_TERMS = 12


def row_product(row: jax.Array, matrix: jax.Array, otherwise: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Computes [..., 1, n] x [..., n, m] -> [..., 1, m] in the type of `row`.

    On a CPU as sums over slabs of the matrix. The products of XLA's CPU backend read float32 matrices with 64 columns
    or rows as fast as the memory allows, with 41 (wt103_base) at half of that, and int8 not without a copy. With the
    attention of wt103_base's layers done so, the server's step of 16 rows takes 59 ms in place of 81, that of one row
    11.8 in place of 13.5 (two cores of an Intel Xeon with AMX, jax 0.10.2).

    Args:
      row: float32 or float64.
      matrix: of the same type, or int8. bfloat16 would be converted as a whole first.
      otherwise: computes the same on other devices.
    """
    return jax.lax.platform_dependent(row, matrix, cpu=_sum_slabs, default=otherwise)


def _sum_slabs(row: jax.Array, matrix: jax.Array) -> jax.Array:
    """Cuts the matrix into slabs of c rows; the first number of each is a term of the first of c sums, and so on.

    It is one loop for XLA, which reads the matrix once, converts it in registers and writes n / c times fewer numbers.
    """
    # Or else, in a loop over tokens, XLA converts a matrix that stays the same before it: a copy in float32.
    row, matrix = jax.lax.optimization_barrier((row, matrix))
    n_term = matrix.shape[-2]
    # c is odd: slabs that begin at multiples of 4096 bytes would share the ways of one set of the L1 cache (Zen 4,
    # 16 terms of 512 x 2048: 114 us with c = 32, 59 with 33).
    height = -(-n_term // _TERMS) | 1
    column = row.swapaxes(-1, -2)
    sums = jnp.zeros((), row.dtype)
    for start in range(0, n_term, height):
        first = min(start, n_term - height)  # The last slab begins with rows of the one before, which count once.
        factors = column[..., first : first + height, :]
        if first < start:
            factors = jnp.where((np.arange(height) < start - first)[:, None], 0, factors)
        sums += factors * matrix[..., first : first + height, :].astype(row.dtype)
    if height == 1:
        return sums
    # A product with ones: a sum would become a part of the loop, and make it slower than one in float32. The ones come
    # from the row: if `vmap` saw a constant it would move its rows to the columns of the product, a copy of the sums.
    ones = jnp.where(jnp.isnan(row[..., :height]), jnp.ones((), row.dtype), 1)
    return ones @ sums
