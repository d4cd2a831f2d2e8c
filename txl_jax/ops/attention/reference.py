"""The definition of attention, in training and over a KV cache.

Every faster path must give the same numbers.

In training (Dai et al., 2019, section 3.3) the score of query i and key j has four terms,

    (a) q_i . k_j    (b) q_i . r_(i-j)    (c) u . k_j    (d) v . r_(i-j)

(a) + (c) is one product of q + u with the keys, (b) + (d) one product of q + v with the position
keys followed by the relative shift. Shaw et al. (2018) have (a) and (b), with learned position
keys. Without position keys it is scaled dot-product attention (Vaswani et al., 2017, section 3.2).

Over a KV cache, a ring of stored keys and values, and the segment itself, the numbers are those of
training over [memory; segment]. Slots are overwritten in turn: slot s holds the position `age(s)`
before the segment, and a query at row i meets it at the distance age(s) + i. Nothing of the memory
is moved, joined or sorted; what is rotated are the position scores. With `clamp_len` most distances
share one position code. Their scores, one number per query, need no table: only distances below the
clamp are gathered, which at M = 3800 and a clamp of 1000 saves three quarters of the product with
position keys and of the shift.

tests/ops/attention/test_reference.py compares training with a loop over pairs, test_cached.py and
tests/inference/test_forward.py the cache with loops and with training.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.distances import relative_shift, skew
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import CachedOperands, Operands
from txl_jax.ops.matmul import Int8, multiply, product, row_product, wide_type


def attention(
    operands: Operands, visibility: Visibility, dropout: Dropout | None = None
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. A query that sees no key gets zeros."""
    o = operands
    scores_BxHxLxK = product("bhle,bhke->bhlk", biased(o.query, o.content_bias), o.key)
    if o.position_key is not None or o.position_score is not None:
        position_query = biased(o.query, o.position_bias)
        by_distance = position_scores(position_query, o.position_key, o.position_score)
        if visibility.causal:  # K distances, otherwise one for every pair of query and key.
            scores_BxHxLxK += relative_shift(by_distance)
        else:
            scores_BxHxLxK += skew(by_distance, visibility.n_keys)
    scores_BxHxLxK *= o.query.shape[-1] ** -0.5
    visible_Bx1xLxK = visibility.mask()[:, None, :, :]
    scores_BxHxLxK = jnp.where(visible_Bx1xLxK, scores_BxHxLxK, -jnp.inf)
    # A query may see no key. A softmax of nothing is nan, as are its gradients.
    if visibility.lengths is not None:
        sees_Bx1xLx1 = jnp.any(visible_Bx1xLxK, axis=-1, keepdims=True)
        scores_BxHxLxK = jnp.where(sees_Bx1xLx1, scores_BxHxLxK, 0)
    probabilities_BxHxLxK = jax.nn.softmax(scores_BxHxLxK, axis=-1).astype(o.value.dtype)
    if visibility.lengths is not None:
        probabilities_BxHxLxK = jnp.where(sees_Bx1xLx1, probabilities_BxHxLxK, 0)
    if dropout is not None:
        probabilities_BxHxLxK = dropout.apply(probabilities_BxHxLxK)
    return jnp.einsum("bhlk,bhke->bhle", probabilities_BxHxLxK, o.value)


class ScoreTerms(NamedTuple):
    """The four terms of the scores [B, H, L, K], each divided by sqrt(E).

    Softmax takes their sum.
    """

    a: jax.Array  # Content with content.
    b: jax.Array  # Content with distance.
    c: jax.Array  # u with content.
    d: jax.Array  # v with distance.


def score_terms(
    query: jax.Array,
    key: jax.Array,
    position_key: jax.Array,
    *,
    content_bias: jax.Array,
    position_bias: jax.Array,
) -> ScoreTerms:
    """Computes the four terms of causal scores, of arrays as in `Operands`.

    Future keys get leftovers.
    """
    none = jnp.zeros_like(query)

    def content(rows: jax.Array) -> jax.Array:
        return product("bhle,bhke->bhlk", rows, key)

    def distance(rows: jax.Array) -> jax.Array:
        return relative_shift(position_scores(rows, position_key, None))

    u, v = biased(none, content_bias), biased(none, position_bias)
    terms = content(query), distance(query), content(u), distance(v)
    return ScoreTerms(*(term * query.shape[-1] ** -0.5 for term in terms))


def cached_attention(operands: CachedOperands, visibility: CachedVisibility) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. The ring may have any type."""
    query, key, value, (ring_key, ring_value), position = operands
    own = product("bhle,bhke->bhlk", query, key)
    if position is not None:
        table = position_scores(*position, equation="hne,hep->hnp")
        own += _own_positions(table)
    own = jnp.where(visibility.own_mask()[:, None], own, -jnp.inf)
    top = jnp.max(own, axis=-1, keepdims=True)
    capacity = ring_key.shape[3]
    if capacity:
        older = _by_ring(query, ring_key)
        if position is not None:
            older += _ring_positions(table, visibility.write_index, visibility.age())
        older = jnp.where(visibility.ring_mask()[:, None], older, -jnp.inf)
        top = jnp.maximum(top, jnp.max(older, axis=-1, keepdims=True))
    # Divided by their sum last: E numbers per query instead of K.
    weights = jnp.exp(own - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    summed = product("bhlk,bhke->bhle", weights.astype(value.dtype), value)
    if capacity:
        weights = jnp.exp(older - top)
        total += jnp.sum(weights, axis=-1, keepdims=True)
        summed += _by_ring(weights.astype(value.dtype), ring_value)
    return (summed / total).astype(value.dtype)


def _by_ring(rows: jax.Array, ring: jax.Array | Int8) -> jax.Array:
    """Multiplies with a ring of any dtype: [B, H, L, n] x [B, H, n, m] -> [B, H, L, m].

    The result is in at least float32.

    A single row is multiplied and summed, so that a narrower ring is converted while it is read;
    for a product XLA's CPU backend first writes a copy of all of it in the wide type (12 layers of
    8 x 64 x 2160 in bfloat16, two cores: 22 ms with products, 4.1 ms so; in float32 2.8 ms).
    """
    wide = wide_type(rows)
    if isinstance(ring, Int8):
        return multiply(rows, ring).astype(wide)
    if rows.shape[2] == 1 and ring.dtype != rows.dtype:
        return jnp.sum(ring.astype(wide) * rows.astype(wide).swapaxes(2, 3), axis=2, keepdims=True)

    def products(rows: jax.Array, ring: jax.Array) -> jax.Array:
        return product("bhln,bhnm->bhlm", rows, ring.astype(rows.dtype))

    if rows.shape[2] == 1 and rows.dtype == wide:
        return row_product(rows, ring, otherwise=products)
    return products(rows, ring)


def biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds [H, E] to [B, H, L, E]."""
    return query if bias is None else query + bias[None, :, None, :]


