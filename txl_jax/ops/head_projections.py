"""Projections to heads, in training: [..., positions, D] and [D, H, E] -> [..., H, positions, E].

On a mesh that shards the matrices over `fsdp`, XLA's partitioner decides for each product by itself
what the devices send. Two products are therefore written in another form there, and send less. On
all other meshes, and on one device, they are plain products.

Letters: B batch size, M memory length, L segment length, K = M + L, D model size, H heads, E head
size, n devices on the axis `fsdp`.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


def project_to_heads(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., positions, D] and [D, H, E] -> [..., H, positions, E].

    Heads come before positions. The products over E and K then run on contiguous matrices, which on
    CPU halves the time of the forward pass.
    """
    return jnp.einsum("...d,dhe->...he", states, kernel).swapaxes(-3, -2)


def project_apart(memory: jax.Array, segment: jax.Array, kernel: jax.Array) -> jax.Array:
    """Projects memory [B, M, D] and segment [B, L, D], and joins the results: [B, H, K, E].

    Unless a layer norm comes before attention, no gradient goes into the memory. A single product
    would compute a gradient of all K rows.
    """
    if axes.num_weight_shards() > 1:
        return project_with_one_kernel_gradient(memory, segment, kernel)
    return _project_and_join(memory, segment, kernel)


def _project_and_join(memory: jax.Array, segment: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `project_apart`, with two gradients of the kernel that are added."""
    keys_of_memory = project_to_heads(memory, kernel)
    keys_of_segment = project_to_heads(segment, kernel)
    return jnp.concatenate([keys_of_memory, keys_of_segment], axis=-2)


@jax.custom_vjp
def project_with_one_kernel_gradient(
    memory: jax.Array, segment: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Computes `project_apart`, with a gradient of the kernel that is one product over K rows.

    The devices of `fsdp` sum the result of every product that is a gradient of the kernel. With two
    products they would send the kernel's size twice. Has no forward-mode derivative.
    """
    return _project_and_join(memory, segment, kernel)


class _ProjectionResiduals(flax.struct.PyTreeNode):
    """Residuals for the backward pass of `project_with_one_kernel_gradient`."""

    memory: jax.Array  # [B, M, D]
    segment: jax.Array  # [B, L, D]
    kernel: jax.Array  # [D, H, E]
    # Whether a gradient goes into the memory's rows. In a model it does only if a layer norm comes
    # before attention, for the sake of the norm's scale and bias.
    memory_has_gradient: bool = flax.struct.field(pytree_node=False)


def _forward(memory: Any, segment: Any, kernel: Any) -> tuple[jax.Array, _ProjectionResiduals]:
    """Returns the projection and the residuals.

    The arguments have a `value`, and say by `perturbed` whether a gradient goes into them.
    """
    residuals = _ProjectionResiduals(
        memory.value, segment.value, kernel.value, memory_has_gradient=memory.perturbed
    )
    return _project_and_join(memory.value, segment.value, kernel.value), residuals


def _backward(
    residuals: _ProjectionResiduals, gradient: jax.Array
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Returns the gradients of memory (or None), segment and kernel, from that of [B, H, K, E]."""
    kernel = residuals.kernel
    mem_len = residuals.memory.shape[1]

    # The rows are copied side by side, so that they are one product.
    rows = jnp.concatenate([residuals.memory, residuals.segment], axis=1)
    kernel_gradient = jnp.einsum("bkd,bhke->dhe", rows, gradient)

    segment_gradient = jnp.einsum("bhle,dhe->bld", gradient[:, :, mem_len:], kernel)
    memory_gradient = None
    if residuals.memory_has_gradient:
        memory_gradient = jnp.einsum("bhme,dhe->bmd", gradient[:, :, :mem_len], kernel)
    return memory_gradient, segment_gradient, kernel_gradient


# With symbolic zeros, `_forward` gets to know which arguments have a gradient.
project_with_one_kernel_gradient.defvjp(_forward, _backward, symbolic_zeros=True)


def project_codes(codes: jax.Array, kernel: jax.Array) -> jax.Array:
    """Projects positional codes [K, D], which every device has, to [H, K, E].

    With rows of the kernel on each device, XLA would let each device multiply its rows, and
    all-reduce the keys [H, K, E], forward and backward. Here each device computes E / n columns of
    every head, from columns of the kernel, which are few bytes to exchange. Attention gathers the
    keys (`ops.attention.dispatch`), for half of what an all-reduce sends. A gather of the whole
    kernel would send less if K > D, but then every device would compute all keys.
    """
    if axes.head_part_axis(kernel.shape[-1]) is None:
        return project_to_heads(codes, kernel)
    # The constraints hold for the gradients too. By the first one, the kernel's gradient leaves the
    # layer as the parameter is sharded, in the compute dtype. Otherwise Adam's arithmetic would be
    # on columns, and exchange its results in float32.
    kernel = constrain(kernel, axes.EMBED, axes.HEADS, axes.HEAD_DIM)
    columns = constrain(kernel, None, axes.HEADS, axes.HEAD_PART)
    keys = project_to_heads(codes, columns)
    return constrain(keys, axes.HEADS, None, axes.HEAD_PART)
