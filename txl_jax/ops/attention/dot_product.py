"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2), and the last step of every attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from txl_jax.ops.attention import positions
from txl_jax.ops.attention.masks import Visibility


def keep_all(probabilities: jax.Array) -> jax.Array:
    """Applies no dropout."""
    return probabilities


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    drop: Callable[[jax.Array], jax.Array] = keep_all,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Of positions it knows the mask and, if given, a score per distance that is the same for all queries.

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_score: [H, K], added to the scores of the distances K - 1, .., 0 before the division by sqrt(E); None:
        nothing.
      visibility: which keys a query sees; at least itself.
      drop: dropout on the probabilities.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores_BxHxLxK = jnp.einsum("bhle,bhke->bhlk", query, key, preferred_element_type=wide)
    if position_score is not None:
        by_distance_HxLxK = jnp.broadcast_to(position_score.astype(wide)[:, None, :], scores_BxHxLxK.shape[1:])
        scores_BxHxLxK += positions.relative_shift(by_distance_HxLxK)[None]
    return weighted_values(scores_BxHxLxK * query.shape[-1] ** -0.5, value, visibility=visibility, drop=drop)


def weighted_values(
    scores: jax.Array, value: jax.Array, *, visibility: Visibility, drop: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Computes [B, H, L, E] from scaled scores [B, H, L, K], in at least float32, and values [B, H, K, E]."""
    scores_BxHxLxK = jnp.where(visibility.mask()[:, None, :, :], scores, -jnp.inf)
    probabilities_BxHxLxK = drop(jax.nn.softmax(scores_BxHxLxK, axis=-1).astype(value.dtype))
    return jnp.einsum("bhlk,bhke->bhle", probabilities_BxHxLxK, value)
