"""Adaptive input and softmax (Grave et al., 2017; Baevski and Auli, 2019), in token order.

The vocabulary, sorted by frequency, is cut at the cutoffs into a head and tails. The head's softmax runs
over its own tokens and, after them, one entry per tail, first tail first; a token of tail c has
log p = log p_head(c) + log p_c(token). Without cutoffs the head is the whole vocabulary: the full softmax.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from txl_jax.ops.chunked_apply import chunked_apply
from txl_jax.sharding import ambient_mesh, num_vocab_shards, vocab_axis
from txl_jax.sharding.activations import batch_spec, shard_map


class Cluster(NamedTuple):
    """The weights of one cluster."""

    table: jax.Array  # [rows, width]
    bias: jax.Array | None  # [rows]; None on the input side.
    projection: jax.Array | None  # [width, D]; None: width is D.


class TailEntries(NamedTuple):
    """What the head's softmax knows of the tails, in the head's projected space."""

    table: jax.Array  # [C - 1, width of the head]
    bias: jax.Array  # [C - 1]


def embed(
    tokens: jax.Array,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    *,
    dtype: jnp.dtype,
) -> jax.Array:
    """Embeds tokens: int [B, ...] -> [B, ..., D] of type `dtype`, not yet scaled by sqrt(D).

    Rows are cast after the lookup, so that gradients of a token's many occurrences add up in the table's
    type: in bfloat16 a sum of ones stops at 256. On a mesh (`jax.set_mesh`) each device looks up the tokens of its own
    rows in its own part of each table.
    """
    if ambient_mesh() is None:
        return _embed(tokens, clusters=clusters, cutoffs=cutoffs, dtype=dtype, vocab=None)
    local = functools.partial(_embed, cutoffs=cutoffs, dtype=dtype, vocab=vocab_axis())
    return _on_mesh(local, clusters)(tokens)


def negative_log_likelihood(
    hidden: jax.Array,
    targets: jax.Array,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    *,
    capacity: int | None = None,
) -> jax.Array:
    """Nats of each target: [B, ..., D] and int [B, ...] -> [B, ...], in at least float32.

    A tail is computed only at the positions whose target lies in it. On a mesh (`jax.set_mesh`) each device computes its own
    rows, with its own part of each cluster's tokens.

    Args:
      tails: what the head knows of the tails; None: there are none, or the head ends with them (`with_tails`).
      capacity: positions that a device computes at a time; None: as many as a tail's rows allow (`_tail_capacity`).
    """
    nll = functools.partial(_nll, cutoffs=cutoffs, capacity=capacity)
    if ambient_mesh() is None:
        return nll(hidden, targets, clusters=clusters, tails=tails, vocab=None, sync_axes=())
    # Where nothing is sent, a device's tails need not wait for another's.
    sync_axes = batch_spec(hidden.shape[0]) if vocab_axis() else ()
    local = functools.partial(nll, vocab=vocab_axis(), sync_axes=sync_axes)
    return _on_mesh(local, clusters, tails=tails)(hidden, targets)


def _embed(
    tokens: jax.Array,
    *,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    dtype: jnp.dtype,
    vocab: str | None,
) -> jax.Array:
    """`embed` on one device; `vocab`: the mesh axis over which the tables' rows lie divided, or None."""
    total = None
    for start, cluster in zip([0, *cutoffs], clusters, strict=True):
        rows = cluster.table.shape[0]
        place = tokens - start - _first_row(rows, vocab)
        inside = ((place >= 0) & (place < rows))[..., None]
        vectors = jnp.take(cluster.table, jnp.clip(place, 0, rows - 1), axis=0).astype(dtype)
        if vocab is not None:  # Of what is added up all but one are 0.
            vectors = jax.lax.psum(jnp.where(inside, vectors, 0), vocab)
        if cluster.projection is not None:
            vectors = vectors @ cluster.projection.astype(dtype)
        if vocab is None and len(clusters) > 1:
            vectors = jnp.where(inside, vectors, 0)
        total = vectors if total is None else total + vectors
    return total


def _nll(
    hidden: jax.Array,
    targets: jax.Array,
    *,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    capacity: int | None,
    vocab: str | None,
    sync_axes: tuple[str, ...],
) -> jax.Array:
    """`negative_log_likelihood` on one device.

    Args:
      vocab: the mesh axis over which the clusters' rows lie divided, or None.
      sync_axes: mesh axes whose devices walk a tail in the same number of rounds (`chunked_apply`).
    """
    bounds = [0, *cutoffs]
    cluster_of_target = jnp.searchsorted(jnp.asarray(cutoffs, targets.dtype), targets, side="right")
    n_head_token = cutoffs[0] if cutoffs else clusters[0].table.shape[0]
    head_target = jnp.where(cluster_of_target == 0, targets, n_head_token + cluster_of_target - 1)
    nll = _head_nll(hidden, head_target, clusters[0], tails, n_token=n_head_token, vocab=vocab)
    for c in range(1, len(clusters)):
        tail = chunked_apply(
            functools.partial(_cluster_nll, vocab=vocab),
            capacity or _tail_capacity(clusters[c].table.shape[0], targets.size),
            clusters[c],
            hidden.reshape(-1, hidden.shape[-1]),
            (targets - bounds[c]).reshape(-1),
            (cluster_of_target == c).reshape(-1),
            sync_axes,
        )
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


