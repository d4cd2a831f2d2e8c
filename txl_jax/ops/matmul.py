"""Matmuls of a few rows with a float, int8 or transposed matrix.

They take the form that is fastest for the number of rows.

    # [..., n] and a weight [n, ...]: an array, `Int8` or `Transposed`.
    outputs = project(inputs, kernel)
    # [..., n] and a table [m, n]: an array or `Int8Table`.
    outputs = multiply_by_rows(states, table, dtype)
    # [..., L, n] and [..., n, m] in int8.
    outputs = multiply(rows, quantize(matrix, axis=-2))

Weights and KV cache in int8 have a float scale per channel and a quarter of float32's bytes. A
number w of a channel is stored as round(127 w / c), where c is the largest |w| of the channel.

A single row, as in generation on a CPU, is multiplied in floating point by numbers that are
converted while they are read. Multiple rows, and any rows on an accelerator, keep 16 bits: a row x
is split into x = (high + low / 254) s, two rows of int8 with the scale s = max |x| / 127. So int8
meets int8 and the sums are exact in int32, for which matrix units have instructions.

A single row on XLA's CPU backend (512 x 2048, two cores of an Intel Xeon with AMX, jax 0.10.2), as
a multiple of float32's time:

- 0.4 to 0.5 as it is done here,
- 0.65 to 0.85 as two rows of int8 (the matrix is rearranged in every product),
- 2 as a sum over a fusion of conversion and product,
- 4 with the terms of int8 in batches,
- 8 as one row of int8, which XLA does not take for a product,
- 10 with the matrix converted to float32 (the copy is written first; on an AMD EPYC).
"""

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Most states that are the right side of a product with a table (`multiply_by_rows`). With 512 both
# sides take the same time (512 x 2048 and the like).
_MAX_STATES = 256
# The largest int8 whose negative is an int8 too.
_MAX_INT8 = 127
# Steps of `low` between two neighbours of `high` (`_multiply_split`).
_STEPS = 2 * _MAX_INT8
# Most products, each of at most 127 * 127, whose sum int32 can hold.
_MAX_TERMS = (2**31 - 1) // _MAX_INT8**2

# Terms that are added in one loop over a matrix (`_sum_slabs`). With 16, 32 and 64 the time is the
# same within a tenth on an Intel Xeon (512 x 2048 of int8). An AMD EPYC (Zen 4), whose L1 cache has
# 8 ways, takes 58, 51, 96 and 213 us with 8, 12, 16 and 32. It is not recorded whether c was made
# odd in this series: with 16 terms, `_sum_slabs` has 114 us for an even c and 59 us for an odd one.
# More terms take longer to compile.
_LOOP_TERMS = 12


def wide_type(array: jax.Array) -> jnp.dtype:
    """Returns the dtype in which an array is summed, at least float32."""
    return jnp.promote_types(array.dtype, jnp.float32)


def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Computes an einsum of operands of one dtype, whose sums have the dtype `wide_type`."""
    return jnp.einsum(equation, left, right, preferred_element_type=wide_type(left))


class Int8(flax.struct.PyTreeNode):
    """An array as values * scale."""

    # int8, in the shape of the array.
    values: jax.Array
    # float32 or wider, of the same rank, with size 1 along the axis that a channel runs over.
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

    With v = 160,000 and w = 410 a product takes 5 ms with the transpose and 140 ms with the table.
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

    With 16 rows the layers of wt103_base (410 x 1230, 410 x 410, 410 x 2100 and 2100 x 410, 16 of
    each) take 15.0 ms transposed, and 22.6 as they are. From 512 rows on the times are the same.
    With one row it depends on the shape: the same layers take 5.3 ms transposed, and 6.8 as they
    are, but the layers of enwik8_12l (512 and 2048) 4.1 transposed, and 3.8 as they are (two cores
    of an AMD EPYC, jax 0.10.2).
    """

    rows: jax.Array  # [m, n]
    columns: tuple[int, ...] = flax.struct.field(pytree_node=False)  # The shape of the m columns.

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
    """Computes x W: [..., n] and [n, ...] -> [..., ...], in the dtype of `inputs`."""
    n, *columns = kernel.shape
    if isinstance(kernel, Transposed):
        outputs = multiply_by_rows(inputs, kernel.rows, inputs.dtype)
    elif isinstance(kernel, Int8):
        flat8 = Int8(kernel.values.reshape(n, -1), kernel.scale.reshape(1, -1))
        outputs = multiply(inputs.reshape(-1, n), flat8).astype(inputs.dtype)
    else:
        outputs = _project_floats(inputs, kernel.reshape(n, math.prod(columns)))
    return outputs.reshape(*inputs.shape[:-1], *columns)


