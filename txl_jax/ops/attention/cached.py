"""Attention over a KV cache, a ring of stored keys and values, and the segment itself.

It gives the numbers of `relative_attention` over [memory; segment], its twin of training, for a memory whose slots are
overwritten in turn: slot s holds the position `age(s)` before the segment, and a query at row i meets it at the
distance age(s) + i. Nothing of the memory is moved, joined or sorted; what is rotated are the position scores.

With `clamp_len` most distances share one position code. Their scores, one number per query, need no table: only
distances below the clamp are gathered, which at M = 3800 and a clamp of 1000 saves three quarters of the product
with position keys and of the shift.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.ops.attention import positions
from txl_jax.ops.matmul import Int8, multiply, row_product

# Queries [B, H, L, E], keys [H, E, P] or None, and scores [H, P] or None (`cached_attention`); None: no positions.
# Keys, and what is stored, may be `Int8`.
Position = tuple[jax.Array, Any, jax.Array | None] | None
Ring = tuple[Any, Any]  # Stored keys [B, H, E, R] and values [B, H, R, E].


@flax.struct.dataclass
class CachedVisibility:
    """Description of the keys that the queries of a segment see; all layers share it.

    Attributes:
      valid: int32 [B], how many of the newest slots count.
      write_index: int32 [], the oldest slot.
      segment_len: L.
      capacity: R.
      window: keys that a query sees at most, itself included; None: no limit but `valid`.
      document_start: int32 [B, L], the position of the segment from which each query sees keys; 0: from the slots on.
        None: 0.
    """

    valid: jax.Array
    write_index: jax.Array
    segment_len: int = flax.struct.field(pytree_node=False)
    capacity: int = flax.struct.field(pytree_node=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    document_start: jax.Array | None = None

    def age(self) -> jax.Array:
        """Returns the age of each slot, int32 [R]; 1 is the position just before the segment."""
        if not self.capacity:
            return jnp.zeros(0, jnp.int32)
        return (self.write_index - 1 - jnp.arange(self.capacity, dtype=jnp.int32)) % self.capacity + 1

    def stored_mask(self) -> jax.Array:
        """Returns the visible pairs of queries and slots, bool [B, L, R]."""
        row_L, age_R = jnp.arange(self.segment_len, dtype=jnp.int32), self.age()
        shape = self.valid.shape[0], self.segment_len, self.capacity
        stored_BxLxR = jnp.broadcast_to((age_R[None, :] <= self.valid[:, None])[:, None, :], shape)
        if self.window is not None:
            stored_BxLxR &= (row_L[:, None] + age_R[None, :] < self.window)[None]
        if self.document_start is not None:
            stored_BxLxR &= (self.document_start == 0)[:, :, None]
        return stored_BxLxR

    def own_mask(self) -> jax.Array:
        """Returns the visible pairs within the segment, bool [B, L, L]; [1, L, L] where rows do not differ."""
        row_L = jnp.arange(self.segment_len, dtype=jnp.int32)
        own_LxL = row_L[:, None] >= row_L[None, :]
        if self.window is not None:
            own_LxL &= row_L[:, None] - row_L[None, :] < self.window
        if self.document_start is None:
            return own_LxL[None]
        return own_LxL[None] & (row_L[None, None, :] >= self.document_start[:, :, None])


def table_length(*, segment_len: int, capacity: int, clamp_len: int | None) -> int:
    """Returns P, the number of position keys that a segment needs: of the distances P - 1, .., 0."""
    longest = capacity + segment_len - 1
    return (min(clamp_len, longest) if clamp_len is not None else longest) + 1


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Ring,
    position: Position,
    visibility: CachedVisibility,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key: [B, H, L, E], of the segment.
      value: [B, H, L, E].
      ring: stored keys [B, H, E, R] and values [B, H, R, E], of any type.
      position: queries [B, H, L, E] with v in place of u, position keys [H, E, P] or None, and scores [H, P] to add,
        divided by sqrt(E), or None; keys, scores or both, of the distances P - 1, .., 0, of which the largest is used
        for all beyond it. None: no relative positions.
      visibility: which keys a query sees.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    stored_key, stored_value = ring
    own = jnp.einsum("bhle,bhke->bhlk", query, key, preferred_element_type=wide)
    if position is not None:
        table = _position_scores(*position, wide)
        own += _own_positions(table)
    own = jnp.where(visibility.own_mask()[:, None], own, -jnp.inf)
    top = jnp.max(own, axis=-1, keepdims=True)
    capacity = stored_key.shape[3]
    if capacity:
        stored = _by_stored(query, stored_key, wide)
        if position is not None:
            stored += _ring_positions(table, visibility.write_index, visibility.age())
        stored = jnp.where(visibility.stored_mask()[:, None], stored, -jnp.inf)
        top = jnp.maximum(top, jnp.max(stored, axis=-1, keepdims=True))
    # Divided by their sum last: E numbers per query instead of K.
    weights = jnp.exp(own - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    summed = jnp.einsum("bhlk,bhke->bhle", weights.astype(value.dtype), value, preferred_element_type=wide)
    if capacity:
        weights = jnp.exp(stored - top)
        total += jnp.sum(weights, axis=-1, keepdims=True)
        summed += _by_stored(weights.astype(value.dtype), stored_value, wide)
    return (summed / total).astype(value.dtype)


def _by_stored(rows: jax.Array, stored: jax.Array | Int8, wide: jnp.dtype) -> jax.Array:
    """Multiplies with a ring of any type: [B, H, L, n] x [B, H, n, m] -> [B, H, L, m], in `wide`.

    A single row is multiplied and summed, so that a narrower ring is converted while it is read; for a product XLA's
    CPU backend first writes a copy of all of it in the wide type (12 layers of 8 x 64 x 2160 in bfloat16, two
    cores: 22 ms with products, 4.1 ms so; in float32 2.8 ms).
    """
    if isinstance(stored, Int8):
        return multiply(rows, stored).astype(wide)
    if rows.shape[2] == 1 and stored.dtype != rows.dtype:
        return jnp.sum(stored.astype(wide) * rows.astype(wide).swapaxes(2, 3), axis=2, keepdims=True)

    def products(rows: jax.Array, stored: jax.Array) -> jax.Array:
        return jnp.einsum("bhln,bhnm->bhlm", rows, stored.astype(rows.dtype), preferred_element_type=wide)

    if rows.shape[2] == 1 and rows.dtype == wide:
        return row_product(rows, stored, otherwise=products)
    return products(rows, stored)


def _position_scores(
    query: jax.Array, position_key: jax.Array | Int8 | None, more: jax.Array | None, wide: jnp.dtype
) -> jax.Array:
    """Computes scores of the distances P - 1, .., 0: [B, H, L, E] x [H, E, P] + [H, P] -> [B, H, L, P].

    Without position keys they are the same for all rows and queries: [1, H, L, P].
    """
    batch, n_head, n_query, width = query.shape
    if position_key is None:
        assert more is not None, "refused: neither keys nor scores"
        return jnp.broadcast_to(more.astype(wide)[None, :, None, :], (1, n_head, n_query, more.shape[-1]))
    query_HxBLxE = query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)  # One product per head.
    if isinstance(position_key, Int8):
        scores = multiply(query_HxBLxE, position_key).astype(wide)
    else:
        scores = jnp.einsum("hne,hep->hnp", query_HxBLxE, position_key, preferred_element_type=wide)
    if more is not None:
        scores += more.astype(wide)[:, None, :]
    return scores.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)


def _own_positions(table: jax.Array) -> jax.Array:
    """Computes position scores of the segment's own keys: [..., L, P] -> [..., L, L]; future keys get leftovers."""
    segment_len, n_position = table.shape[-2:]
    missing = max(segment_len - n_position, 0)
    pad = [(0, 0)] * (table.ndim - 1)
    columns = jnp.pad(table[..., max(n_position - segment_len, 0) :], [*pad, (missing, 0)], mode="edge")
    return positions.relative_shift(columns)