def _cluster_nll(cluster: Cluster, hidden: jax.Array, labels: jax.Array, *, vocab: str | None) -> jax.Array:
    """Nats of labels of one cluster: [..., D] and int [...] -> [...]; `vocab` as in `_nll`."""
    if vocab is None:
        return optax.softmax_cross_entropy_with_integer_labels(logits(hidden, cluster), labels)
    own = _divided_logits(logits(hidden, cluster), labels, vocab=vocab)
    return own.log_total - own.target


def _head_nll(
    hidden: jax.Array, labels: jax.Array, head: Cluster, tails: TailEntries | None, *, n_token: int, vocab: str | None
) -> jax.Array:
    """Nats of the head's labels: its `n_token` own tokens and, after them, the tails."""
    if vocab is None or tails is None:
        return _cluster_nll(with_tails(head, tails), hidden, labels, vocab=vocab)
    of_token = labels < n_token
    own = _divided_logits(logits(hidden, head), jnp.where(of_token, labels, -1), vocab=vocab)
    entries = logits(hidden, Cluster(tails.table, tails.bias, head.projection))
    entry = jnp.take_along_axis(entries, jnp.maximum(labels - n_token, 0)[..., None], axis=-1)[..., 0]
    log_total = jnp.logaddexp(own.log_total, jax.nn.logsumexp(entries, axis=-1))
    return log_total - jnp.where(of_token, own.target, entry)


class _Divided(NamedTuple):
    """What a loss needs of logits that lie divided over devices; the same on all of them."""

    log_total: jax.Array  # [...], log of the sum of their exponentials.
    target: jax.Array  # [...], the label's logit; 0 for a label below 0.


def _divided_logits(own: jax.Array, labels: jax.Array, *, vocab: str) -> _Divided:
    """Of logits [..., rows] of which device i has those of the labels i * rows, .., (i + 1) * rows - 1.

    Numbers per position are sent, never logits.
    """
    most = jax.lax.pmax(jax.lax.stop_gradient(own.max(axis=-1)), vocab)
    total = jax.lax.psum(jnp.exp(own - most[..., None]).sum(axis=-1), vocab)
    rows = own.shape[-1]
    place = labels - _first_row(rows, vocab)
    found = jnp.take_along_axis(own, jnp.clip(place, 0, rows - 1)[..., None], axis=-1)[..., 0]
    target = jax.lax.psum(jnp.where((place >= 0) & (place < rows), found, 0), vocab)
    return _Divided(most + jnp.log(total), target)


def _first_row(rows: int, vocab: str | None) -> jax.Array | int:
    """The number in its cluster of the first of a device's rows."""
    return 0 if vocab is None else rows * jax.lax.axis_index(vocab)


def _on_mesh(local: Callable[..., jax.Array], clusters: Sequence[Cluster], **whole: Any) -> Callable[..., jax.Array]:
    """`local` on each device: of arrays [B, ...] its rows, of the clusters its tokens, of all else everything."""
    tokens = PartitionSpec(vocab_axis())
    of_cluster = Cluster(table=tokens, bias=tokens, projection=PartitionSpec())
    named = {"clusters": [_divisible(cluster, num_vocab_shards()) for cluster in clusters], **whole}
    specs = {"clusters": [of_cluster] * len(clusters), **dict.fromkeys(whole, PartitionSpec())}

    def run(*arrays: jax.Array) -> jax.Array:
        rows = PartitionSpec(batch_spec(arrays[0].shape[0]) or None)
        in_specs = ((rows,) * len(arrays), specs)
        return shard_map(lambda own, named: local(*own, **named), in_specs=in_specs, out_specs=rows)(arrays, named)

    return run


def _divisible(cluster: Cluster, parts: int) -> Cluster:
    """The cluster with rows of no probability at its end, so that all divide into `parts`."""
    missing = -cluster.table.shape[0] % parts
    if not missing:
        return cluster
    table, bias = jnp.pad(cluster.table, ((0, missing), (0, 0))), cluster.bias
    if bias is not None:  # Not -inf, whose differences are nan.
        bias = jnp.pad(bias, (0, missing), constant_values=jnp.finfo(bias.dtype).min / 2)
    return Cluster(table, bias, cluster.projection)


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
