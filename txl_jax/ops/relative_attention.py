"""Attention with relative positions (Dai et al., 2019, section 3.3): the definition of correct.

The score of query i and key j has four terms,

    (a) q_i . k_j    (b) q_i . r_(i-j)    (c) u . k_j    (d) v . r_(i-j)

(a) + (c) is one product of q + u with the keys, (b) + (d) one product of q + v with the position keys
followed by the relative shift.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from txl_jax.ops import positions
from txl_jax.ops.dot_product_attention import keep_all, weighted_values


def relative_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array,
    *,
    content_bias: jax.Array,
    position_bias: jax.Array,
    mask: jax.Array,
    drop: Callable[[jax.Array], jax.Array] = keep_all,
) -> jax.Array:
    """Weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, K, E], W_R R of the distances K - 1, .., 0.
      content_bias: [H, E], u.
      position_bias: [H, E], v.
      mask: bool [B, L, K], visible pairs; every query must see at least itself.
      drop: dropout on the probabilities.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    content_BxHxLxK = jnp.einsum(
        "bhle,bhke->bhlk", query + content_bias[None, :, None, :], key, preferred_element_type=wide
    )
    position_BxHxLxK = positions.relative_shift(
        _position_scores(query + position_bias[None, :, None, :], position_key, wide)
    )
    scale = query.shape[-1] ** -0.5
    return weighted_values((content_BxHxLxK + position_BxHxLxK) * scale, value, mask=mask, drop=drop)


def _position_scores(query: jax.Array, position_key: jax.Array, wide: jnp.dtype) -> jax.Array:
    """[B, H, L, E] x [H, K, E] -> [B, H, L, K], before the shift.

    One [B * L, E] x [E, K] product per head: left to itself, XLA's CPU backend turns the einsum
    bhle,hke->bhlk into B small products.
    """
    batch, n_head, n_query, width = query.shape
    query_HxBLxE = query.transpose(1, 0, 2, 3).reshape(n_head, batch * n_query, width)
    scores_HxBLxK = jnp.einsum("hne,hke->hnk", query_HxBLxE, position_key, preferred_element_type=wide)
    return scores_HxBLxK.reshape(n_head, batch, n_query, -1).transpose(1, 0, 2, 3)
