"""Attention weights by distance, and the terms of the scores: appendix D of the paper.

Letters as everywhere; a key at distance d is d positions before the query, 0 is the query's own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.memory import Memory
from txl_jax.modules.attention import SCORE_PARTS
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import masks
from txl_jax.ops.attention.relative import ScoreTerms, score_terms


class AttentionWeights(NamedTuple):
    """The attention weights of one segment's queries by distance 0 .. A - 1 (A: the window).

    Attributes:
      probabilities: [N, B, H, L, A].
      terms: (a) to (d), [N, B, H, L, A] each, before any softmax.
    """

    probabilities: jax.Array
    terms: ScoreTerms


def attention_weights(
    params: Any, model: TransformerXL, tokens: jax.Array, memory: Memory, *, clamp_len: int | None, same_length: bool
) -> tuple[AttentionWeights, Memory]:
    """Computes the attention weights of a segment int [B, L], and the memory after it.

    Distances that a query does not see have probability 0 and terms of -inf. With `same_length` the window A is the
    model's; without it A is M + 1, so that a query of the segment's end is cut off at M + 1 keys.
    """
    (_, after), kept = model.apply(
        {"params": params},
        tokens,
        memory,
        clamp_len=clamp_len,
        same_length=same_length,
        deterministic=True,
        mutable=["attention"],
    )
    parts = kept["attention"]["stack"]["layers"]["attention"]
    mem_len, segment_len = memory.mem_len, tokens.shape[1]
    window = model.compat.window(mem_len, same_length=same_length)
    mask = masks.attention_mask(memory.valid, segment_len=segment_len, mem_len=mem_len, window=window)
    terms = jax.vmap(
        lambda query, key, position_key, u, v: score_terms(query, key, position_key, content_bias=u, position_bias=v)
    )(*(parts[name] for name in SCORE_PARTS))
    scores = jnp.where(mask[None, :, None], sum(terms), -jnp.inf)
    n_distance = window or mem_len + 1

    def by_distance(array: jax.Array, hidden: float) -> jax.Array:
        return _by_distance(jnp.where(mask[None, :, None], array, hidden), mem_len, n_distance, hidden)

    weights = AttentionWeights(
        probabilities=by_distance(jax.nn.softmax(scores, axis=-1), 0.0),
        terms=ScoreTerms(*(by_distance(term, -jnp.inf) for term in terms)),
    )
    return weights, after


def _by_distance(array: jax.Array, mem_len: int, n_distance: int, beyond: float) -> jax.Array:
    """Gathers keys [..., L, K] by distance 0 .. n - 1: [..., L, n]."""
    row = jnp.arange(array.shape[-2])[:, None]
    column = mem_len + row - jnp.arange(n_distance)[None, :]
    index = jnp.broadcast_to(jnp.maximum(column, 0), (*array.shape[:-2], *column.shape))
    taken = jnp.take_along_axis(array, index, axis=-1)
    return jnp.where((column >= 0).reshape((1,) * (array.ndim - 2) + column.shape), taken, beyond)


def mean_distances(average: np.ndarray) -> np.ndarray:
    """Computes the mean distance of each head's attention: [N, H, A] -> [N, H]."""
    return (average * np.arange(average.shape[-1])).sum(-1) / average.sum(-1)


def widest(average: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Returns the `count` heads (layer, head), from 0, with the largest mean distances, first one of each layer."""
    order = np.argsort(-mean_distances(average), axis=None, kind="stable")
    heads = [divmod(int(i), average.shape[1]) for i in order]
    first: dict[int, tuple[int, int]] = {}
    for layer, head in heads:
        first.setdefault(layer, (layer, head))
    chosen = list(first.values())
    return (chosen + [head for head in heads if head not in chosen])[:count]
