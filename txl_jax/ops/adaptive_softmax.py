"""Adaptive input and softmax (Grave et al., 2017; Baevski and Auli, 2019), in token order.

The vocabulary, sorted by frequency, is split at the cutoffs into clusters: a head and tails. The
head's softmax covers the head's tokens and, after them, one entry per tail, first tail first. A
token of tail c has log p = log p_head(c) + log p_c(token). Without cutoffs the head is the whole
vocabulary, which is the full softmax.

On an ambient mesh of multiple devices (`jax.set_mesh`) `embed` and `negative_log_likelihood` run
under `shard_map`. Rows of the batch are sharded over the mesh's data axes, and the tokens of each
cluster over its tensor axis.

Letters: B batch, D model dimension, C clusters, V vocabulary size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from txl_jax.ops.chunked_apply import chunked_apply
from txl_jax.ops.matmul import multiply_by_rows, wide_type
from txl_jax.sharding import axes
from txl_jax.sharding.activations import batch_spec, shard_map
from txl_jax.sharding.mesh import ambient_mesh


class Cluster(NamedTuple):
    """The weights of one cluster."""

    table: Any  # [rows, width], an array. At inference it may be an `Int8Table`.
    bias: Any  # [rows], or None on the input side.
    projection: Any  # [width, D], like `table`, or None if the width is D.


class TailEntries(NamedTuple):
    """The head's entries for the tails, in the head's projected space."""

    table: jax.Array  # [C - 1, width of the head]
    bias: jax.Array  # [C - 1]


def embed(
    tokens: jax.Array, clusters: Sequence[Cluster], cutoffs: Sequence[int], *, dtype: jnp.dtype
) -> jax.Array:
    """Embeds tokens: int [B, ...] -> [B, ..., D] of dtype `dtype`, not yet scaled by sqrt(D).

    Rows are cast after the lookup, so that gradients of a token's many occurrences add up in the
    table's dtype: in bfloat16 a sum of ones stops at 256.
    """
    # On one device there is no ambient mesh, and no axis over which tables are sharded.
    local = functools.partial(_embed, cutoffs=cutoffs, dtype=dtype, vocab_axis=axes.vocab_axis())
    if ambient_mesh() is None:
        return local(tokens, clusters=clusters)
    return _on_mesh(local, (tokens,), clusters)


def negative_log_likelihood(
    hidden: jax.Array,
    targets: jax.Array,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    *,
    chunk_size: int | None = None,
) -> jax.Array:
    """Computes each target's loss in nats: [B, ..., D] and int [B, ...] -> [B, ...].

    A negative target is ignored, as padding is in other libraries: its loss is 0, and so are its
    gradients. A target of V or more has the loss nan.

    Args:
      hidden: [B, ..., D].
      targets: int [B, ...].
      clusters: The head and the tails.
      tails: The head's entries for the tails, or None without tails or if the head ends with them
        (`with_tails`).
      cutoffs: The first token of each tail.
      chunk_size: A tail is computed only at the positions whose target it contains, `chunk_size` of
        them at a time on a device, or `_tail_chunk_size` if that is None.

    Returns:
      Losses [B, ...], in at least float32.
    """
    # In 8 bits, a vocabulary of 256 tokens would wrap to 0 in the comparison with V below.
    targets = targets.astype(jnp.result_type(targets, jnp.int32))

    # An ignored position is computed like any other, as the token 0, and then dropped.
    is_ignored = targets < 0
    tokens = jnp.where(is_ignored, 0, targets)
    nll = _nll_of_tokens(hidden, tokens, clusters, tails, cutoffs, chunk_size=chunk_size)

    # Sharded logits have no row for a token beyond the vocabulary, which would leave a plausible
    # loss.
    nll = jnp.where(tokens < _vocab_size(clusters, cutoffs), nll, jnp.nan)
    return jnp.where(is_ignored, 0, nll)


def _vocab_size(clusters: Sequence[Cluster], cutoffs: Sequence[int]) -> int:
    """Returns V.

    The head may end with the tails' entries, so that only the last cluster's rows count.
    """
    first_of_last: int = cutoffs[-1] if cutoffs else 0
    rows: int = clusters[-1].table.shape[0]
    return first_of_last + rows


def _nll_of_tokens(
    hidden: jax.Array,
    targets: jax.Array,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    *,
    chunk_size: int | None,
) -> jax.Array:
    """Computes `negative_log_likelihood` on one device or on the mesh.

    All targets are tokens of the vocabulary.
    """
    vocab_axis = axes.vocab_axis()
    # The softmax of a sharded vocabulary has collectives, for which all devices that share it must
    # process the same number of chunks. Otherwise a device need not wait for another's tails.
    sync_axes = batch_spec(hidden.shape[0]) if vocab_axis else ()
    local = functools.partial(
        _nll, cutoffs=cutoffs, chunk_size=chunk_size, vocab_axis=vocab_axis, sync_axes=sync_axes
    )
    if ambient_mesh() is None:
        return local(hidden, targets, clusters=clusters, tails=tails)
    return _on_mesh(local, (hidden, targets), clusters, tails=tails)


def _embed(
    tokens: jax.Array,
    *,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    dtype: jnp.dtype,
    vocab_axis: str | None,
) -> jax.Array:
    """Computes `embed` on one device.

    `vocab_axis` is the mesh axis over which the tables' rows are sharded, or None.
    """
    total: Any = None
    for start, cluster in zip([0, *cutoffs], clusters, strict=True):
        rows = cluster.table.shape[0]
        # The row of each token in this device's part of the cluster's table.
        row = tokens - start - _first_row(rows, vocab_axis)
        is_here = ((row >= 0) & (row < rows))[..., None]
        vectors = jnp.take(cluster.table, jnp.clip(row, 0, rows - 1), axis=0).astype(dtype)

        # At most one device has a token's row: all other summands are 0.
        if vocab_axis is not None:
            vectors = jax.lax.psum(jnp.where(is_here, vectors, 0), vocab_axis)
        if cluster.projection is not None:
            vectors = vectors @ cluster.projection.astype(dtype)
        # Tokens of other clusters add 0. With a vocabulary axis their vectors are 0 already.
        if vocab_axis is None and len(clusters) > 1:
            vectors = jnp.where(is_here, vectors, 0)
        total = vectors if total is None else total + vectors
    return total


def _nll(
    hidden: jax.Array,
    targets: jax.Array,
    *,
    clusters: Sequence[Cluster],
    tails: TailEntries | None,
    cutoffs: Sequence[int],
    chunk_size: int | None,
    vocab_axis: str | None,
    sync_axes: tuple[str, ...],
) -> jax.Array:
    """Computes `negative_log_likelihood` on one device.

    `vocab_axis` is as in `_embed`, and `sync_axes` is as in `chunked_apply`.
    """
    # Without cutoffs every target is in cluster 0, the head, and there are no entries of tails.
    cluster_of_target = jnp.searchsorted(jnp.asarray(cutoffs, targets.dtype), targets, side="right")

    # In the head, a target of tail c has the label of the tail's entry, after the head's tokens.
    n_head_token = cutoffs[0] if cutoffs else clusters[0].table.shape[0]
    entry_of_tail = n_head_token + cluster_of_target - 1
    head_label = jnp.where(cluster_of_target == 0, targets, entry_of_tail)
    nll = _head_nll(
        hidden, head_label, clusters[0], tails, n_token=n_head_token, vocab_axis=vocab_axis
    )

    # Each tail adds its part of the loss at the positions whose target it contains.
    for c in range(1, len(clusters)):
        tail_label = targets - cutoffs[c - 1]
        is_in_tail = cluster_of_target == c
        tail_nll = chunked_apply(
            functools.partial(_cluster_nll, vocab_axis=vocab_axis),
            chunk_size or _tail_chunk_size(clusters[c].table.shape[0], targets.size),
            clusters[c],
            hidden.reshape(-1, hidden.shape[-1]),
            tail_label.reshape(-1),
            is_in_tail.reshape(-1),
            sync_axes,
        )
        nll += tail_nll.reshape(nll.shape)
    return nll


def log_probabilities(
    hidden: jax.Array, clusters: Sequence[Cluster], tails: TailEntries | None
) -> jax.Array:
    """Computes the log probabilities (logprobs) of all tokens: [..., D] -> [..., V].

    The result is in at least float32.
    """
    head = jax.nn.log_softmax(logits(hidden, with_tails(clusters[0], tails)))
    n_head_token = head.shape[-1] - (len(clusters) - 1)
    by_cluster = [head[..., :n_head_token]]
    for c, cluster in enumerate(clusters[1:]):
        entry = head[..., n_head_token + c, None]
        by_cluster.append(entry + jax.nn.log_softmax(logits(hidden, cluster)))
    return jnp.concatenate(by_cluster, axis=-1)


def _cluster_nll(
    cluster: Cluster, hidden: jax.Array, labels: jax.Array, *, vocab_axis: str | None
) -> jax.Array:
    """Computes the losses of one cluster's labels, in nats.

    The shapes are [..., D] and int [...] -> [...]. `vocab_axis` is as in `_nll`.
    """
    if vocab_axis is None:
        return optax.softmax_cross_entropy_with_integer_labels(logits(hidden, cluster), labels)
    log_total, label_logit = _sharded_softmax(
        logits(hidden, cluster), labels, vocab_axis=vocab_axis
    )
    return log_total - label_logit


def _head_nll(
    hidden: jax.Array,
    labels: jax.Array,
    head: Cluster,
    tails: TailEntries | None,
    *,
    n_token: int,
    vocab_axis: str | None,
) -> jax.Array:
    """Computes the losses of the head's labels, in nats: [..., D] and int [...] -> [...].

    Labels below `n_token` are the head's tokens, and those from `n_token` on are the tails.
    """
    # If all entries are on this device, or there are no tails, it is one softmax over the tokens
    # and, after them, the entries of the tails.
    if vocab_axis is None or tails is None:
        return _cluster_nll(with_tails(head, tails), hidden, labels, vocab_axis=vocab_axis)

    # The tokens' logits are sharded. A label of a tail is on no device.
    is_token = labels < n_token
    token_total, token_logit = _sharded_softmax(
        logits(hidden, head), jnp.where(is_token, labels, -1), vocab_axis=vocab_axis
    )

    # The tails' few entries are the same on all devices, and join the sum after it.
    entries = logits(hidden, Cluster(tails.table, tails.bias, head.projection))
    entry_logit = _logit_of_label(entries, jnp.maximum(labels - n_token, 0))
    log_total = jnp.logaddexp(token_total, jax.nn.logsumexp(entries, axis=-1))
    return log_total - jnp.where(is_token, token_logit, entry_logit)


def _sharded_softmax(
    shard: jax.Array, labels: jax.Array, *, vocab_axis: str
) -> tuple[jax.Array, jax.Array]:
    """Computes a softmax over sharded logits.

    This is tensor parallel: each all-reduce over `vocab_axis` carries a few numbers per position,
    never logits.

    Args:
      shard: A device's logits [..., rows]. Device i has the logits of the labels i * rows, ..,
        (i + 1) * rows - 1.
      labels: int [...].
      vocab_axis: The mesh axis of the shards.

    Returns:
      The logsumexp of the logits [...] and the label's logit [...], which is 0 for a label below 0.
      Both are the same on all devices.
    """
    highest = jax.lax.pmax(jax.lax.stop_gradient(shard.max(axis=-1)), vocab_axis)
    total = jax.lax.psum(jnp.exp(shard - highest[..., None]).sum(axis=-1), vocab_axis)

    rows = shard.shape[-1]
    row = labels - _first_row(rows, vocab_axis)
    is_here = (row >= 0) & (row < rows)
    logit = _logit_of_label(shard, jnp.clip(row, 0, rows - 1))
    label_logit = jax.lax.psum(jnp.where(is_here, logit, 0), vocab_axis)
    return highest + jnp.log(total), label_logit


def _logit_of_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns each position's logit of its label: [..., n] and int [...] -> [...]."""
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def _first_row(rows: int, vocab_axis: str | None) -> jax.Array | int:
    """Returns the number in its cluster of the first of a device's rows."""
    return 0 if vocab_axis is None else rows * jax.lax.axis_index(vocab_axis)


