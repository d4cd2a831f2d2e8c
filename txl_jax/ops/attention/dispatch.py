"""Chooses the implementation of attention. Today there is the reference only."""

from collections.abc import Callable

import jax

from txl_jax.ops.attention.dot_product import dot_product_attention, keep_all
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.relative import relative_attention


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array | None = None,
    *,
    content_bias: jax.Array | None = None,
    position_bias: jax.Array | None = None,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    drop: Callable[[jax.Array], jax.Array] = keep_all,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, K, E], of the distances K - 1, .., 0; None: without, and then without biases too.
      content_bias: [H, E], u; None: without.
      position_bias: [H, E], v; None: without.
      position_score: [H, K], added to the scores of the distances K - 1, .., 0 before the division by sqrt(E), with or
        without position keys; None: nothing.
      visibility: which keys a query sees; at least itself.
      drop: dropout on the probabilities.

    Raises:
      ValueError: a bias without position keys.
    """
    if position_key is None:
        biases = {"content_bias": content_bias, "position_bias": position_bias}
        given = [name for name, bias in biases.items() if bias is not None]
        if given:
            raise ValueError(
                f"{' and '.join(given)} given and position_key is None; give position_key [H, K, E] too, or no bias"
            )
        return dot_product_attention(query, key, value, position_score=position_score, visibility=visibility, drop=drop)
    return relative_attention(
        query,
        key,
        value,
        position_key,
        content_bias=content_bias,
        position_bias=position_bias,
        position_score=position_score,
        visibility=visibility,
        drop=drop,
    )
