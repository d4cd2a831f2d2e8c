"""Gradient accumulation: a batch passes through the model in microbatches, each with its own rows of the memory.

Successive segments are never accumulated over: each update follows one segment, as the paper trains.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.memory import Memory
from txl_jax.segments import Segments

# (parameters, memory, segment, dropout key, tokens of the whole batch) -> (gradients, (nats, memory))
Gradient = Callable[..., tuple[Any, tuple[jax.Array, Memory]]]


@dataclasses.dataclass(frozen=True)
class GradAccumulation:
    """C microbatches of B rows that are sharded over G devices.

    Microbatch i has the i-th of C pieces of each device's rows. So no row is sent to another device, and all devices
    work on every microbatch.
    """

    microbatches: int  # C
    devices: int = 1  # G

    def gradient(
        self,
        gradient: Gradient,
        params: Any,
        memory: Memory,
        segment: Segments,
        dropout_key: jax.Array,
        tokens: jax.Array,
    ) -> tuple[Any, jax.Array, Memory]:
        """Sums gradients and nats over the microbatches, and updates all rows of the memory.

        With dropout each microbatch has its own key, so the numbers depend on C; without it, only up to rounding.
        """
        if self.microbatches == 1:
            grads, (nats, memory) = gradient(params, memory, segment, dropout_key, tokens)
            return grads, nats, memory

        def add_microbatch(carry: tuple[Any, Memory], index: jax.Array) -> tuple[tuple[Any, Memory], jax.Array]:
            grads, memory = carry
            own_memory = Memory(hidden=self._take(memory.hidden, 1, index), valid=self._take(memory.valid, 0, index))
            own_segment = jax.tree.map(lambda array: self._take(array, 0, index), segment)
            key = jax.random.fold_in(dropout_key, index)
            more, (nats, own_memory) = gradient(params, own_memory, own_segment, key, tokens)
            memory = Memory(
                hidden=self._put(memory.hidden, own_memory.hidden, 1, index),
                valid=self._put(memory.valid, own_memory.valid, 0, index),
            )
            return (jax.tree.map(jnp.add, grads, more), memory), nats

        start = jax.tree.map(jnp.zeros_like, params), memory
        (grads, memory), nats = jax.lax.scan(add_microbatch, start, jnp.arange(self.microbatches))
        return grads, nats.sum(), memory

    def _take(self, array: jax.Array, axis: int, index: jax.Array) -> jax.Array:
        """Returns the microbatch's rows of an array; `axis` is the axis of the rows."""
        found = jax.lax.dynamic_index_in_dim(self._split(array, axis), index, axis + 1, keepdims=False)
        return found.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])

    def _put(self, array: jax.Array, own: jax.Array, axis: int, index: jax.Array) -> jax.Array:
        """Returns the array with the microbatch's rows replaced."""
        split = self._split(array, axis)
        own = own.reshape(*split.shape[: axis + 1], *split.shape[axis + 2 :])
        return jax.lax.dynamic_update_index_in_dim(split, own, index, axis + 1).reshape(array.shape)

    def _split(self, array: jax.Array, axis: int) -> jax.Array:
        """[.., B, ..] -> [.., G, C, B / (G * C), ..]."""
        return array.reshape(*array.shape[:axis], self.devices, self.microbatches, -1, *array.shape[axis + 1 :])
