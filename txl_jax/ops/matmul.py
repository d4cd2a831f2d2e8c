"""Matrix products, in the form that is fastest for the number of rows."""

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.ops import quantized
from txl_jax.ops.quantized import Int8

_MOST_STATES = 256  # With 512 both sides take the same time (512 x 2048 and the like).


class Transposed(flax.struct.PyTreeNode):
    """A matrix [n, ...] kept as its transpose, whose products with several rows are faster on a CPU.

    The layers of wt103_base (410 x 1230, 410 x 410, 410 x 2100 and 2100 x 410, 16 of each) take 15.0 ms with 16 rows,
    and 22.6 as they are; from 512 rows on the times are the same. With one row it depends on the shape: 5.3 and 6.8 ms,
    but with those of enwik8_12l (512 and 2048) 4.1 and 3.8 (two cores of an AMD EPYC, jax 0.10.2).
    """

    rows: jax.Array  # [m, n]
    columns: tuple[int, ...] = flax.struct.field(pytree_node=False)  # Shape of the m columns.

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the matrix, [n, ...]."""
        return self.rows.shape[1], *self.columns


def transpose(kernel: jax.Array) -> Transposed:
    """Returns the transpose of [n, ...]."""
    n, *columns = kernel.shape
    return Transposed(kernel.reshape(n, -1).T, tuple(columns))


def project(inputs: jax.Array, kernel: jax.Array | Int8 | Transposed) -> jax.Array:
    """Computes x W: [..., n] and [n, ...] -> [..., ...], in the type of `inputs`.

    A single row (one token) is split in half and multiplied as a batch of two, unless the matrix is `Transposed`: XLA's
    CPU backend runs a product of a vector and a matrix on one thread and a batch on all. The time is that of reading W
    (512 x 2048 and the like, on two cores: 14 to 21 GB/s in one product, 23 to 28 in two halves).
    """
    n, *columns = kernel.shape
    if isinstance(kernel, Transposed):
        return multiply_by_rows(inputs, kernel.rows, inputs.dtype).reshape(*inputs.shape[:-1], *columns)
    if isinstance(kernel, Int8):
        flat8 = Int8(kernel.values.reshape(n, -1), kernel.scale.reshape(1, -1))
        outputs = quantized.multiply(inputs.reshape(-1, n), flat8).astype(inputs.dtype)
        return outputs.reshape(*inputs.shape[:-1], *columns)
    flat = kernel.reshape(n, math.prod(columns))
    if inputs.size == n and n % 2 == 0:
        halves = jnp.einsum("pn,pnm->pm", inputs.reshape(2, n // 2), flat.reshape(2, n // 2, -1))
        outputs = jnp.sum(halves, axis=0).reshape(*inputs.shape[:-1], -1)
    else:
        outputs = inputs @ flat
    return outputs.reshape(*inputs.shape[:-1], *columns)


def multiply_by_rows(states: jax.Array, table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies with the rows of a table: [..., n] x [m, n] -> [..., m] of type `dtype`.

    On a CPU several states, up to `_MOST_STATES`, are the right side of the product. Tables of wt103_base's softmax
    (267,738 x 410, two cores of an AMD EPYC, jax 0.10.2) take 32 ms with 16 states, and 48 with them on the left.
    """
    n_state = states.size // table.shape[1]
    everywhere = functools.partial(jnp.einsum, "...n,mn->...m", preferred_element_type=dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # Of narrower types the time was not measured.
    if not wide == dtype == states.dtype == table.dtype or n_state > _MOST_STATES:
        return everywhere(states, table)
    return jax.lax.platform_dependent(states, table, cpu=_multiply_few, default=everywhere)


def _multiply_few(states: jax.Array, table: jax.Array) -> jax.Array:
    """Multiplies a few states with the rows of a table: [..., n] x [m, n] -> [..., m]."""
    flat = states.reshape(-1, states.shape[-1])
    # A barrier, or else XLA turns the sides round again; and with one state it would make one loop of the product and
    # the sum with a bias, which takes 24 ms for the tables above, not 15.
    if len(flat) == 1:
        products = jax.lax.optimization_barrier(flat @ table.T)
    else:
        products = jax.lax.optimization_barrier(table @ flat.T).T
    return products.reshape(*states.shape[:-1], -1)
