"""Gradient accumulation: a batch passes through the model in microbatches.

Each microbatch has its own rows of the memory.

Successive segments are never accumulated over: each update follows one segment, as the paper
trains.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.memory import Memory
from txl_jax.recurrence import Segments
from txl_jax.sharding.axes import num_batch_shards

# (parameters, memory, segment, dropout key, tokens of the whole batch) -> (gradients, (nats,
# memory))
Gradient = Callable[..., tuple[Any, tuple[jax.Array, Memory]]]


def in_microbatches(gradient: Gradient, microbatches: int) -> Gradient:
    """Returns the gradient of a batch, computed in C microbatches of its B rows.

    Microbatch i has the i-th of C pieces of the rows of each of the G devices that share them. So
    no row is sent to another device, and all devices work on every microbatch. Gradients and nats
    are summed, and all rows of the memory are updated. With dropout each microbatch has its own
    key, so the numbers depend on C; without it, only up to rounding.
    """
    devices = num_batch_shards()

    def split(array: jax.Array, axis: int) -> jax.Array:
        """[.., B, ..] -> [.., G, C, B / (G * C), ..]; `axis` is the axis of the rows."""
        return array.reshape(
            *array.shape[:axis], devices, microbatches, -1, *array.shape[axis + 1 :]
        )

    def take(array: jax.Array, axis: int, index: jax.Array) -> jax.Array:
        """Returns a microbatch's rows."""
        found = jax.lax.dynamic_index_in_dim(split(array, axis), index, axis + 1, keepdims=False)
        return found.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])

    def put(array: jax.Array, own: jax.Array, axis: int, index: jax.Array) -> jax.Array:
        """Returns the array with a microbatch's rows replaced."""
        all_rows = split(array, axis)
        own = own.reshape(*all_rows.shape[: axis + 1], *all_rows.shape[axis + 2 :])
        return jax.lax.dynamic_update_index_in_dim(all_rows, own, index, axis + 1).reshape(
            array.shape
        )

    def accumulate(
        params: Any, memory: Memory, segment: Segments, dropout_key: jax.Array, tokens: jax.Array
    ) -> tuple[Any, tuple[jax.Array, Memory]]:
        def add_microbatch(
            carry: tuple[Any, Memory], index: jax.Array
        ) -> tuple[tuple[Any, Memory], jax.Array]:
            grads, memory = carry
            own_memory = Memory(
                hidden=take(memory.hidden, 1, index), valid=take(memory.valid, 0, index)
            )
            own_segment = jax.tree.map(lambda array: take(array, 0, index), segment)
            key = jax.random.fold_in(dropout_key, index)
            more, (nats, own_memory) = gradient(params, own_memory, own_segment, key, tokens)
            hidden = put(memory.hidden, own_memory.hidden, 1, index)
            memory = Memory(hidden, put(memory.valid, own_memory.valid, 0, index))
            return (jax.tree.map(jnp.add, grads, more), memory), nats

        start = jax.tree.map(jnp.zeros_like, params), memory
        (grads, memory), nats = jax.lax.scan(add_microbatch, start, jnp.arange(microbatches))
        return grads, (nats.sum(), memory)

    return accumulate
