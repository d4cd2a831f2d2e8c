"""Attention as pure functions on arrays; they depend on nothing else here and can be used alone.

    dispatch.py     `attention`, the one function that modules call; it chooses the implementation
    relative.py     `relative_attention`, the reference (the definition of correct), and its four terms apart
    dot_product.py  `dot_product_attention`, without position keys, and the softmax that both share
    cached.py       `cached_attention`, of inference: the memory as a KV cache, a ring of slots
    masks.py        `Visibility`, which keys a query sees, as a description and as booleans
    positions.py    distances, their sinusoids, and the relative shift

Letters: B batch, L segment length, M memory length, K = M + L keys, H heads, E head width, R slots of a cache.
"""

from txl_jax.ops.attention.cached import CachedVisibility, cached_attention
from txl_jax.ops.attention.dispatch import attention
from txl_jax.ops.attention.dot_product import dot_product_attention
from txl_jax.ops.attention.masks import Visibility, attention_mask
from txl_jax.ops.attention.positions import key_distances, relative_shift, sinusoids
from txl_jax.ops.attention.relative import ScoreTerms, relative_attention, score_terms

__all__ = [
    "CachedVisibility",
    "ScoreTerms",
    "Visibility",
    "attention",
    "attention_mask",
    "cached_attention",
    "dot_product_attention",
    "key_distances",
    "relative_attention",
    "relative_shift",
    "score_terms",
    "sinusoids",
]