def _on_mesh(
    local: Callable[..., jax.Array],
    arrays: tuple[jax.Array, ...],
    clusters: Sequence[Cluster],
    **replicated: Any,
) -> jax.Array:
    """Calls `local(*arrays, clusters=clusters, **replicated)` under `shard_map`.

    Arrays [B, ...] are sharded by rows and clusters by tokens. Everything else is replicated. The
    result is sharded by rows.
    """
    by_row = PartitionSpec(batch_spec(arrays[0].shape[0]) or None)
    by_token = PartitionSpec(axes.vocab_axis())
    cluster_spec: Any = Cluster(table=by_token, bias=by_token, projection=PartitionSpec())

    num_shards = axes.num_vocab_shards()
    padded = [_pad_to_shards(cluster, num_shards) for cluster in clusters]

    def on_device(
        arrays: tuple[jax.Array, ...], clusters: list[Cluster], replicated: dict[str, Any]
    ) -> jax.Array:
        return local(*arrays, clusters=clusters, **replicated)

    mapped = shard_map(
        on_device,
        in_specs=(by_row, [cluster_spec] * len(padded), PartitionSpec()),
        out_specs=by_row,
    )
    return mapped(arrays, padded, replicated)


def _pad_to_shards(cluster: Cluster, num_shards: int) -> Cluster:
    """Returns the cluster, padded to a number of rows that is divisible by `num_shards`.

    The rows added at its end have probability 0.
    """
    n_missing = -cluster.table.shape[0] % num_shards
    if not n_missing:
        return cluster
    table = jnp.pad(cluster.table, ((0, n_missing), (0, 0)))
    bias = cluster.bias
    if bias is not None:
        # Not -inf: differences of infinities are nan.
        bias = jnp.pad(bias, (0, n_missing), constant_values=jnp.finfo(bias.dtype).min / 2)
    return Cluster(table, bias, cluster.projection)


