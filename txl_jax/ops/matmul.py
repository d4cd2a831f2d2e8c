"""Matmuls of a few rows with a float, int8 or transposed matrix.

They take the form that is fastest for the number of rows.

    # [..., n] and a weight [n, ...]: an array, `Int8` or `Transposed`.
    outputs = project(inputs, kernel)
    # [..., n] and a table [m, n]: an array or `Int8Table`.
    outputs = multiply_by_rows(states, table, dtype)
    # [..., L, n] and [..., n, m] in int8.
    outputs = multiply(rows, quantize(matrix, axis=-2))

Weights and KV cache in int8 have a float scale per channel and a quarter of float32's bytes. A
number w of a channel is stored as round(127 w / c), c the largest |w| of the channel. A single row,
as in generation on a CPU, is multiplied in floating point by numbers that are converted while they
are read. Several rows, and any on an accelerator, keep 16 bits: a row x is split into x = (high +
low / 254) s, two rows of int8 with the scale s = max |x| / 127. So int8 meets int8 and the sums are
exact in int32, for which matrix units have instructions.

A single row on XLA's CPU backend (512 x 2048, two cores of an Intel Xeon with AMX, jax 0.10.2),
times that of float32:
0.4 to 0.5 as it is done here, 0.65 to 0.85 as two rows of int8 (the matrix is rearranged in every
product), 2 as a sum over a fusion of conversion and product, 4 with the terms of int8 in batches, 8
as one row of int8, which XLA does not take for a product. With the matrix converted to float32 it
is ten (the copy is written first; on an AMD EPYC).
"""

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# With 512 both sides take the same time (512 x 2048 and the like).
_MOST_STATES = 256
# The largest int8 that has a negative.
_MOST = 127
# Of `low` between two neighbours of `high`.
_STEPS = 2 * _MOST
# Terms of a sum of products up to 127 * 127 that int32 can hold.
_MOST_TERMS = (2**31 - 1) // _MOST**2

# Terms that are added in one loop over a matrix. With 16, 32 and 64 the time is the same within a
# tenth on an Intel Xeon (512 x 2048 of int8). An AMD EPYC (Zen 4), whose L1 cache has 8 ways, takes
# 58, 51, 96 and 213 us with 8, 12, 16 and 32. More of them take longer to compile.
_TERMS = 12


def wide_type(array: jax.Array) -> jnp.dtype:
    """Returns the type of an array's sums: at least float32."""
    return jnp.promote_types(array.dtype, jnp.float32)


def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Computes an einsum in the type of the operands, and adds in the wide one."""
    return jnp.einsum(equation, left, right, preferred_element_type=wide_type(left))


class Int8(flax.struct.PyTreeNode):
    """An array as values * scale."""

    # int8, in the shape of the array.
    values: jax.Array
    # float32 or wider, of the same rank; 1 along the axis that a channel runs over.
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
    """A table [v, w] whose rows are channels, stored as its transpose.

    XLA's CPU backend would otherwise transpose it in every matmul.

    With v = 160,000 and w = 410 a product takes 5 ms as it is kept and 140 ms the other way round.
    """

    columns: Int8  # [w, v]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (v, w)."""
        width, rows = self.columns.shape
        return rows, width


