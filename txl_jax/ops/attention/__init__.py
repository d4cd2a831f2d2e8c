"""Attention as pure functions on arrays; they depend on nothing else here and can be used alone.

    dispatch.py     `attention` and `cached_attention`, which modules and inference call
    choice.py       the choice of their implementation; `problem.py`: what it is chosen for
    relative.py     `relative_attention`, the reference (the definition of correct), and its four terms apart
    dot_product.py  `dot_product_attention`, without position keys, and the softmax that both share
    cached.py       the reference of inference: the memory as a KV cache, a ring of slots
    tiled/          the same over tiles of the scores, in plain XLA
    stored.py       the same in plain XLA with its own backward pass, for GPUs
    tpu/            the same in Pallas kernels for TPUs
    masks.py        `Visibility`, which keys a query sees, as a description and as booleans
    dropout.py      `Dropout` on the probabilities, the same mask in every implementation
    positions.py    distances, their sinusoids, and the relative shift

Letters: B batch, L segment length, M memory length, K = M + L keys, H heads, E head width, P distances, R slots of a
cache.
"""

from txl_jax.ops.attention.cached import CachedVisibility
from txl_jax.ops.attention.dispatch import attention, cached_attention
from txl_jax.ops.attention.dot_product import dot_product_attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility, attention_mask
from txl_jax.ops.attention.positions import key_distances, relative_shift, sinusoids
from txl_jax.ops.attention.problem import Implementation, Implementations, Problem, Tile
from txl_jax.ops.attention.relative import ScoreTerms, relative_attention, score_terms

__all__ = [
    "CachedVisibility",
    "Dropout",
    "Implementation",
    "Implementations",
    "Problem",
    "ScoreTerms",
    "Tile",
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
