"""The definition of attention, in training and over a KV cache.

Every faster path must give the same numbers.

In training (Dai et al., 2019, section 3.3) the score of query i and key j has four terms,

    (a) q_i . k_j    (b) q_i . r_(i-j)    (c) u . k_j    (d) v . r_(i-j)

(a) + (c) is one product of q + u with the keys, and (b) + (d) is one product of q + v with the
position keys followed by the relative shift. Shaw et al. (2018) have (a) and (b), with learned
position keys. Without position keys it is scaled dot-product attention (Vaswani et al., 2017,
section 3.2).

A KV cache is a ring of stored keys and values. Attention over the ring and the segment gives the
numbers of training over [memory; segment]. Slots are overwritten in turn: slot s holds the position
`age(s)` before the segment, and a query at row i meets it at the distance age(s) + i. Nothing of
the memory is moved, joined or sorted. The position scores are rotated instead. With `clamp_len`
most distances share one positional encoding. Their scores, one number per query, need no table:
only distances below the clamp are gathered, which at M = 3800 and a clamp of 1000 saves three
quarters of the product with position keys and of the shift.

tests/ops/attention/test_reference.py compares training with a loop over pairs, test_cached.py and
tests/inference/test_forward.py the cache with loops and with training.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.distances import relative_shift, skew
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import CachedOperands, Operands
from txl_jax.ops.attention.saved import OUTPUT, mark_as_saved
from txl_jax.ops.matmul import Int8, multiply, product, row_product, wide_type


def attention(
    operands: Operands, visibility: Visibility, dropout: ProbabilityDropout | None = None
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. A query that sees no key gets zeros.

    In a language model the visibility is causal and has no `lengths`. The other cases are for
    encoders of padded rows, such as docs/examples/speech_encoder.py.
    """
    # `product` is an einsum that sums in at least float32, so the scores are not rounded to the
    # compute dtype before the softmax.
    content_query = biased(operands.query, operands.content_bias)
    scores_BxHxLxK = product("bhle,bhke->bhlk", content_query, operands.key)

    # Scores by distance are moved to the columns of their keys.
    if operands.position_key is not None or operands.position_score is not None:
        position_query = biased(operands.query, operands.position_bias)
        by_distance = position_scores(
            position_query, operands.position_key, operands.position_score
        )
        if visibility.causal:
            # There are no distances below 0, of keys after the query: the mask hides these pairs.
            scores_BxHxLxK += relative_shift(by_distance)
        else:
            scores_BxHxLxK += skew(by_distance, visibility.n_keys)

    scores_BxHxLxK *= operands.query.shape[-1] ** -0.5
    visible_Bx1xLxK = visibility.mask()[:, None, :, :]
    scores_BxHxLxK = jnp.where(visible_Bx1xLxK, scores_BxHxLxK, -jnp.inf)

    # With `lengths` a query may see no key. A softmax of nothing is nan, as are its gradients, so
    # such a query gets finite scores before the softmax and zeros after it.
    if visibility.lengths is not None:
        sees_Bx1xLx1 = jnp.any(visible_Bx1xLxK, axis=-1, keepdims=True)
        scores_BxHxLxK = jnp.where(sees_Bx1xLx1, scores_BxHxLxK, 0)
    probabilities_BxHxLxK = jax.nn.softmax(scores_BxHxLxK, axis=-1).astype(operands.value.dtype)
    if visibility.lengths is not None:
        probabilities_BxHxLxK = jnp.where(sees_Bx1xLx1, probabilities_BxHxLxK, 0)

    if dropout is not None:
        probabilities_BxHxLxK = dropout.apply(probabilities_BxHxLxK)
    output = jnp.einsum("bhlk,bhke->bhle", probabilities_BxHxLxK, operands.value)
    # The probabilities have no name, because they are as large as the scores.
    return mark_as_saved(output, OUTPUT)


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

    Pairs whose key is after the query get scores of other pairs, which a mask must hide.
    """
    scale = query.shape[-1] ** -0.5

    def content(rows: jax.Array) -> jax.Array:
        return product("bhle,bhke->bhlk", rows, key) * scale

    def distance(rows: jax.Array) -> jax.Array:
        return relative_shift(position_scores(rows, position_key, None)) * scale

    zeros = jnp.zeros_like(query)
    u = biased(zeros, content_bias)
    v = biased(zeros, position_bias)
    return ScoreTerms(a=content(query), b=distance(query), c=content(u), d=distance(v))


def cached_attention(operands: CachedOperands, visibility: CachedVisibility) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]. The ring may have any dtype."""
    query = operands.query
    value = operands.value
    ring_key, ring_value = operands.ring
    capacity = ring_key.shape[3]

    # Scores of the segment's own keys, and of the ring's slots.
    own_scores = product("bhle,bhke->bhlk", query, operands.key)
    ring_scores = _by_ring(query, ring_key) if capacity else None
    if operands.position is not None:
        position_query, position_key, position_score = operands.position
        table = position_scores(
            position_query, position_key, position_score, equation="hne,hep->hnp"
        )
        own_scores += _own_positions(table)
        if ring_scores is not None:
            # The slot of age a is a positions before the segment, so query i meets it at a + i.
            age = visibility.age()
            ring_scores += _ring_positions(table, visibility.write_index, age)

    # The highest score of each query, for a softmax over both.
    own_scores = jnp.where(visibility.own_mask()[:, None], own_scores, -jnp.inf)
    top = jnp.max(own_scores, axis=-1, keepdims=True)
    if ring_scores is not None:
        ring_scores = jnp.where(visibility.ring_mask()[:, None], ring_scores, -jnp.inf)
        top = jnp.maximum(top, jnp.max(ring_scores, axis=-1, keepdims=True))

    # The values are divided by the sum of the exponentials last: E numbers per query instead of K.
    exp_own = jnp.exp(own_scores - top)
    total = jnp.sum(exp_own, axis=-1, keepdims=True)
    summed = product("bhlk,bhke->bhle", exp_own.astype(value.dtype), value)
    if ring_scores is not None:
        exp_ring = jnp.exp(ring_scores - top)
        total += jnp.sum(exp_ring, axis=-1, keepdims=True)
        summed += _by_ring(exp_ring.astype(value.dtype), ring_value)
    return (summed / total).astype(value.dtype)


