"""A kernel of one line, to learn whether this jax and this libtpu understand each other's kernels."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def compile_trial(device: jax.Device) -> None:
    """Compiles the kernel for a device; raises what the compiler raises.

    In a thread of its own, which has no ambient mesh and no trace: a kernel for several devices outside `shard_map` is
    refused by Pallas.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compile, device).result()


def _compile(device: jax.Device) -> None:
    block = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    given = jax.ShapeDtypeStruct(block.shape, block.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    jax.jit(pl.pallas_call(_kernel, out_shape=block, name="trial")).lower(given).compile()


def _kernel(given: Any, out: Any) -> None:
    out[...] = given[...] + 1