class Transposed(flax.struct.PyTreeNode):
    """A matrix [n, ...] stored as its transpose.

    Its products with multiple rows are faster on a CPU.

    The layers of wt103_base (410 x 1230, 410 x 410, 410 x 2100 and 2100 x 410, 16 of each) take
    15.0 ms with 16 rows, and 22.6 as they are; from 512 rows on the times are the same. With one
    row it depends on the shape: 5.3 and 6.8 ms, but with those of enwik8_12l (512 and 2048) 4.1 and
    3.8 (two cores of an AMD EPYC, jax 0.10.2).
    """

    rows: jax.Array  # [m, n]
    columns: tuple[int, ...] = flax.struct.field(pytree_node=False)  # Shape of the m columns.

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the matrix, [n, ...]."""
        return self.rows.shape[1], *self.columns


def quantize(array: jax.Array, *, axis: int) -> Int8:
    """Rounds an array to int8, each channel (the numbers along `axis`) with its own scale.

    The error is at most half a step: 1/254 of the channel's largest magnitude.
    """
    values, scale = _rounded(array.astype(wide_type(array)), axis)
    return Int8(values.astype(jnp.int8), scale)


def transpose(kernel: jax.Array) -> Transposed:
    """Returns the transpose of [n, ...]."""
    n, *columns = kernel.shape
    return Transposed(kernel.reshape(n, -1).T, tuple(columns))


def project(inputs: jax.Array, kernel: jax.Array | Int8 | Transposed) -> jax.Array:
    """Computes x W: [..., n] and [n, ...] -> [..., ...], in the type of `inputs`.

    A single row (one token) is split in half and multiplied as a batch of two, unless the matrix is
    `Transposed`: XLA's CPU backend runs a product of a vector and a matrix on one thread and a
    batch on all. It takes as long as reading W (512 x 2048 and the like, on two cores: 14 to 21
    GB/s in one product, 23 to 28 in two halves).
    """
    n, *columns = kernel.shape
    if isinstance(kernel, Transposed):
        outputs = multiply_by_rows(inputs, kernel.rows, inputs.dtype)
    elif isinstance(kernel, Int8):
        flat8 = Int8(kernel.values.reshape(n, -1), kernel.scale.reshape(1, -1))
        outputs = multiply(inputs.reshape(-1, n), flat8).astype(inputs.dtype)
    else:
        flat = kernel.reshape(n, math.prod(columns))
        if inputs.size == n and n % 2 == 0:
            halves = jnp.einsum(
                "pn,pnm->pm", inputs.reshape(2, n // 2), flat.reshape(2, n // 2, -1)
            )
            outputs = jnp.sum(halves, axis=0)
        else:
            # One matrix of rows: with several axes, XLA's CPU backend takes twice the time for the
            # gradient of W.
            outputs = inputs.reshape(-1, n) @ flat
    return outputs.reshape(*inputs.shape[:-1], *columns)


def multiply_by_rows(
    states: jax.Array, table: jax.Array | Int8Table, dtype: jnp.dtype
) -> jax.Array:
    """Multiplies with the rows of a table: [..., n] x [m, n] -> [..., m] of type `dtype`.

    On a CPU several states, up to `_MOST_STATES`, are the right side of the product. Tables of
    wt103_base's softmax (267,738 x 410, two cores of an AMD EPYC, jax 0.10.2) take 32 ms with 16
    states, and 48 with them on the left.
    """
    if isinstance(table, Int8Table):
        flat = multiply(states.reshape(-1, states.shape[-1]), table.columns)
        return flat.astype(dtype).reshape(*states.shape[:-1], -1)
    n_state = states.size // table.shape[1]
    everywhere = functools.partial(jnp.einsum, "...n,mn->...m", preferred_element_type=dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # Of narrower types the time was not measured.
    if not wide == dtype == states.dtype == table.dtype or n_state > _MOST_STATES:
        return everywhere(states, table)
    return jax.lax.platform_dependent(states, table, cpu=_multiply_few, default=everywhere)


def _multiply_few(states: jax.Array, table: jax.Array) -> jax.Array:
    """Multiplies a few states with the rows of a table: [..., n] x [m, n] -> [..., m]."""
    flat = states.reshape(-1, states.shape[-1])
    # A barrier, or else XLA turns the sides round again; and with one state it would make one loop
    # of the product and the sum with a bias, which takes 24 ms for the tables above, not 15.
    if len(flat) == 1:
        products = jax.lax.optimization_barrier(flat @ table.T)
    else:
        products = jax.lax.optimization_barrier(table @ flat.T).T
    return products.reshape(*states.shape[:-1], -1)


def multiply(rows: jax.Array, matrix: Int8) -> jax.Array:
    """Computes products with int8: [..., L, n] x [..., n, m] -> [..., L, m], in at least float32.

    The matrix has a scale per column, [..., 1, m], or per row, [..., n, 1].
    """
    assert rows.shape[-1] <= _MOST_TERMS, f"{rows.shape[-1]} terms may overflow int32"
    wide = rows.astype(wide_type(rows))
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
    """Returns whole numbers from -127 to 127, and the scale that restores the array.

    The numbers are still floats.
    """
    scale = jnp.max(jnp.abs(array), axis=axis, keepdims=True) / _MOST
    return jnp.round(array / jnp.where(scale > 0, scale, 1)), scale


def row_product(
    row: jax.Array, matrix: jax.Array, otherwise: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Computes [..., 1, n] x [..., n, m] -> [..., 1, m] in the type of `row`.

    On a CPU as sums over slabs of the matrix. The products of XLA's CPU backend read float32
    matrices with 64 columns or rows as fast as the memory allows, with 41 (wt103_base) at half of
    that, and int8 not without a copy. With the attention of wt103_base's layers done so, the
    server's step of 16 rows takes 59 ms instead of 81, for one row 11.8 instead of 13.5 (two cores
    of an Intel Xeon with AMX, jax 0.10.2). The matrix has the row's type, at least float32, or
    int8. bfloat16 would be converted as a whole first. `otherwise` computes the same on other
    devices.
    """
    return jax.lax.platform_dependent(row, matrix, cpu=_sum_slabs, default=otherwise)


def _sum_slabs(row: jax.Array, matrix: jax.Array) -> jax.Array:
    """Cuts the matrix into slabs of c rows.

    The first number of each is a term of the first of c sums, and so on.

    It is one loop for XLA, which reads the matrix once, converts it in registers and writes n / c
    times fewer numbers.
    """
    # Or else, in a loop over tokens, XLA converts a matrix that stays the same before it: a copy in
    # float32.
    row, matrix = jax.lax.optimization_barrier((row, matrix))
    n_term = matrix.shape[-2]
    # c is odd: slabs that begin at multiples of 4096 bytes would share the ways of one set of the
    # L1 cache (Zen 4, 16 terms of 512 x 2048: 114 us with c = 32, 59 with 33).
    height = -(-n_term // _TERMS) | 1
    column = row.swapaxes(-1, -2)
    sums = jnp.zeros((), row.dtype)
    for start in range(0, n_term, height):
        # The last slab begins with rows of the one before, which count once.
        first = min(start, n_term - height)
        factors = column[..., first : first + height, :]
        if first < start:
            factors = jnp.where((np.arange(height) < start - first)[:, None], 0, factors)
        sums += factors * matrix[..., first : first + height, :].astype(row.dtype)
    if height == 1:
        return sums
    # A product with ones: a sum would become a part of the loop, and make it slower than one in
    # float32. The ones come from the row: if `vmap` saw a constant it would move its rows to the
    # columns of the product, a copy of the sums.
    ones = jnp.where(jnp.isnan(row[..., :height]), jnp.ones((), row.dtype), 1)
    return ones @ sums
