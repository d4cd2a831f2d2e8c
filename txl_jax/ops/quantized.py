"""Matrices of int8 with a float scale per channel (weight and KV cache quantization): a quarter of float32's bytes.

    matrix = quantize(kernel, axis=0)  # [n, m]: a scale per column.
    outputs = multiply(rows, matrix)

A number w of a channel is stored as round(127 w / c), c the largest |w| of the channel. A single row, as in generation
on a CPU, is multiplied in floating point by numbers that are converted while they are read. Several rows, and any on an
accelerator, keep 16 bits: a row x is split into x = (high + low / 254) s, two rows of int8 with the scale s = max |x| /
127. So int8 meets int8 and the sums are exact in int32, for which matrix units have instructions.

A single row on XLA's CPU backend (512 x 2048, two cores of an Intel Xeon with AMX, jax 0.10.2), times that of float32:
0.4 to 0.5 as it is done here, 0.65 to 0.85 as two rows of int8 (the matrix is rearranged in every product), 2 as a sum
over a fusion of conversion and product, 4 with the terms of int8 in batches, 8 as one row of int8, which is no product
for XLA. With the matrix converted to float32 it is ten (the copy is written first; on an AMD EPYC).
"""

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.ops.row_product import row_product

_MOST = 127  # The largest int8 that has a negative.
_STEPS = 2 * _MOST  # Of `low` between two neighbours of `high`.
# Terms of a sum of products up to 127 * 127 that int32 can hold.
_MOST_TERMS = (2**31 - 1) // _MOST**2


class Int8(flax.struct.PyTreeNode):
    """An array as values * scale.

    Attributes:
      values: int8, in the shape of the array.
      scale: float32 or wider, of the same rank; 1 along the axis that a channel runs over.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the array."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Returns int8."""
        return self.values.dtype

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the array in a floating-point type."""
        return (self.values.astype(self.scale.dtype) * self.scale).astype(dtype)


class Int8Table(flax.struct.PyTreeNode):
    """A table [v, w] whose rows are channels, kept as its transpose: XLA's CPU backend would turn it in every product.

    With v = 160,000 and w = 410 a product takes 5 ms as it is kept and 140 ms the other way round.
    """

    columns: Int8  # [w, v]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (v, w)."""
        width, rows = self.columns.shape
        return rows, width


def quantize(array: jax.Array, *, axis: int) -> Int8:
    """Rounds an array to int8, each channel (the numbers along `axis`) with a scale of its own.

    The error is at most half a step: 1/254 of the channel's largest magnitude.
    """
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    values, scale = _rounded(wide, axis)
    return Int8(values.astype(jnp.int8), scale)


def multiply(rows: jax.Array, matrix: Int8) -> jax.Array:
    """Computes matrix products: [..., L, n] x [..., n, m] -> [..., L, m], in at least float32.

    Args:
      rows: of a floating-point type.
      matrix: with a scale per column [..., 1, m], or per row [..., n, 1].
    """
    assert rows.shape[-1] <= _MOST_TERMS, f"{rows.shape[-1]} terms may overflow int32"
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    by_column = matrix.scale.shape[-2] == 1
    if not by_column:
        wide *= matrix.scale.swapaxes(-1, -2).astype(wide.dtype)
    if rows.shape[-2] == 1:
        products = row_product(wide, matrix.values, otherwise=_multiply_split)
    else:
        products = _multiply_split(wide, matrix.values)
    return products * matrix.scale.astype(products.dtype) if by_column else products


def _multiply_split(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Computes [..., L, n] x [..., n, m] as products of int8, with rows rounded to 16 bits."""
    n_row = rows.shape[-2]
    high, scale = _rounded(rows, -1)
    low = jnp.round((rows / jnp.where(scale > 0, scale, 1) - high) * _STEPS)
    split = jnp.concatenate([high, low], axis=-2).astype(jnp.int8)
    sums = jnp.matmul(split, values, preferred_element_type=jnp.int32).astype(rows.dtype)
    return (sums[..., :n_row, :] + sums[..., n_row:, :] / _STEPS) * scale


def _rounded(array: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns whole numbers from -127 to 127, still as floats, and the scale that gives the array back."""
    scale = jnp.max(jnp.abs(array), axis=axis, keepdims=True) / _MOST
    return jnp.round(array / jnp.where(scale > 0, scale, 1)), scale
