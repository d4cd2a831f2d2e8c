"""Attention as pure functions on arrays, which you can use without the models.

    dispatch.py   `attention` and `cached_attention`, which modules and inference call: checks, and
                  a device's shard
    choose.py     chooses the path for a call, with the reason
    problem.py    the arrays and sizes for which a path is chosen
    reference.py  the reference that all others are tested against, in training and over a KV cache
    tiled/        the same over tiles of the scores, in plain XLA: the path of CPUs
    stored.py     the same in plain XLA with its own backward pass: the path of GPUs in training
    tpu/          the same in Pallas kernels for TPUs
    masks.py      the keys that a query attends to, as descriptions and as booleans
    saved.py      names of the arrays that the backward pass reads, for activation checkpointing
    dropout.py    `ProbabilityDropout` on the probabilities, the same mask on every path
    distances.py  distances, their sinusoids, and the relative shift

Letters: B batch, L segment length, M memory length, K = M + L keys, H heads, E head width, P
distances, R slots of a cache.
"""

from txl_jax.ops.attention.dispatch import attention, cached_attention
from txl_jax.ops.attention.distances import key_distances, relative_shift, sinusoids
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import CachedVisibility, Visibility
from txl_jax.ops.attention.problem import AttentionCall, AttentionPaths, Implementation, Tile
from txl_jax.ops.attention.reference import ScoreTerms, score_terms

__all__ = [
    "AttentionCall",
    "AttentionPaths",
    "CachedVisibility",
    "Implementation",
    "ProbabilityDropout",
    "ScoreTerms",
    "Tile",
    "Visibility",
    "attention",
    "cached_attention",
    "key_distances",
    "relative_shift",
    "score_terms",
    "sinusoids",
]
