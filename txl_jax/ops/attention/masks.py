"""The keys that a query attends to, in training and over a KV cache.

Visibility is causal or on both sides, and can be limited to filled slots and to a window.

For L = 3 and M = 3 (memory | segment), 1 = visible:

    causal, full memory     one slot filled      same_length, window 3     not causal, lengths 2
      1 1 1 | 1 . .           . . 1 | 1 . .         . 1 1 | 1 . .            1 1 1 | 1 1 .
      1 1 1 | 1 1 .           . . 1 | 1 1 .         . . 1 | 1 1 .            1 1 1 | 1 1 .
      1 1 1 | 1 1 1           . . 1 | 1 1 1         . . . | 1 1 1            1 1 1 | 1 1 .
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Visibility:
    """Description of the keys that the queries of a segment attend to.

    An implementation derives its mask from it.

    The keys are [memory; segment]. Without memory: `Visibility(jnp.zeros(B, jnp.int32), L, 0)`.
    """

    # int32 [B], filled memory slots of each row, right-aligned (latest last).
    valid: jax.Array
    # L
    segment_len: int = flax.struct.field(pytree_node=False)
    # M
    mem_len: int = flax.struct.field(pytree_node=False)
    # Maximum keys that a query attends to, itself included (`same_length`), on each side, or None.
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    # Whether keys behind the query are hidden.
    causal: bool = flax.struct.field(pytree_node=False, default=True)
    # int32 [B], tokens of each row, or None for L. No query sees padding after them.
    lengths: jax.Array | None = None
    # int32 [B, L], the position of the segment from which each query sees keys. 0, like None,
    # includes the memory.
    document_start: jax.Array | None = None

    @property
    def n_keys(self) -> int:
        """K."""
        return self.mem_len + self.segment_len

    @property
    def n_positions(self) -> int:
        """P, the distances that occur: K - 1, .., 0, and if not causal on to -(L - 1)."""
        return self.n_keys if self.causal else self.n_keys + self.segment_len - 1

    def distances(self, *, clamp_len: int | None = None) -> jax.Array:
        """Returns the distances K - 1, .. that position keys belong to, int32 [P].

        Negative distances are ahead.

        Those farther than `clamp_len`, on either side, become `clamp_len`.
        """
        distances = self.n_keys - 1 - jnp.arange(self.n_positions, dtype=jnp.int32)
        return distances if clamp_len is None else jnp.clip(distances, -clamp_len, clamp_len)

    def key_range(self) -> tuple[jax.Array, jax.Array]:
        """Returns the range of columns that a row's queries may attend to.

        The result is the first column of [memory; segment] and the end of the range, int32 [B]
        each.
        """
        # More slots or tokens than there are mean all; a negative `valid` would hide the segment
        # too.
        start = self.mem_len - jnp.clip(self.valid, 0, self.mem_len).astype(jnp.int32)
        if self.lengths is None:
            return start, jnp.full_like(start, self.n_keys)
        return start, self.mem_len + jnp.clip(self.lengths, 0, self.segment_len).astype(jnp.int32)

    def mask(self) -> jax.Array:
        """Returns the visible pairs as bool [B, L, K]."""
        query_L = jnp.arange(self.segment_len, dtype=jnp.int32)
        key_K = jnp.arange(self.n_keys, dtype=jnp.int32)
        distance_LxK = self.mem_len + query_L[:, None] - key_K[None, :]
        start_B, stop_B = self.key_range()
        in_range_BxK = (key_K[None, :] >= start_B[:, None]) & (key_K[None, :] < stop_B[:, None])
        near_LxK = jnp.ones_like(distance_LxK, bool)
        if self.causal:
            near_LxK &= distance_LxK >= 0
        if self.window is not None:
            near_LxK &= jnp.abs(distance_LxK) < self.window
        visible_BxLxK = near_LxK[None, :, :] & in_range_BxK[:, None, :]
        if self.document_start is None:
            return visible_BxLxK
        first_BxL = jnp.where(self.document_start > 0, self.mem_len + self.document_start, 0)
        return visible_BxLxK & (key_K[None, None, :] >= first_BxL[:, :, None])


@flax.struct.dataclass
class CachedVisibility:
    """Description of the keys of a KV cache that the queries of a segment see.

    All layers share it.
    """

    valid: jax.Array  # int32 [B], how many of the latest slots count.
    write_index: jax.Array  # int32 [], the oldest slot.
    segment_len: int = flax.struct.field(pytree_node=False)  # L
    capacity: int = flax.struct.field(pytree_node=False)  # R
    window: int | None = flax.struct.field(pytree_node=False, default=None)  # As in `Visibility`.
    document_start: jax.Array | None = None  # As in `Visibility`, where 0 means from the slots on.

    def age(self) -> jax.Array:
        """Returns the age of each slot, int32 [R]. 1 is the position just before the segment."""
        return (
            self.write_index - 1 - jnp.arange(self.capacity, dtype=jnp.int32)
        ) % self.capacity + 1

    def ring_mask(self) -> jax.Array:
        """Returns the visible pairs of queries and slots, bool [B, L, R]."""
        row_L, age_R = jnp.arange(self.segment_len, dtype=jnp.int32), self.age()
        shape = self.valid.shape[0], self.segment_len, self.capacity
        visible_BxLxR = jnp.broadcast_to((age_R[None, :] <= self.valid[:, None])[:, None, :], shape)
        if self.window is not None:
            visible_BxLxR &= (row_L[:, None] + age_R[None, :] < self.window)[None]
        if self.document_start is not None:
            visible_BxLxR &= (self.document_start == 0)[:, :, None]
        return visible_BxLxR

    def own_mask(self) -> jax.Array:
        """Returns the visible pairs within the segment, bool [B, L, L].

        The shape is [1, L, L] if rows do not differ.
        """
        row_L = jnp.arange(self.segment_len, dtype=jnp.int32)
        own_LxL = row_L[:, None] >= row_L[None, :]
        if self.window is not None:
            own_LxL &= row_L[:, None] - row_L[None, :] < self.window
        if self.document_start is None:
            return own_LxL[None]
        return own_LxL[None] & (row_L[None, None, :] >= self.document_start[:, :, None])
