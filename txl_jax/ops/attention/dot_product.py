"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2), and the last step of every attention."""

import jax
import jax.numpy as jnp

from txl_jax.ops.attention import positions
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Of positions it knows the mask and, if given, a score per distance that is the same for all queries.

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_score: [H, P], added to the scores of the distances K - 1, .. (`Visibility.n_positions`) before the
        division by sqrt(E); None: nothing.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities; None: none.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores_BxHxLxK = jnp.einsum("bhle,bhke->bhlk", query, key, preferred_element_type=wide)
    if position_score is not None:
        by_distance_HxLxP = jnp.broadcast_to(
            position_score.astype(wide)[:, None, :],
            (position_score.shape[0], visibility.segment_len, position_score.shape[1]),
        )
        scores_BxHxLxK += positions.by_key(by_distance_HxLxP, visibility.n_keys)[None]
    return weighted_values(scores_BxHxLxK * query.shape[-1] ** -0.5, value, visibility=visibility, dropout=dropout)


def weighted_values(
    scores: jax.Array, value: jax.Array, *, visibility: Visibility, dropout: Dropout | None
) -> jax.Array:
    """Computes [B, H, L, E] from scaled scores [B, H, L, K], in at least float32, and values [B, H, K, E]."""
    visible_Bx1xLxK = visibility.mask()[:, None, :, :]
    scores_BxHxLxK = jnp.where(visible_Bx1xLxK, scores, -jnp.inf)
    if visibility.may_hide_all:  # A softmax of nothing is nan, and so are its gradients.
        sees_Bx1xLx1 = jnp.any(visible_Bx1xLxK, axis=-1, keepdims=True)
        scores_BxHxLxK = jnp.where(sees_Bx1xLx1, scores_BxHxLxK, 0)
    probabilities_BxHxLxK = jax.nn.softmax(scores_BxHxLxK, axis=-1).astype(value.dtype)
    if visibility.may_hide_all:
        probabilities_BxHxLxK = jnp.where(sees_Bx1xLx1, probabilities_BxHxLxK, 0)
    if dropout is not None:
        probabilities_BxHxLxK = dropout.apply(probabilities_BxHxLxK)
    return jnp.einsum("bhlk,bhke->bhle", probabilities_BxHxLxK, value)