def position_scores(
    query: jax.Array,
    key: jax.Array | Int8 | None,
    more: jax.Array | None,
    equation: str = "hne,hpe->hnp",
) -> jax.Array:
    """Computes scores by distance, before the shift: [B, H, L, P].

    Without keys there is no matmul, and the result is [1, H, L, P] for all rows.

    The keys are [H, P, E], or [H, E, P] with the other `equation`. One [B L, E] x [E, P] product
    per head: XLA's CPU backend turns the einsum bhle,hke->bhlk into B small products.
    """
    (batch, n_head, n_query, width), wide = query.shape, wide_type(query)
    if key is None:
        assert more is not None, "neither keys nor scores"
        return jnp.broadcast_to(
            more.astype(wide)[None, :, None, :], (1, n_head, n_query, more.shape[-1])
        )
    rows = query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)
    scores = (
        multiply(rows, key).astype(wide) if isinstance(key, Int8) else product(equation, rows, key)
    )
    if more is not None:
        scores += more.astype(wide)[:, None, :]
    return scores.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)


def _own_positions(table: jax.Array) -> jax.Array:
    """Computes position scores of the segment's own keys: [..., L, P] -> [..., L, L].

    Future keys get leftovers.
    """
    segment_len, n_position = table.shape[-2:]
    missing = max(segment_len - n_position, 0)
    pad = [(0, 0)] * (table.ndim - 1)
    columns = jnp.pad(
        table[..., max(n_position - segment_len, 0) :], [*pad, (missing, 0)], mode="edge"
    )
    return relative_shift(columns)


def _ring_positions(table: jax.Array, write_index: jax.Array, age: jax.Array) -> jax.Array:
    """Computes position scores of the ring's slots: [..., L, P] -> [..., L, R]."""
    segment_len, n_position = table.shape[-2:]
    capacity, clamp = age.shape[0], n_position - 1
    clamped = clamp < capacity + segment_len - 1
    # Slots that some query meets below the clamp.
    n_near = min(clamp - 1, capacity) if clamped else capacity
    far = table[..., :1]
    if n_near <= 0:
        return jnp.broadcast_to(far, (*table.shape[:-1], capacity))
    # Distances n_near + L - 1, .., 1; those above the clamp are filled with zeros, and replaced
    # below.
    first = max(clamp - (n_near + segment_len - 1), 0)
    near = table[..., first:clamp]
    pad = [(0, 0)] * (table.ndim - 1)
    near = jnp.pad(near, [*pad, (n_near + segment_len - 1 - near.shape[-1], 0)])
    near = relative_shift(near)[..., :n_near]  # Column j: the slot of age n_near - j.
    near = _rotate(near, write_index, capacity)
    if not clamped:
        return near
    distance = jnp.arange(segment_len, dtype=jnp.int32)[:, None] + age[None, :]
    beyond = (distance >= clamp).reshape((1,) * (table.ndim - 2) + distance.shape)
    return jnp.where(beyond, far, near)


def _rotate(columns: jax.Array, write_index: jax.Array, capacity: int) -> jax.Array:
    """Puts the columns of the ages n, .., 1 where those slots are in the ring.

    The shapes are [..., n] -> [..., R]. All other columns are zeros.

    The latest slot is write_index - 1 (modulo R). Columns of several queries are written once,
    running over the ring's end, and what ran over is added where the ring begins: `jnp.roll` would
    write an array of twice the ring's length first, which takes a quarter longer with 128 queries.
    Those of one query are written twice and cut out: under `vmap`, with an index for each row, the
    write would be a scatter (wt103_base's attention with 16 rows: 26.9 ms, and 23.7 so; two cores
    of an AMD EPYC, jax 0.10.2).
    """
    n_column = columns.shape[-1]
    pad = [(0, 0)] * (columns.ndim - 1)
    if columns.shape[-2] == 1:
        by_age = jnp.pad(columns, [*pad, (capacity - n_column, 0)])
        twice = jnp.concatenate([by_age, by_age], axis=-1)
        return jax.lax.dynamic_slice_in_dim(twice, capacity - write_index, capacity, axis=-1)
    written = jnp.zeros((*columns.shape[:-1], capacity + n_column), columns.dtype)
    written = jax.lax.dynamic_update_slice_in_dim(
        written, columns, (write_index - n_column) % capacity, axis=-1
    )
    over = jnp.pad(written[..., capacity:], [*pad, (0, capacity - n_column)])
    return written[..., :capacity] + over