def _ring_positions(table: jax.Array, write_index: jax.Array, age: jax.Array) -> jax.Array:
    """Computes position scores of the ring's slots: [..., L, P] -> [..., L, R]."""
    segment_len, n_position = table.shape[-2:]
    capacity, clamp = age.shape[0], n_position - 1
    clamped = clamp < capacity + segment_len - 1
    n_near = min(clamp - 1, capacity) if clamped else capacity  # Slots that some query meets below the clamp.
    far = table[..., :1]
    if n_near <= 0:
        return jnp.broadcast_to(far, (*table.shape[:-1], capacity))
    # Distances n_near + L - 1, .., 1; those above the clamp are filled with zeros, and replaced below.
    first = max(clamp - (n_near + segment_len - 1), 0)
    near = table[..., first:clamp]
    pad = [(0, 0)] * (table.ndim - 1)
    near = jnp.pad(near, [*pad, (n_near + segment_len - 1 - near.shape[-1], 0)])
    near = positions.relative_shift(near)[..., :n_near]  # Column j: the slot of age n_near - j.
    near = _rotate(near, write_index, capacity)
    if not clamped:
        return near
    distance = jnp.arange(segment_len, dtype=jnp.int32)[:, None] + age[None, :]
    beyond = (distance >= clamp).reshape((1,) * (table.ndim - 2) + distance.shape)
    return jnp.where(beyond, far, near)


def _rotate(columns: jax.Array, write_index: jax.Array, capacity: int) -> jax.Array:
    """Puts the columns of the ages n, .., 1 where those slots are in the ring, zeros elsewhere: [..., n] -> [..., R].

    The newest slot is write_index - 1 (modulo R). Columns of several queries are written once, running over the ring's
    end, and what ran over is added where the ring begins: `jnp.roll` would write an array of twice the ring's length
    first, which takes a quarter longer with 128 queries. Those of one query are written twice and cut out: under
    `vmap`, with an index for each row, the write would be a scatter (wt103_base's attention with 16 rows: 26.9 ms, and
    23.7 so; two cores of an AMD EPYC, jax 0.10.2).
    """
    n_column = columns.shape[-1]
    pad = [(0, 0)] * (columns.ndim - 1)
    if columns.shape[-2] == 1:
        by_age = jnp.pad(columns, [*pad, (capacity - n_column, 0)])
        twice = jnp.concatenate([by_age, by_age], axis=-1)
        return jax.lax.dynamic_slice_in_dim(twice, capacity - write_index, capacity, axis=-1)
    written = jnp.zeros((*columns.shape[:-1], capacity + n_column), columns.dtype)
    written = jax.lax.dynamic_update_slice_in_dim(written, columns, (write_index - n_column) % capacity, axis=-1)
    over = jnp.pad(written[..., capacity:], [*pad, (0, capacity - n_column)])
    return written[..., :capacity] + over