def _project_floats(inputs: jax.Array, matrix: jax.Array) -> jax.Array:
    """Computes x W: [..., n] and [n, m] -> [rows, m], or [m] for a single row that is halved.

    A single row (one token) is split in half and multiplied as a batch of two: XLA's CPU backend
    runs a product of a vector and a matrix on one thread and a batch on all. It takes as long as
    reading W (512 x 2048 and the like, on two cores: 14 to 21 GB/s in one product, 23 to 28 in two
    halves).
    """
    n = matrix.shape[0]
    if inputs.size == n and n % 2 == 0:
        input_halves = inputs.reshape(2, n // 2)
        matrix_halves = matrix.reshape(2, n // 2, -1)
        return jnp.sum(jnp.einsum("pn,pnm->pm", input_halves, matrix_halves), axis=0)
    # One matrix of rows: with more axes, XLA's CPU backend takes twice the time for the gradient of
    # W.
    return inputs.reshape(-1, n) @ matrix


def multiply_by_rows(
    states: jax.Array, table: jax.Array | Int8Table, dtype: jnp.dtype
) -> jax.Array:
    """Multiplies with the rows of a table: [..., n] x [m, n] -> [..., m] of dtype `dtype`.

    On a CPU the states, if they are at most `_MAX_STATES`, are the right side of the product.
    Tables of wt103_base's softmax (267,738 x 410, two cores of an AMD EPYC, jax 0.10.2) take 32 ms
    with 16 states, and 48 with them on the left.
    """
    if isinstance(table, Int8Table):
        flat = multiply(states.reshape(-1, states.shape[-1]), table.columns)
        return flat.astype(dtype).reshape(*states.shape[:-1], -1)

    multiply_any = functools.partial(jnp.einsum, "...n,mn->...m", preferred_element_type=dtype)
    n_state = states.size // table.shape[1]
    # The time was not measured for narrower dtypes.
    is_wide = dtype == states.dtype == table.dtype == jnp.promote_types(dtype, jnp.float32)
    if not is_wide or n_state > _MAX_STATES:
        return multiply_any(states, table)
    return jax.lax.platform_dependent(states, table, cpu=_multiply_few, default=multiply_any)


def _multiply_few(states: jax.Array, table: jax.Array) -> jax.Array:
    """Multiplies a few states with the rows of a table: [..., n] x [m, n] -> [..., m]."""
    flat = states.reshape(-1, states.shape[-1])
    # Without the barrier XLA turns the sides round again. With one state it would make one loop of
    # the product and the sum with a bias, which takes 24 ms for the tables above, not 15.
    if len(flat) == 1:
        products = jax.lax.optimization_barrier(flat @ table.T)
    else:
        products = jax.lax.optimization_barrier(table @ flat.T).T
    return products.reshape(*states.shape[:-1], -1)


def multiply(rows: jax.Array, matrix: Int8) -> jax.Array:
    """Computes products with int8: [..., L, n] x [..., n, m] -> [..., L, m], in at least float32.

    The matrix has a scale per column, [..., 1, m], or per row, [..., n, 1].
    """
    assert rows.shape[-1] <= _MAX_TERMS, f"{rows.shape[-1]} terms may overflow int32"
    wide = rows.astype(wide_type(rows))

    # A scale per row of the matrix multiplies the terms, and a scale per column the sums.
    is_by_column = matrix.scale.shape[-2] == 1
    if not is_by_column:
        wide *= matrix.scale.swapaxes(-1, -2).astype(wide.dtype)
    if rows.shape[-2] == 1:
        products = row_product(wide, matrix.values, otherwise=_multiply_split)
    else:
        products = _multiply_split(wide, matrix.values)
    if is_by_column:
        products *= matrix.scale.astype(products.dtype)
    return products


def _multiply_split(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Computes [..., L, n] x [..., n, m] as products of int8, with rows rounded to 16 bits."""
    high, scale = _rounded(rows, -1)
    remainder = rows / jnp.where(scale > 0, scale, 1) - high
    low = jnp.round(remainder * _STEPS)

    # One product for both halves, whose rows come one after the other.
    split = jnp.concatenate([high, low], axis=-2).astype(jnp.int8)
    sums = jnp.matmul(split, values, preferred_element_type=jnp.int32).astype(rows.dtype)
    n_row = rows.shape[-2]
    return (sums[..., :n_row, :] + sums[..., n_row:, :] / _STEPS) * scale


def _rounded(array: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns whole numbers from -127 to 127, and the scale that restores the array.

    The numbers are still floats. A channel runs along `axis`.
    """
    scale = jnp.max(jnp.abs(array), axis=axis, keepdims=True) / _MAX_INT8
    # A channel of zeros has the scale 0.
    return jnp.round(array / jnp.where(scale > 0, scale, 1)), scale


def row_product(
    row: jax.Array, matrix: jax.Array, otherwise: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Computes [..., 1, n] x [..., n, m] -> [..., 1, m] in the dtype of `row`.

    On a CPU it is computed as sums over slabs of the matrix. The products of XLA's CPU backend read
    float32 matrices with 64 columns or rows as fast as the memory allows, with 41 (wt103_base) at
    half of that, and int8 not without a copy. With the attention of wt103_base's layers as sums,
    the server's step for a batch of 16 takes 59 ms instead of 81, and for a batch of 1 11.8 instead
    of 13.5 (two cores of an Intel Xeon with AMX, jax 0.10.2).

    Args:
      row: At least float32. The axes before its last two are batch axes, the same as the matrix's.
      matrix: In the row's dtype or int8. bfloat16 would be converted as a whole first.
      otherwise: Computes the same on other devices.
    """
    return jax.lax.platform_dependent(row, matrix, cpu=_sum_slabs, default=otherwise)


def _sum_slabs(row: jax.Array, matrix: jax.Array) -> jax.Array:
    """Computes `row_product` with the matrix cut into slabs of c rows.

    There are c sums: row i of each slab is a term of sum i, and at the end the sums are added. For
    XLA this is one loop, which reads the matrix once, converts it in registers and writes n / c
    times fewer numbers.
    """
    # In a loop over tokens, where the matrix stays the same, XLA would otherwise convert it before
    # the loop, which is a copy in float32.
    row, matrix = jax.lax.optimization_barrier((row, matrix))
    n_term = matrix.shape[-2]
    # c is odd: slabs that begin at multiples of 4096 bytes would share the ways of one set of the
    # L1 cache (Zen 4, 16 terms of 512 x 2048: 114 us with c = 32, 59 with 33).
    height = -(-n_term // _LOOP_TERMS) | 1

    column = row.swapaxes(-1, -2)
    sums = jnp.zeros((), row.dtype)
    for start in range(0, n_term, height):
        # The last slab begins with rows of the slab before, which must count once.
        first = min(start, n_term - height)
        n_repeated = start - first
        factors = column[..., first : first + height, :]
        if n_repeated > 0:
            is_repeated = (np.arange(height) < n_repeated)[:, None]
            factors = jnp.where(is_repeated, 0, factors)
        sums += factors * matrix[..., first : first + height, :].astype(row.dtype)
    if height == 1:
        return sums

    # The sums are added as a product with ones: a `jnp.sum` would become a part of the loop, and
    # make it slower than with a float32 matrix.
    #
    # The ones are made from the row, by a condition whose two results are both 1. Attention with an
    # index per row is under `vmap` (`inference.forward`), whose axis the ones must have, like the
    # sums. With a constant `vmap` would make its axis a part of the columns, which copies the sums.
    ones = jnp.where(jnp.isnan(row[..., :height]), jnp.ones((), row.dtype), 1)
    return ones @ sums
