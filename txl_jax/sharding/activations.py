"""Sharding constraints on activations, and `shard_map`, both over the ambient mesh.

The softmax runs under `shard_map`: its loops over selected positions (`ops.chunked_apply`) take a
number of rounds that differs between devices, and vocabularies have odd sizes. XLA's partitioner
places everything else, from the shardings of parameters and batch. The activations of a layer are
constrained so that the partitioner has few choices left.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from txl_jax.sharding import axes
from txl_jax.sharding.axes import batch_axis, spec
from txl_jax.sharding.mesh import ambient_mesh


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of an activation and of its gradient over the ambient mesh.

    Without an ambient mesh of several devices, the sharding is not constrained.

    Args:
      x: The activation.
      names: Logical names (`txl_jax.sharding.axes`), one per axis, or None to replicate it. Rows of
        a batch are replicated if they do not divide among the devices, such as the one row of a
        published evaluation.

    Raises:
      ValueError: If a name is unknown or there is not one name per axis, also without a mesh.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"the array of shape {x.shape} must have one logical name per axis, got {len(names)}"
        )
    spec(*names)  # An unknown name raises.
    mesh = ambient_mesh()
    if mesh is None:
        return x

    divisible_names = []
    for name, size in zip(names, x.shape, strict=True):
        if name == axes.BATCH:
            # None if the rows do not divide among the devices.
            name = batch_axis(mesh, size)
        divisible_names.append(name)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(*divisible_names)))


def shard_map(function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps `function` over the shards of its arguments on the ambient mesh.

    Gradients of replicated arguments are summed over devices. With check_vma every array that
    differs between devices would have to be marked.
    """
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_last_axis(part: jax.Array, mesh_axis: str) -> jax.Array:
    """Gathers [..., E / n] to [..., E] inside `shard_map`, for use with other rows on each device.

    The gradient [..., E] is summed over the n devices of `mesh_axis`, and each device gets the sum
    of its own part. This is a reduce-scatter, written as an exchange of parts and a sum in at least
    float32: the TPU compiler makes an all-reduce of `psum_scatter` (libtpu 0.0.42.1, bfloat16,
    v5e:4x4), which sends twice as much.
    """
    return jax.lax.all_gather(part, mesh_axis, axis=part.ndim - 1, tiled=True)


def _gather_forward(part: jax.Array, mesh_axis: str) -> tuple[jax.Array, None]:
    """Returns the gathered array, and no residuals."""
    return gather_last_axis(part, mesh_axis), None


def _gather_backward(mesh_axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    """Returns the gradient of a device's part."""
    n_device = jax.lax.psum(1, mesh_axis)
    *others, size = gradient.shape
    parts = gradient.reshape(*others, n_device, size // n_device)

    # Every device sends part i to device i, and receives all gradients of its own: [n, ..., E / n].
    received = jax.lax.all_to_all(parts, mesh_axis, split_axis=len(others), concat_axis=0)
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    return (jnp.sum(received, axis=0, dtype=wide).astype(gradient.dtype),)


gather_last_axis.defvjp(_gather_forward, _gather_backward)


def batch_spec(batch_size: int) -> tuple[str, ...]:
    """Returns the axes of the ambient mesh that share the rows of a batch.

    The result is empty if the rows do not divide among the axes.
    """
    mesh = ambient_mesh()
    if mesh is None or batch_axis(mesh, batch_size) is None:
        return ()
    return spec(axes.BATCH)[0]
