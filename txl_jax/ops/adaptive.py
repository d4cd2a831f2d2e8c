"""Adaptive input and softmax (Grave et al., 2017; Baevski and Auli, 2019), in token order.

The vocabulary, sorted by frequency, is cut at the cutoffs into a head and tails. The head's softmax runs
over its own tokens and, after them, one entry per tail, first tail first; a token of tail c has
log p = log p_head(c) + log p_c(token). Without cutoffs the head is the whole vocabulary: the full softmax.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from txl_jax.ops.selected import at_selected


class Cluster(NamedTuple):
    """The weights of one cluster."""

    table: jax.Array  # [rows, width]
    bias: jax.Array | None  # [rows]; None on the input side.
    projection: jax.Array | None  # [width, D]; None: width is D.


class TailEntries(NamedTuple):
    """What the head's softmax knows of the tails, in the head's projected space."""

    table: jax.Array  # [C - 1, width of the head]
    bias: jax.Array  # [C - 1]


def embed(tokens: jax.Array, clusters: Sequence[Cluster], cutoffs: Sequence[int], *, dtype: jnp.dtype) -> jax.Array:
    """Embeds tokens: int [...] -> [..., D] of type `dtype`, not yet scaled by sqrt(D).

    Rows are cast after the lookup, so that gradients of a token's many occurrences add up in the table's
    type: in bfloat16 a sum of ones stops at 256.
    """
    bounds = [0, *cutoffs]
    total = None
    for start, cluster in zip(bounds, clusters, strict=True):
        rows = cluster.table.shape[0]
        inside = (tokens >= start) & (tokens < start + rows)
        vectors = jnp.take(cluster.table, jnp.clip(tokens - start, 0, rows - 1), axis=0).astype(dtype)
        if cluster.projection is not None:
            vectors = vectors @ cluster.projection.astype(dtype)
        if len(clusters) > 1:
            vectors = jnp.where(inside[..., None], vectors, 0)
        total = vectors if total is None else total + vectors
    return total


def negative_log_likelihood(
    hidden: jax.Array,
    targets: jax.Array,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    *,
    groups: int = 1,
    capacity: int | None = None,
) -> jax.Array:
    """Nats of each target: [..., D] and int [...] -> [...], in at least float32.

    A tail is computed only at the positions whose target lies in it.

    Args:
      tails: what the head knows of the tails; None: there are none, or the head ends with them (`with_tails`).
      groups: equal parts of the leading axis that are walked side by side. Where they lie on devices of their own,
        each device computes its own part; in one part, every device would compute them all.
      capacity: positions that a group computes at a time; None: as many as a tail's rows allow (`_tail_capacity`).
    """
    bounds = [0, *cutoffs]
    cluster_of_target = jnp.searchsorted(jnp.asarray(cutoffs, targets.dtype), targets, side="right")
    n_head_token = cutoffs[0] if cutoffs else clusters[0].table.shape[0]
    head_target = jnp.where(cluster_of_target == 0, targets, n_head_token + cluster_of_target - 1)
    nll = optax.softmax_cross_entropy_with_integer_labels(_head_logits(hidden, clusters[0], tails), head_target)
    for c in range(1, len(clusters)):
        slots = capacity or _tail_capacity(clusters[c].table.shape[0], targets.size // groups)
        walk = functools.partial(at_selected, _cluster_nll, slots, clusters[c])
        parts = (
            hidden.reshape(groups, -1, hidden.shape[-1]),
            (targets - bounds[c]).reshape(groups, -1),
            (cluster_of_target == c).reshape(groups, -1),
        )
        # Groups that are done wait for the others, which costs a copy of the gradients a round: not for one group.
        tail = jax.vmap(walk)(*parts) if groups > 1 else walk(*(part[0] for part in parts))
        nll += tail.reshape(nll.shape)
    return nll


def log_probabilities(hidden: jax.Array, clusters: Sequence[Cluster], tails: TailEntries | None) -> jax.Array:
    """Log probabilities of all tokens: [..., D] -> [..., V], in at least float32."""
    head = jax.nn.log_softmax(_head_logits(hidden, clusters[0], tails))
    n_head_token = head.shape[-1] - (len(clusters) - 1)
    parts = [head[..., :n_head_token]]
    for c, cluster in enumerate(clusters[1:]):
        entry = head[..., n_head_token + c, None]
        parts.append(entry + jax.nn.log_softmax(logits(hidden, cluster)))
    return jnp.concatenate(parts, axis=-1)


def _cluster_nll(cluster: Cluster, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Nats of rows of one cluster: [..., D] and int [...] -> [...]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(hidden, cluster), rows)


def _tail_capacity(rows: int, n_position: int) -> int:
    """Positions per chunk of a tail.

    The largest power of two that keeps a chunk's logits within 2**25 numbers, 128 MiB in float32, of which the
    backward pass holds two; and within 1/32 of the positions, as the last chunk's empty slots cost as much as
    full ones (on a CPU, 370 positions of a tail of 20,000 took 0.25 s in chunks of 256, 1.0 s in one of 2048).
    But at least 128, or matrix units starve; or a quarter of so few positions that 128 would be most of them: one
    row of 64 tokens with nine in three tails of WikiText-103 took 30 ms in chunks of 16, 74 ms in chunks of 64.
    """
    slots = max(min(2**25 // rows, n_position // 32), min(n_position // 4, 128), 1)
    return 2 ** (slots.bit_length() - 1)


def with_tails(head: Cluster, tails: TailEntries | None) -> Cluster:
    """The head with the tails' entries after its own tokens."""
    if tails is None:
        return head
    table = jnp.concatenate([head.table, tails.table])
    bias = jnp.concatenate([head.bias, tails.bias])
    return Cluster(table, bias, head.projection)


def _head_logits(hidden: jax.Array, head: Cluster, tails: TailEntries | None) -> jax.Array:
    return logits(hidden, with_tails(head, tails))


def logits(hidden: jax.Array, cluster: Cluster) -> jax.Array:
    """[..., D] -> [..., rows], in at least float32."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    if cluster.projection is not None:
        hidden = jnp.einsum("...d,wd->...w", hidden, cluster.projection)
    logits = jnp.einsum("...w,vw->...v", hidden, cluster.table, preferred_element_type=wide)
    return logits + jnp.broadcast_to(cluster.bias.astype(wide), logits.shape)
