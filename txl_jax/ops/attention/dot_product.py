"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2), and the last step of every attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def keep_all(probabilities: jax.Array) -> jax.Array:
    """No dropout."""
    return probabilities


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array,
    drop: Callable[[jax.Array], jax.Array] = keep_all,
) -> jax.Array:
    """Weighted sums of the values: [B, H, L, E]. It knows nothing of positions but the mask.

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      mask: bool [B, L, K], visible pairs; every query must see at least itself.
      drop: dropout on the probabilities.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores_BxHxLxK = jnp.einsum("bhle,bhke->bhlk", query, key, preferred_element_type=wide)
    return weighted_values(scores_BxHxLxK * query.shape[-1] ** -0.5, value, mask=mask, drop=drop)


def weighted_values(
    scores: jax.Array, value: jax.Array, *, mask: jax.Array, drop: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """From scaled scores [B, H, L, K], in at least float32, and values [B, H, K, E] to [B, H, L, E]."""
    scores_BxHxLxK = jnp.where(mask[:, None, :, :], scores, -jnp.inf)
    probabilities_BxHxLxK = drop(jax.nn.softmax(scores_BxHxLxK, axis=-1).astype(value.dtype))
    return jnp.einsum("bhlk,bhke->bhle", probabilities_BxHxLxK, value)