def _tail_chunk_size(rows: int, n_position: int) -> int:
    """Returns the positions per chunk of a tail with so many rows, a power of two."""
    # A chunk's logits are at most 2**25 numbers, 128 MiB in float32, of which the backward pass
    # holds two.
    by_memory = 2**25 // rows
    # A chunk is at most 1/32 of the positions, because the last chunk's empty slots cost as much as
    # full ones. On a CPU, 370 positions of a tail of 20,000 took 0.25 s in chunks of 256, and 1.0 s
    # in one of 2048.
    by_work = n_position // 32
    # But at least 128, or matrix units starve, or an eighth of so few positions that 128 would be
    # most of them: 512 tokens with 86 in three tails of WikiText-103 took 204, 181 and 281 ms on an
    # AMD EPYC (2 cores) in chunks of 16, 64 and 128, and 64 tokens at a time 403 and 347 ms in
    # chunks of 16 and 8.
    at_least = min(n_position // 8, 128)

    n_slot = max(min(by_memory, by_work), at_least, 1)
    return 2 ** (n_slot.bit_length() - 1)


def with_tails(head: Cluster, tails: TailEntries | None) -> Cluster:
    """Returns the head with the tails' entries after its tokens, if there are tails."""
    if tails is None:
        return head
    table = jnp.concatenate([head.table, tails.table])
    bias = jnp.concatenate([head.bias, tails.bias])
    return Cluster(table, bias, head.projection)


def logits(hidden: jax.Array, cluster: Cluster) -> jax.Array:
    """Computes the logits of a cluster: [..., D] -> [..., rows], in at least float32."""
    wide = wide_type(hidden)
    # Projection [d, D] and table [rows, d] are multiplied by their rows, as x W^T.
    if cluster.projection is not None:
        hidden = multiply_by_rows(hidden, cluster.projection, hidden.dtype)
    products = multiply_by_rows(hidden, cluster.table, wide)
    return products + jnp.broadcast_to(cluster.bias.astype(wide), products.shape)
