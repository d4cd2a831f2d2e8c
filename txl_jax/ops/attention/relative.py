"""Attention with relative positions (Dai et al., 2019, section 3.3): the definition of correct.

The score of query i and key j has four terms,

    (a) q_i . k_j    (b) q_i . r_(i-j)    (c) u . k_j    (d) v . r_(i-j)

(a) + (c) is one product of q + u with the keys, (b) + (d) one product of q + v with the position keys
followed by the relative shift. Shaw et al. (2018) have (a) and (b) only, with learned position keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.attention import positions
from txl_jax.ops.attention.dot_product import weighted_values
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility


def relative_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array,
    *,
    content_bias: jax.Array | None,
    position_bias: jax.Array | None,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], W_R R of the distances K - 1, .. (`Visibility.n_positions`).
      content_bias: [H, E], u; None: without term (c).
      position_bias: [H, E], v; None: without term (d).
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E); None: nothing.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities; None: none.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    content_BxHxLxK = jnp.einsum("bhle,bhke->bhlk", _biased(query, content_bias), key, preferred_element_type=wide)
    by_distance_BxHxLxP = _position_scores(_biased(query, position_bias), position_key, wide)
    if position_score is not None:
        by_distance_BxHxLxP += position_score.astype(wide)[None, :, None, :]
    position_BxHxLxK = positions.by_key(by_distance_BxHxLxP, visibility.n_keys)
    scale = query.shape[-1] ** -0.5
    return weighted_values((content_BxHxLxK + position_BxHxLxK) * scale, value, visibility=visibility, dropout=dropout)


class ScoreTerms(NamedTuple):
    """The four terms of the scores [B, H, L, K], each divided by sqrt(E); their sum is what the softmax takes."""

    a: jax.Array  # Content with content.
    b: jax.Array  # Content with distance.
    c: jax.Array  # u with content.
    d: jax.Array  # v with distance.


def score_terms(
    query: jax.Array, key: jax.Array, position_key: jax.Array, *, content_bias: jax.Array, position_bias: jax.Array
) -> ScoreTerms:
    """Computes the four terms, of which `relative_attention` shifts the sum of two; arguments as there.

    Future keys get leftovers.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    none = jnp.zeros_like(query)

    def content(rows: jax.Array) -> jax.Array:
        return jnp.einsum("bhle,bhke->bhlk", rows, key, preferred_element_type=wide)

    def distance(rows: jax.Array) -> jax.Array:
        return positions.relative_shift(_position_scores(rows, position_key, wide))

    terms = (
        content(query),
        distance(query),
        content(_biased(none, content_bias)),
        distance(_biased(none, position_bias)),
    )
    return ScoreTerms(*(term * query.shape[-1] ** -0.5 for term in terms))


def _biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[B, H, L, E] and [H, E] -> [B, H, L, E]."""
    return query if bias is None else query + bias[None, :, None, :]


def _position_scores(query: jax.Array, position_key: jax.Array, wide: jnp.dtype) -> jax.Array:
    """[B, H, L, E] x [H, P, E] -> [B, H, L, P], before the shift.

    One [B * L, E] x [E, K] product per head: left to itself, XLA's CPU backend turns the einsum
    bhle,hke->bhlk into B small products.
    """
    batch, n_head, n_query, width = query.shape
    query_HxBLxE = query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)
    scores_HxBLxK = jnp.einsum("hne,hke->hnk", query_HxBLxE, position_key, preferred_element_type=wide)
    return scores_HxBLxK.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)