def _by_ring(rows: jax.Array, ring: jax.Array | Int8) -> jax.Array:
    """Multiplies with a ring of any dtype: [B, H, L, n] x [B, H, n, m] -> [B, H, L, m].

    The result is in at least float32.

    A single row is multiplied and summed, so that a narrower ring is converted while it is read.
    For a product XLA's CPU backend first writes a copy of all of it in the wide dtype (12 layers of
    8 x 64 x 2160 in bfloat16, two cores: 22 ms with products, 4.1 ms so, and 2.8 ms in float32).
    """
    wide = wide_type(rows)
    if isinstance(ring, Int8):
        return multiply(rows, ring).astype(wide)

    is_single_row = rows.shape[2] == 1
    if is_single_row and ring.dtype != rows.dtype:
        column = rows.astype(wide).swapaxes(2, 3)
        return jnp.sum(ring.astype(wide) * column, axis=2, keepdims=True)

    def products(rows: jax.Array, ring: jax.Array) -> jax.Array:
        return product("bhln,bhnm->bhlm", rows, ring.astype(rows.dtype))

    # On a CPU this has a faster product for one token in float32 (or float64).
    if is_single_row and rows.dtype == wide:
        return row_product(rows, ring, otherwise=products)
    return products(rows, ring)


def biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias [H, E] to [B, H, L, E]. None adds nothing."""
    return query if bias is None else query + bias[None, :, None, :]


def position_scores(
    query: jax.Array,
    key: jax.Array | Int8 | None,
    score: jax.Array | None,
    equation: str = "hne,hpe->hnp",
) -> jax.Array:
    """Computes scores by distance, before the shift.

    There is one [B L, E] x [E, P] product per head: XLA's CPU backend turns the einsum
    bhle,hke->bhlk into B small products.

    Args:
      query: [B, H, L, E].
      key: Position keys [H, P, E], or [H, E, P] with `equation` "hne,hep->hnp", or None for no
        matmul.
      score: [H, P], added to the products, or None. It must be an array without keys.
      equation: The product of a head's queries with its position keys.

    Returns:
      Scores [B, H, L, P]. Without keys [1, H, L, P], the same for all rows.
    """
    batch, n_head, n_query, width = query.shape
    wide = wide_type(query)
    if key is None:
        assert score is not None, "neither keys nor scores"
        row = score.astype(wide)[None, :, None, :]
        return jnp.broadcast_to(row, (1, n_head, n_query, score.shape[-1]))

    # Position keys are the same for all rows, so the queries of all rows become one axis.
    rows = query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)
    if isinstance(key, Int8):
        scores = multiply(rows, key).astype(wide)
    else:
        scores = product(equation, rows, key)
    if score is not None:
        scores += score.astype(wide)[:, None, :]
    return scores.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)


def _own_positions(table: jax.Array) -> jax.Array:
    """Moves scores by distance to the segment's own keys: [..., L, P] -> [..., L, L].

    Pairs whose key is after the query get scores of other pairs.
    """
    segment_len, n_position = table.shape[-2:]
    columns = table[..., max(n_position - segment_len, 0) :]
    # Distances beyond the clamp have the first column's scores.
    n_missing = max(segment_len - n_position, 0)
    no_pad = [(0, 0)] * (table.ndim - 1)
    columns = jnp.pad(columns, [*no_pad, (n_missing, 0)], mode="edge")
    return relative_shift(columns)


def _ring_positions(table: jax.Array, write_index: jax.Array, age: jax.Array) -> jax.Array:
    """Moves scores by distance to the ring's slots: [..., L, P] -> [..., L, R].

    `age` is int32 [R], the age of each slot.
    """
    segment_len, n_position = table.shape[-2:]
    capacity = age.shape[0]
    # All distances from the clamp on have the first column's scores.
    clamp = n_position - 1
    far = table[..., :1]

    # Near slots are those that some query meets below the clamp. The first query is the nearest,
    # and meets a slot at the distance of its age: the near slots have the ages clamp - 1, .., 1.
    is_clamped = clamp < capacity + segment_len - 1
    n_near = min(clamp - 1, capacity) if is_clamped else capacity
    if n_near <= 0:
        return jnp.broadcast_to(far, (*table.shape[:-1], capacity))

    # Queries meet near slots at the distances n_near + L - 1, .., 1. Those above the clamp are
    # filled with zeros, and replaced below. The table's columns are the distances clamp, .., 0, so
    # column `clamp`, of distance 0, is left out.
    n_distance = n_near + segment_len - 1
    near = table[..., max(clamp - n_distance, 0) : clamp]
    no_pad = [(0, 0)] * (table.ndim - 1)
    near = jnp.pad(near, [*no_pad, (n_distance - near.shape[-1], 0)])
    # After the shift, column j belongs to the slot of age n_near - j.
    near = relative_shift(near)[..., :n_near]
    near = _rotate(near, write_index, capacity)
    if not is_clamped:
        return near

    row = jnp.arange(segment_len, dtype=jnp.int32)
    is_far = row[:, None] + age[None, :] >= clamp
    return jnp.where(is_far, far, near)


def _rotate(columns: jax.Array, write_index: jax.Array, capacity: int) -> jax.Array:
    """Puts the columns of the ages n, .., 1 where those slots are in the ring.

    The shapes are [..., L, n] -> [..., L, R]. All other columns are zeros. The latest slot is
    write_index - 1 (modulo R).
    """
    n_column = columns.shape[-1]
    no_pad = [(0, 0)] * (columns.ndim - 1)

    # The columns of a single query are written twice and cut out. Under `vmap`, with an index for
    # each row, a write would be a scatter (wt103_base's attention with 16 rows: 26.9 ms, and 23.7
    # so; two cores of an AMD EPYC, jax 0.10.2).
    if columns.shape[-2] == 1:
        by_age = jnp.pad(columns, [*no_pad, (capacity - n_column, 0)])
        twice = jnp.concatenate([by_age, by_age], axis=-1)
        # `by_age` has the ages R, .., 1. The slot 0 has the age write_index, or R if that is 0, and
        # each slot after it is one younger, so the cut begins at the column of that age.
        return jax.lax.dynamic_slice_in_dim(twice, capacity - write_index, capacity, axis=-1)

    # The columns of multiple queries are written once, running over the ring's end, and what ran
    # over is added where the ring begins. `jnp.roll` would write an array of twice the ring's
    # length first, which takes a quarter longer with 128 queries.
    longer = jnp.zeros((*columns.shape[:-1], capacity + n_column), columns.dtype)
    first = (write_index - n_column) % capacity
    longer = jax.lax.dynamic_update_slice_in_dim(longer, columns, first, axis=-1)
    ran_over = jnp.pad(longer[..., capacity:], [*no_pad, (0, capacity - n_column)])
    return longer[..., :capacity] + ran_over
