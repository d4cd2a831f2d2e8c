"""Dropout on attention probabilities with a counter-based generator.

A mask is a function of where it applies: whether a probability is kept depends on (seed, row of the
batch, head, query, key) and on nothing else. So every path, tile size and mesh draws the same mask.
A kernel that never has the whole array could not reproduce the mask of a generator with a state.

The hash is made of the rounds of `ops.random_masks`: short ones for what a row of the scores
shares, and whole ones per pair.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops import random_masks
from txl_jax.ops.random_masks import as_uint32, rounds

# Factors that spread neighbouring numbers over the 32 bits. They are odd, and the first one is
# about 2^32 / golden ratio.
_ROW_HEAD = np.uint32(0x9E3779B1)
_QUERY = np.uint32(0x85EBCA77)
_KEY = np.uint32(0xC2B2AE3D)


class ProbabilityDropout(flax.struct.PyTreeNode):
    """Dropout on the probabilities of one attention."""

    # Fraction that is dropped, at least 0 and below 1. A number or a traced scalar.
    rate: float | jax.Array
    # uint32 []. Each layer and update draws its own.
    seed: jax.Array
    # Heads of all devices.
    n_head: int = flax.struct.field(pytree_node=False)
    # int32 [], index of the first row in the batch of all devices.
    first_row: int | jax.Array = 0
    # int32 [], index of the first head among all devices' heads.
    first_head: int | jax.Array = 0

    def threshold(self) -> jax.Array:
        """Returns the uint32 below which random bits drop a probability."""
        return random_masks.threshold(self.rate)

    def row_heads(self, batch: int, n_head: int) -> jax.Array:
        """Returns the number of each row and head of this device in `bits`: int32 [B, H]."""
        rows = jnp.arange(batch, dtype=jnp.int32)
        heads = jnp.arange(n_head, dtype=jnp.int32)
        return (self.first_row + rows[:, None]) * self.n_head + self.first_head + heads[None, :]

    def keep(self, row_head: Any, query: Any, key: Any) -> jax.Array:
        """Returns which probabilities are kept, bool. The arguments are integers that broadcast."""
        return bits(self.seed, row_head, query, key) >= self.threshold()

    def mask(self, batch: int, n_head: int, n_query: int, n_key: int) -> jax.Array:
        """Returns which of the whole probabilities of this device are kept: bool [B, H, L, K]."""
        row_head = self.row_heads(batch, n_head)[:, :, None, None]
        query = jnp.arange(n_query, dtype=jnp.int32)
        key = jnp.arange(n_key, dtype=jnp.int32)
        return self.keep(row_head, query[None, None, :, None], key[None, None, None, :])

    def apply(self, probabilities: jax.Array) -> jax.Array:
        """Applies the mask to whole probabilities, [B, H, L, K], and divides by 1 - rate."""
        kept = self.mask(*probabilities.shape)
        return random_masks.scale_kept(probabilities, kept, self.rate)


def bits(seed: Any, row_head: Any, query: Any, key: Any) -> jax.Array:
    """Returns 32 random bits for each pair of query and key, as uint32.

    The arguments are integers that broadcast. Only integer operations are used, so the function
    also works in kernels.

    `row_head` is the row of the batch times the number of heads, plus the head.
    """
    shared = rounds(as_uint32(seed) ^ (as_uint32(row_head) * _ROW_HEAD), last=False)
    return rounds(shared + as_uint32(query) * _QUERY + as_uint32(key) * _KEY, last=True)
