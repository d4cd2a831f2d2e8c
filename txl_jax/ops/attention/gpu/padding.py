"""Padding of arrays to the sizes that kernels and the library want."""

import jax
import jax.numpy as jnp

ALIGNMENT = 8  # Elements of 16 bytes: what a thread reads at once, and what cuBLAS asks of the rows of a matrix.
_SMALLEST = 16  # Of the inner side of a product in Triton.


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple


def pad(x: jax.Array, axis: int, front: int, behind: int) -> jax.Array:
    """Returns the array with zeros at both ends of an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (front, behind)
    return jnp.pad(x, widths) if front or behind else x


def power_of_two(width: int) -> int:
    """Returns the width that a kernel computes with: a tile's sides are powers of two in Triton."""
    return max(_SMALLEST, 1 << (width - 1).bit_length())


def widen(x: jax.Array) -> jax.Array:
    """Returns the array with its last axis, E, filled up to that width."""
    return pad(x, x.ndim - 1, 0, power_of_two(x.shape[-1]) - x.shape[-1])
