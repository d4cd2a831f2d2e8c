"""The formulas as plain numpy loops, one element at a time: slow, and too simple to be wrong in the
same way.

The letters are the same as in `txl_jax.config`. A query at row i of the segment and a key at column
j of [memory; segment] are M + i - j apart.
"""

from collections.abc import Sequence

import numpy as np

from txl_jax.ops.adaptive_softmax import Cluster


def sinusoid(distance: float, d_model: int) -> np.ndarray:
    """The encoding of one distance: [D]."""
    code = np.zeros(d_model)
    for i in range(d_model // 2):
        angle = distance / 10000 ** (2 * i / d_model)
        code[i] = np.sin(angle)
        code[d_model // 2 + i] = np.cos(angle)
    return code


def attention_mask(
    valid, *, segment_len: int, mem_len: int, window=None, causal=True, lengths=None
) -> np.ndarray:
    """Visible pairs, bool [B, L, K].

    `lengths` has the number of tokens in each row's segment. The positions after them are padding.
    """
    mask = np.zeros((len(valid), segment_len, mem_len + segment_len), bool)
    for b, n_filled in enumerate(valid):
        for i in range(segment_len):
            for j in range(mem_len + segment_len):
                distance = mem_len + i - j
                empty_slot = j < mem_len - n_filled
                too_far = window is not None and abs(distance) >= window
                padding = lengths is not None and j - mem_len >= lengths[b]
                mask[b, i, j] = not ((causal and distance < 0) or empty_slot or too_far or padding)
    return mask


def relative_attention(
    query,
    key,
    value,
    position_key,
    content_bias,
    position_bias,
    mask,
    position_score=None,
    factor=None,
) -> np.ndarray:
    """Relative attention of each query. A query without a visible key gets zeros.

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E].
      value: [B, H, K, E].
      position_key: [H, P, E], of the distances K - 1, K - 2, ... P is K if the last distance is 0,
        and K + L - 1 if it is -(L - 1).
      content_bias: [H, E].
      position_bias: [H, E].
      mask: Visible pairs, bool [B, L, K].
      position_score: [H, P], of the same distances, or None for zeros.
      factor: Dropout's factors of the probabilities, [B, H, L, K], or None for ones.

    Returns:
      [B, H, L, E].
    """
    n_row, n_head, n_query, width = query.shape
    n_key = key.shape[2]
    attended = np.zeros(query.shape)
    for b, h, i in np.ndindex(n_row, n_head, n_query):
        q = query[b, h, i]
        weights = np.zeros(n_key)
        for j in range(n_key):
            if mask[b, i, j]:
                distance = (n_key - n_query) + i - j
                place = n_key - 1 - distance
                k = key[b, h, j]
                r = position_key[h, place]
                # The terms a, b, c and d of the paper.
                score = q @ k + q @ r + content_bias[h] @ k + position_bias[h] @ r
                if position_score is not None:
                    score += position_score[h, place]
                weights[j] = np.exp(score / np.sqrt(width))
        if weights.any():
            probabilities = weights / weights.sum()
            if factor is not None:
                probabilities *= factor[b, h, i]
            attended[b, h, i] = probabilities @ value[b, h]
    return attended


def random_bits(seed: int, row_head: int, query: int, key: int) -> int:
    """32 bits of one pair of query and key.

    Python's integers have no limit, so they are cut to 32 bits after each step.
    """
    x = seed ^ row_head * 0x9E3779B1 % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x + query * 0x85EBCA77 + key * 0xC2B2AE3D) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def dropout_factor(shape: tuple[int, int, int, int], *, rate: float, seed: int) -> np.ndarray:
    """Factors of the probabilities [B, H, L, K] of a whole batch: 0 or 1 / (1 - rate)."""
    factor = np.zeros(shape)
    for b, h, i, j in np.ndindex(*shape):
        if random_bits(seed, b * shape[1] + h, i, j) >= int(np.float32(rate) * 2**32):
            factor[b, h, i, j] = 1 / (1 - rate)
    return factor


def cluster_of(token: int, cutoffs: Sequence[int]) -> tuple[int, int]:
    """Returns a token's cluster and its row within the cluster."""
    cluster = 0
    start = 0
    for cutoff in cutoffs:
        if token >= cutoff:
            cluster += 1
            start = cutoff
    return cluster, token - start


def embed(
    tokens: np.ndarray, clusters: Sequence[Cluster], cutoffs: Sequence[int], d_model: int
) -> np.ndarray:
    """Int [B, L] -> [B, L, D], not scaled."""
    vectors = np.zeros((*tokens.shape, d_model))
    for where in np.ndindex(*tokens.shape):
        c, row = cluster_of(tokens[where], cutoffs)
        vector = clusters[c].table[row]
        if clusters[c].projection is not None:
            vector = vector @ clusters[c].projection
        vectors[where] = vector
    return vectors


def adaptive_nll(
    hidden, targets, clusters: Sequence[Cluster], tail_table, tail_bias, cutoffs
) -> np.ndarray:
    """Loss of each target, in nats: [B, L, D] and int [B, L] -> [B, L]."""
    nll = np.zeros(targets.shape)
    for where in np.ndindex(*targets.shape):
        c, row = cluster_of(targets[where], cutoffs)
        head = _logits(hidden[where], clusters[0])
        if tail_table is not None:
            inner = _projected(hidden[where], clusters[0])
            head = np.append(head, tail_table @ inner + tail_bias)
        log_p = _log_softmax(head)
        if c == 0:
            nll[where] = -log_p[row]
        else:
            entry = len(clusters[0].table) + c - 1
            nll[where] = -log_p[entry] - _log_softmax(_logits(hidden[where], clusters[c]))[row]
    return nll


def _logits(hidden: np.ndarray, cluster: Cluster) -> np.ndarray:
    return cluster.table @ _projected(hidden, cluster) + cluster.bias


def _projected(hidden: np.ndarray, cluster: Cluster) -> np.ndarray:
    """The hidden state [D] in the size of a cluster's table."""
    if cluster.projection is None:
        return hidden
    return cluster.projection @ hidden


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())
