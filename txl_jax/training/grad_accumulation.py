"""Gradient accumulation: a batch passes through the model in microbatches.

Each microbatch has its own rows of the memory. Gradients are never accumulated over successive
segments: each update follows one segment, as in the paper.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.memory import Memory
from txl_jax.recurrence import Segments
from txl_jax.sharding.axes import num_batch_shards


class LossOutputs(NamedTuple):
    """Outputs of a segment's loss, in addition to the number that is minimized."""

    # Losses summed over scored tokens.
    nats: jax.Array
    # The memory after the segment.
    memory: Memory
    # [B, L], losses of all positions in nats, scored or not. None for a batch of microbatches.
    nll: jax.Array | None


# (parameters, memory, segment, dropout key, tokens of the whole batch) -> (gradients, outputs)
Gradient = Callable[..., tuple[Any, LossOutputs]]


class _Accumulated(NamedTuple):
    """State that one microbatch passes to the next."""

    grads: Any  # Sum of the gradients so far.
    memory: Memory  # All rows. The rows of earlier microbatches are updated.


@dataclasses.dataclass(frozen=True)
class _Microbatches:
    """The division of B rows into C microbatches.

    Each of G devices has consecutive rows. Microbatch i has the i-th of C pieces of each device's
    rows.
    """

    devices: int  # G, number of devices that share the rows of a batch.
    number: int  # C, number of microbatches.

    def take(self, array: jax.Array, index: jax.Array, *, axis: int) -> jax.Array:
        """Returns a microbatch's rows: [.., B, ..] -> [.., B / C, ..], where `axis` is B's."""
        pieces = self._split(array, axis)
        rows = jax.lax.dynamic_index_in_dim(pieces, index, axis + 1, keepdims=False)
        return rows.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])

    def put(self, array: jax.Array, rows: jax.Array, index: jax.Array, *, axis: int) -> jax.Array:
        """Returns the array [.., B, ..] with a microbatch's rows [.., B / C, ..] replaced."""
        pieces = self._split(array, axis)
        rows_by_device = rows.reshape(*pieces.shape[: axis + 1], *pieces.shape[axis + 2 :])
        pieces = jax.lax.dynamic_update_index_in_dim(pieces, rows_by_device, index, axis + 1)
        return pieces.reshape(array.shape)

    def _split(self, array: jax.Array, axis: int) -> jax.Array:
        """[.., B, ..] -> [.., G, C, B / (G * C), ..]."""
        before = array.shape[:axis]
        after = array.shape[axis + 1 :]
        return array.reshape(*before, self.devices, self.number, -1, *after)


def in_microbatches(gradient: Gradient, microbatches: int) -> Gradient:
    """Returns the gradient of a batch, computed in C microbatches of its B rows.

    Microbatch i has the i-th of C pieces of the rows of each of the G devices that share them. No
    row is therefore sent to another device, and all devices work on every microbatch. Gradients and
    nats are summed, and all rows of the memory are updated. With dropout each microbatch has its
    own key, so the numbers depend on C. Without dropout they depend on C only up to rounding.
    """
    division = _Microbatches(devices=num_batch_shards(), number=microbatches)

    def accumulate(
        params: Any, memory: Memory, segment: Segments, dropout_key: jax.Array, tokens: jax.Array
    ) -> tuple[Any, LossOutputs]:
        def add_microbatch(
            accumulated: _Accumulated, index: jax.Array
        ) -> tuple[_Accumulated, jax.Array]:
            whole_memory = accumulated.memory
            part_memory = whole_memory.replace(
                hidden=division.take(whole_memory.hidden, index, axis=1),
                valid=division.take(whole_memory.valid, index, axis=0),
            )
            part = jax.tree.map(lambda array: division.take(array, index, axis=0), segment)
            key = jax.random.fold_in(dropout_key, index)

            grads, outputs = gradient(params, part_memory, part, key, tokens)
            part_memory = outputs.memory

            whole_memory = whole_memory.replace(
                hidden=division.put(whole_memory.hidden, part_memory.hidden, index, axis=1),
                valid=division.put(whole_memory.valid, part_memory.valid, index, axis=0),
            )
            summed = jax.tree.map(jnp.add, accumulated.grads, grads)
            return _Accumulated(summed, whole_memory), outputs.nats

        start = _Accumulated(grads=jax.tree.map(jnp.zeros_like, params), memory=memory)
        end, nats = jax.lax.scan(add_microbatch, start, jnp.arange(microbatches))
        return end.grads, LossOutputs(nats=nats.sum(), memory=end.memory, nll=None)

    return accumulate
