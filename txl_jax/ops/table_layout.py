"""The layout of large embedding tables on TPUs.

A TPU stores the last two axes of an array in tiles of 8 x 128 numbers. XLA chooses which axis has
the 128, by whichever needs less padding, for arrays that enter and leave a program. A table
[267,735, 410] would be padded to 512 columns, so that it is stored by columns, like its moments in
the optimizer's state. But rows are looked up, and gradients are added to rows, in a table that is
stored by rows. Left alone, XLA turns the whole optimizer to rows: in each step of wt103_base it
copied the table, its gradient and both moments to the other layout and back, seven copies of 1.0 GB
each. Asking for automatic layouts of the compiled step's state (`Layout.AUTO`) changed nothing.
Here only the gradient is turned, once, and the lookup reads a copy in the compute dtype.

Letters: V rows of the table, w its width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from txl_jax.sharding.mesh import ambient_mesh

# Numbers along the two axes of a TPU's tile.
_TILE = (8, 128)
# Tables with fewer numbers (16 MiB in float32) stay as they are.
_MIN_SIZE = 2**22
# The layout of a table that is stored by columns, as its axes from major to minor.
_BY_COLUMNS = Layout(major_to_minor=(1, 0))


def is_stored_by_columns(shape: tuple[int, ...]) -> bool:
    """Returns whether a single TPU would store a large table [V, w] by columns.

    A sharded table is left to XLA: its partitioner would gather an array with a fixed layout.
    """
    rows, width = shape
    if rows * width < _MIN_SIZE or ambient_mesh() is not None:
        return False
    return _padded_size(width, rows) < _padded_size(rows, width)


def _padded_size(*shape: int) -> int:
    """Returns how many numbers an array of two axes has with its padding."""
    return math.prod(-(-size // tile) * tile for size, tile in zip(shape, _TILE, strict=True))


@jax.custom_vjp
def _with_turned_gradient(table: jax.Array) -> jax.Array:
    """Returns the table. Its gradient gets the layout of the table."""
    return table


def _turned_forward(table: jax.Array) -> tuple[jax.Array, None]:
    return table, None


def _turned_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (with_layout_constraint(gradient, _BY_COLUMNS),)


_with_turned_gradient.defvjp(_turned_forward, _turned_backward)


def turn_gradient(table: jax.Array) -> jax.Array:
    """Returns a table [V, w] whose gradient, on a TPU, will have the layout of the table.

    Lookup and softmax each give a gradient of a tied table. The softmax's is written by columns,
    and the optimizer adds it while it reads it. The lookup's is written by rows, and for its sake
    XLA would turn the whole optimizer.
    """
    if not is_stored_by_columns(table.shape):
        return table
    # Other platforms never see the derivative of its own, so they keep `jax.jvp`.
    return jax.lax.platform_dependent(table, tpu=_with_turned_gradient, default=lambda table: table)


def take_rows(table: jax.Array, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Looks up rows, in a dtype: [V, w] and int [...] in range -> [..., w] of dtype `dtype`.

    Gradients add up in the table's dtype.
    """
    take = functools.partial(_take, dtype=dtype)
    is_narrower = jnp.dtype(dtype).itemsize < table.dtype.itemsize
    if not is_narrower or not is_stored_by_columns(table.shape):
        return take(table, rows)
    return jax.lax.platform_dependent(
        table, rows, tpu=functools.partial(_take_from_copy, dtype), default=take
    )


def _take(table: jax.Array, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.take(table, rows, axis=0).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_from_copy(dtype: jnp.dtype, table: jax.Array, rows: jax.Array) -> jax.Array:
    """Looks up rows in a copy of the table, in the compute dtype.

    A TPU's lookup needs a copy that is stored by rows. Converted first, the copy has half the
    bytes, and a tied softmax uses the same.
    """
    return jnp.take(table.astype(dtype), rows, axis=0)


def _take_forward(dtype: jnp.dtype, table: jax.Array, rows: jax.Array) -> tuple[jax.Array, Any]:
    # Of the table, only shape and dtype are used.
    return _take_from_copy(dtype, table, rows), (table, rows)


def _take_backward(
    dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    table, rows = residuals
    zeros = jnp.zeros(table.shape, table.dtype)
    return zeros.at[rows].add(cotangent.astype(table.dtype)), None


_take_from_copy.defvjp(_take_forward, _take_backward)
