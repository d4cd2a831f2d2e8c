"""Gradient accumulation: a batch goes through the model in parts of its rows, each with its rows of the memory.

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
    """C parts of B rows that lie over G devices: part i has the i-th of C pieces of each device's rows.

    So no row is sent to another device, and all devices work on every part.
    """

    count: int  # C
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
        """Gradients and nats summed over the parts, and the memory with all its rows moved on.

        With dropout each part draws anew, so that the numbers depend on C; without they do up to rounding only.
        """
        if self.count == 1:
            grads, (nats, memory) = gradient(params, memory, segment, dropout_key, tokens)
            return grads, nats, memory

        def add_part(carry: tuple[Any, Memory], part: jax.Array) -> tuple[tuple[Any, Memory], jax.Array]:
            grads, memory = carry
            own_memory = Memory(hidden=self._take(memory.hidden, 1, part), valid=self._take(memory.valid, 0, part))
            own_segment = jax.tree.map(lambda array: self._take(array, 0, part), segment)
            key = jax.random.fold_in(dropout_key, part)
            more, (nats, own_memory) = gradient(params, own_memory, own_segment, key, tokens)
            memory = Memory(
                hidden=self._put(memory.hidden, own_memory.hidden, 1, part),
                valid=self._put(memory.valid, own_memory.valid, 0, part),
            )
            return (jax.tree.map(jnp.add, grads, more), memory), nats

        start = jax.tree.map(jnp.zeros_like, params), memory
        (grads, memory), nats = jax.lax.scan(add_part, start, jnp.arange(self.count))
        return grads, nats.sum(), memory

    def _take(self, array: jax.Array, axis: int, part: jax.Array) -> jax.Array:
        """The part's rows of an array whose rows lie along `axis`."""
        found = jax.lax.dynamic_index_in_dim(self._divided(array, axis), part, axis + 1, keepdims=False)
        return found.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])

    def _put(self, array: jax.Array, own: jax.Array, axis: int, part: jax.Array) -> jax.Array:
        """The array with the part's rows replaced."""
        divided = self._divided(array, axis)
        own = own.reshape(*divided.shape[: axis + 1], *divided.shape[axis + 2 :])
        return jax.lax.dynamic_update_index_in_dim(divided, own, part, axis + 1).reshape(array.shape)

    def _divided(self, array: jax.Array, axis: int) -> jax.Array:
        """[.., B, ..] -> [.., G, C, B / (G * C), ..]."""
        return array.reshape(*array.shape[:axis], self.devices, self.count, -1, *array.shape[axis + 1 :])
