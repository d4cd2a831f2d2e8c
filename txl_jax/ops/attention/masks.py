"""The keys that a query attends to, in training and over a KV cache.

Visibility is causal or on both sides, and can be limited to filled slots and to a window.

Letters as in `txl_jax.ops.attention`: B batch, L segment length, M memory length, K = M + L keys, R
slots of a cache.

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
    # L, the queries.
    segment_len: int = flax.struct.field(pytree_node=False)
    # M, the memory slots before the segment.
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
        """Returns K, the number of keys."""
        return self.mem_len + self.segment_len

    @property
    def n_positions(self) -> int:
        """Returns P, the number of distances that occur.

        They are K - 1, .., 0 if causal, and otherwise K - 1, .., -(L - 1).
        """
        return self.n_keys if self.causal else self.n_keys + self.segment_len - 1

    def distances(self, *, clamp_len: int | None = None) -> jax.Array:
        """Returns the distances K - 1, .. that position keys belong to, int32 [P].

        Distances are negative for keys after the query. Those beyond `clamp_len`, on either side,
        become `clamp_len` or -`clamp_len`.
        """
        distances = self.n_keys - 1 - jnp.arange(self.n_positions, dtype=jnp.int32)
        if clamp_len is not None:
            distances = jnp.clip(distances, -clamp_len, clamp_len)
        return distances

    def key_range(self) -> tuple[jax.Array, jax.Array]:
        """Returns the range of columns that a row's queries may attend to.

        Returns:
          The first column of [memory; segment] and the end of the range, int32 [B] each.
        """
        # A `valid` or a length that is too large means all slots or tokens. A negative `valid`
        # would hide the segment too.
        n_filled = jnp.clip(self.valid, 0, self.mem_len)
        start = self.mem_len - n_filled.astype(jnp.int32)
        if self.lengths is None:
            return start, jnp.full_like(start, self.n_keys)
        n_token = jnp.clip(self.lengths, 0, self.segment_len)
        return start, self.mem_len + n_token.astype(jnp.int32)

    def bounds(self) -> "KeyBounds":
        """Returns the keys that each query attends to. They are always a range of columns."""
        # The column of [memory; segment] that has the query's own key.
        query_1xL = self.mem_len + jnp.arange(self.segment_len, dtype=jnp.int32)[None, :]

        # Empty slots and padding are hidden from all queries of a row.
        start_B, stop_B = self.key_range()
        shape = (start_B.shape[0], self.segment_len)
        first_BxL = jnp.broadcast_to(start_B[:, None], shape)
        end_BxL = jnp.broadcast_to(stop_B[:, None], shape)

        # The order and the window hide keys by their distance, in all rows alike.
        if self.causal:
            end_BxL = jnp.minimum(end_BxL, query_1xL + 1)
        if self.window is not None:
            first_BxL = jnp.maximum(first_BxL, query_1xL + 1 - self.window)
            end_BxL = jnp.minimum(end_BxL, query_1xL + self.window)

        # A document that begins within the segment hides the memory and the tokens before it.
        if self.document_start is not None:
            document_BxL = jnp.where(self.document_start > 0, self.mem_len + self.document_start, 0)
            first_BxL = jnp.maximum(first_BxL, document_BxL)
        return KeyBounds(first_BxL, end_BxL, self.n_keys)

    def mask(self) -> jax.Array:
        """Returns the visible pairs as bool [B, L, K]."""
        return self.bounds().mask()


@flax.struct.dataclass
class KeyBounds:
    """The keys of [memory; segment] that each query attends to, as their columns' bounds."""

    # int32 [B, L], the first visible column of each query.
    first: jax.Array
    # int32 [B, L], the column after the last visible one. A query whose `end` is not after `first`
    # sees no key.
    end: jax.Array
    # K, the number of columns.
    n_keys: int = flax.struct.field(pytree_node=False)

    def mask(self) -> jax.Array:
        """Returns the visible pairs as bool [B, L, K]."""
        key_1x1xK = jnp.arange(self.n_keys, dtype=jnp.int32)[None, None, :]
        return (key_1x1xK >= self.first[:, :, None]) & (key_1x1xK < self.end[:, :, None])


@flax.struct.dataclass
class CachedVisibility:
    """Description of the keys of a KV cache that the queries of a segment attend to.

    All layers share it.
    """

    # int32 [B], how many of the latest slots count.
    valid: jax.Array
    # int32 [], the oldest slot, which is the next to be overwritten. The server's rows each have
    # their own, and attend one by one (`inference.forward`).
    write_index: jax.Array
    # L, the queries.
    segment_len: int = flax.struct.field(pytree_node=False)
    # R, the slots.
    capacity: int = flax.struct.field(pytree_node=False)
    # Maximum keys that a query attends to, itself included, or None.
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    # int32 [B, L], as in `Visibility`. 0, like None, includes the slots.
    document_start: jax.Array | None = None

    def age(self) -> jax.Array:
        """Returns the age of each slot, int32 [R]. 1 is the position just before the segment."""
        slot = jnp.arange(self.capacity, dtype=jnp.int32)
        return (self.write_index - 1 - slot) % self.capacity + 1

    def ring_mask(self) -> jax.Array:
        """Returns the visible pairs of queries and slots, bool [B, L, R]."""
        row_L = jnp.arange(self.segment_len, dtype=jnp.int32)
        age_R = self.age()
        shape = (self.valid.shape[0], self.segment_len, self.capacity)
        is_valid_BxR = age_R[None, :] <= self.valid[:, None]
        visible_BxLxR = jnp.broadcast_to(is_valid_BxR[:, None, :], shape)
        if self.window is not None:
            visible_BxLxR &= (row_L[:, None] + age_R[None, :] < self.window)[None]
        if self.document_start is not None:
            visible_BxLxR &= (self.document_start == 0)[:, :, None]
        return visible_BxLxR

    def own_mask(self) -> jax.Array:
        """Returns the visible pairs within the segment.

        They are bool [B, L, L], or [1, L, L] without documents, where all rows are the same.
        """
        row_L = jnp.arange(self.segment_len, dtype=jnp.int32)
        distance_LxL = row_L[:, None] - row_L[None, :]
        own_LxL = distance_LxL >= 0
        if self.window is not None:
            own_LxL &= distance_LxL < self.window
        if self.document_start is None:
            return own_LxL[None]
        return own_LxL[None] & (row_L[None, None, :] >= self.document_start[:, :, None])
