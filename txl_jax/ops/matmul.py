"""Matrix products, in the form that is fastest for the number of rows."""

import math

import jax
import jax.numpy as jnp

from txl_jax.ops import quantized
from txl_jax.ops.quantized import Int8


def project(inputs: jax.Array, kernel: jax.Array | Int8) -> jax.Array:
    """Computes x W: [..., n] and [n, ...] -> [..., ...], in the type of `inputs`.

    A single row (one token) is split in half and multiplied as a batch of two: XLA's CPU
    backend runs a product of a vector and a matrix on one thread and a batch on all. The time is that of reading W
    (512 x 2048 and the like, on two cores: 14 to 21 GB/s in one product, 23 to 28 in two halves).
    """
    n, *columns = kernel.shape
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
