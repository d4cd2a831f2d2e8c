"""Adaptive input and softmax (Grave et al., 2017; Baevski and Auli, 2019), in token order.

The vocabulary, sorted by frequency, is split at the cutoffs into clusters: a head and tails. The
head's softmax covers the head's tokens and, after them, one entry per tail, first tail first. A
token of tail c has log p = log p_head(c) + log p_c(token). Without cutoffs the head is the whole
vocabulary, which is the full softmax.

On an ambient mesh of multiple devices (`jax.set_mesh`) lookups and `negative_log_likelihood` run
under `shard_map`. Rows of the batch are sharded over the mesh's data axes, and the tokens of each
cluster over its tensor axis. A lookup leaves a table sharded over `fsdp` too.

Letters: B batch, D model dimension, C clusters, V vocabulary size.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from txl_jax.errors import UserError
from txl_jax.ops import blocked_softmax, table_layout
from txl_jax.ops.blocked_softmax import Weights
from txl_jax.ops.chunked_apply import chunked_apply
from txl_jax.ops.matmul import Int8Table, multiply_by_rows, wide_type
from txl_jax.sharding import axes
from txl_jax.sharding.activations import batch_spec, shard_map
from txl_jax.sharding.mesh import ambient_mesh


class Cluster(NamedTuple):
    """The weights of one cluster, the head or a tail of an adaptive softmax or input.

    The logit of a token is (hidden . projection^T) . its row of the table + its bias. Its embedding
    is its row times the projection.
    """

    table: Any  # [rows, width], a row per token. At inference it may be an `Int8Table`.
    bias: Any  # [rows], or None on the input side.
    projection: Any  # [width, D], like `table`, or None if the width is D.


class TailEntries(NamedTuple):
    """The head's entries for the tails of an adaptive softmax, in the head's projected space."""

    table: jax.Array  # [C - 1, width of the head]
    bias: jax.Array  # [C - 1]


def embed(
    tokens: jax.Array, clusters: Sequence[Cluster], cutoffs: Sequence[int], *, dtype: jnp.dtype
) -> jax.Array:
    """Embeds tokens: int [B, ...] -> [B, ..., D] of dtype `dtype`, not yet scaled by sqrt(D).

    Gradients of a token's occurrences are summed in the table's dtype. In bfloat16 a sum of ones
    stops at 256.

    Args:
      tokens: int [B, ...], sorted by frequency: 0 is the most frequent token.
      clusters: The head and the tails, such as a tied softmax's. Biases are not used.
      cutoffs: The first token of each tail. Empty without tails.
      dtype: Dtype of the result.
    """
    total: Any = None
    for start, cluster in zip([0, *cutoffs], clusters, strict=True):
        n_row = cluster.table.shape[0]
        # The row of each token in the cluster's table. Tokens of other clusters look up any row.
        row = tokens - start
        is_in_cluster = ((row >= 0) & (row < n_row))[..., None]
        vectors = _look_up(jnp.clip(row, 0, n_row - 1), cluster.table, dtype=dtype)

        if cluster.projection is not None:
            vectors = vectors @ cluster.projection.astype(dtype)
        # Tokens of other clusters add 0.
        if len(clusters) > 1:
            vectors = jnp.where(is_in_cluster, vectors, 0)
        total = vectors if total is None else total + vectors
    return total


def _look_up(rows: jax.Array, table: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    """Looks up rows of a table, on one device or on the mesh.

    int [B, ...] and [V, width] -> [B, ..., width] of dtype `dtype`. All rows are in the table.

    On a mesh each device looks up, in its own part of the table, the tokens of all devices that
    share the table with it. Then the devices exchange vectors in the compute dtype. The table
    itself is not moved: a table for WikiText-103 is 439 MB, and 9,000 vectors are 7 MB.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return table_layout.take_rows(table, rows, dtype)

    places = axes.table_places(mesh, *table.shape)
    batch_axes = batch_spec(rows.shape[0])
    mapped = shard_map(
        functools.partial(_look_up_in_shards, dtype=dtype, places=places, batch_axes=batch_axes),
        in_specs=(PartitionSpec(batch_axes or None), places.spec()),
        out_specs=PartitionSpec(batch_axes or None),
    )
    return mapped(rows, _pad_rows(table, math.prod(mesh.shape[axis] for axis in places.rows)))


def _look_up_in_shards(
    rows: jax.Array,
    table: jax.Array,
    *,
    dtype: jnp.dtype,
    places: axes.TablePlaces,
    batch_axes: tuple[str, ...],
) -> jax.Array:
    """Computes `_look_up` on one device of the mesh, whose part of the table is `table`."""
    # Devices that share both the table and the rows of the batch.
    shared = [axis for axis in (*places.rows, *places.columns) if axis in batch_axes]
    # It is `fsdp` or none. With two axes, gathers and scatters would have to be in opposite order.
    assert len(shared) <= 1, shared
    for axis in shared:
        rows = jax.lax.all_gather(rows, axis, tiled=True)

    if places.rows:
        n_row = table.shape[0]
        rows = rows - n_row * jax.lax.axis_index(places.rows)
        is_here = ((rows >= 0) & (rows < n_row))[..., None]
        vectors = jnp.take(table, jnp.clip(rows, 0, n_row - 1), axis=0).astype(dtype)
        # Only one device has a token's row: all other summands are 0, so the sums are exact.
        vectors = jnp.where(is_here, vectors, 0)
    else:
        vectors = jnp.take(table, rows, axis=0).astype(dtype)

    for axis in places.rows:
        if axis in shared:
            vectors = jax.lax.psum_scatter(vectors, axis, tiled=True)
        else:
            vectors = jax.lax.psum(vectors, axis)
    for axis in places.columns:
        last = vectors.ndim - 1
        if axis in shared:
            # Each device sends its columns of the others' tokens, and receives the others' columns
            # of its own.
            vectors = jax.lax.all_to_all(vectors, axis, 0, last, tiled=True)
        else:
            vectors = jax.lax.all_gather(vectors, axis, axis=last, tiled=True)
    return vectors


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
      targets: int [B, ...], sorted by frequency: 0 is the most frequent token.
      clusters: The head and the tails.
      tails: The head's entries for the tails, or None without tails or if the head ends with them
        (`with_tails`).
      cutoffs: The first token of each tail. Empty for a full softmax.
      chunk_size: A tail is computed only at the positions whose target it contains, `chunk_size` of
        them at a time on a device, or `_tail_chunk_size` if that is None.

    Returns:
      Losses [B, ...], in at least float32.

    Raises:
      UserError: If the clusters do not have the rows that the cutoffs determine.
    """
    _check_clusters(clusters, tails, cutoffs)
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


def _check_clusters(
    clusters: Sequence[Cluster], tails: TailEntries | None, cutoffs: Sequence[int]
) -> None:
    """Checks that the clusters have the rows that the cutoffs determine.

    Otherwise losses would be plausible, but wrong. The last tail may have any number of rows.

    Raises:
      UserError: If there is not one tail, with one entry, per cutoff, or a cluster has another
        number of rows.
    """
    if len(clusters) != len(cutoffs) + 1:
        raise UserError(
            f"clusters must be the head and one tail per cutoff, {len(cutoffs) + 1} clusters for "
            f"the cutoffs {list(cutoffs)}, got {len(clusters)}"
        )
    if tails is not None and tails.table.shape[0] != len(cutoffs):
        raise UserError(
            f"tails.table must have {len(cutoffs)} rows, one per cutoff, got {tails.table.shape[0]}"
        )
    for c, (start, end) in enumerate(itertools.pairwise([0, *cutoffs])):
        n_row = end - start
        # The head may end with the tails' entries.
        if c == 0 and tails is None:
            n_row += len(cutoffs)
        if clusters[c].table.shape[0] != n_row:
            raise UserError(
                f"clusters[{c}].table must have {n_row} rows for the cutoffs {list(cutoffs)}, got "
                f"{clusters[c].table.shape[0]}. If tails is None, the head ends with their entries"
            )


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

    `vocab_axis` is the mesh axis over which the clusters' tokens are sharded, or None. `sync_axes`
    is as in `chunked_apply`.
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
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    for c in range(1, len(clusters)):
        tail_label = targets - cutoffs[c - 1]
        is_in_tail = cluster_of_target == c
        tail_nll = _tail_nll(
            flat_hidden,
            tail_label.reshape(-1),
            is_in_tail.reshape(-1),
            clusters[c],
            chunk_size=chunk_size,
            vocab_axis=vocab_axis,
            sync_axes=sync_axes,
        )
        nll += tail_nll.reshape(nll.shape)
    return nll


def _tail_nll(
    hidden: jax.Array,
    labels: jax.Array,
    selected: jax.Array,
    tail: Cluster,
    *,
    chunk_size: int | None,
    vocab_axis: str | None,
    sync_axes: tuple[str, ...],
) -> jax.Array:
    """Computes the losses of a tail's labels where `selected`, and 0 elsewhere.

    The shapes are [T, D], int [T] and bool [T] -> [T]. `chunk_size`, `vocab_axis` and `sync_axes`
    are as in `_nll`.
    """
    n_position = len(hidden)

    def plain(tail: Cluster, hidden: jax.Array, labels: jax.Array, selected: jax.Array) -> Any:
        return chunked_apply(
            functools.partial(_cluster_nll, vocab_axis=vocab_axis),
            chunk_size or _tail_chunk_size(tail.table.shape[0], n_position),
            tail,
            hidden,
            labels,
            selected,
            sync_axes,
        )

    def blocked(tail: Cluster, hidden: jax.Array, labels: jax.Array, selected: jax.Array) -> Any:
        return blocked_softmax.selected_negative_log_likelihood(
            chunk_size or _blocked_chunk_size(n_position),
            Weights(tail.table, tail.bias),
            _project(hidden, tail),
            labels,
            selected,
        )

    if not _is_blocked(tail, n_position, vocab_axis):
        return plain(tail, hidden, labels, selected)
    return jax.lax.platform_dependent(tail, hidden, labels, selected, cpu=plain, default=blocked)


def _is_blocked(cluster: Cluster, n_position: int, vocab_axis: str | None) -> bool:
    """Returns whether a cluster's softmax is computed in blocks, except on CPUs.

    It is if the logits of all positions are more than a block. The sharded softmax is not, and
    neither is the softmax of an int8 table, which has no gradients.
    """
    is_float = not isinstance(cluster.table, Int8Table)
    n_logit = n_position * cluster.table.shape[0]
    return vocab_axis is None and is_float and n_logit > blocked_softmax.MAX_BLOCK_LOGITS


def log_probabilities(
    hidden: jax.Array, clusters: Sequence[Cluster], tails: TailEntries | None
) -> jax.Array:
    """Computes the log probabilities (logprobs) of all tokens: [..., D] -> [..., V].

    The result is in at least float32.

    Args:
      hidden: [..., D].
      clusters: The head and the tails.
      tails: The head's entries for the tails, or None without tails or if the head ends with them
        (`with_tails`).
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
        return _whole_head_nll(hidden, labels, with_tails(head, tails), vocab_axis=vocab_axis)

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


def _whole_head_nll(
    hidden: jax.Array, labels: jax.Array, head: Cluster, *, vocab_axis: str | None
) -> jax.Array:
    """Computes the losses of a head that is one softmax: [..., D] and int [...] -> [...]."""

    def plain(head: Cluster, hidden: jax.Array, labels: jax.Array) -> jax.Array:
        return _cluster_nll(head, hidden, labels, vocab_axis=vocab_axis)

    def blocked(head: Cluster, hidden: jax.Array, labels: jax.Array) -> jax.Array:
        states = _project(hidden.reshape(-1, hidden.shape[-1]), head)
        nll = blocked_softmax.negative_log_likelihood(
            Weights(head.table, head.bias), states, labels.reshape(-1)
        )
        return nll.reshape(labels.shape)

    if not _is_blocked(head, labels.size, vocab_axis):
        return plain(head, hidden, labels)
    return jax.lax.platform_dependent(head, hidden, labels, cpu=plain, default=blocked)


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
    # Not -inf: differences of infinities are nan.
    lowest = jnp.finfo(cluster.bias.dtype).min / 2
    bias = jnp.pad(cluster.bias, (0, n_missing), constant_values=lowest)
    return Cluster(_pad_rows(cluster.table, num_shards), bias, cluster.projection)


def _pad_rows(table: jax.Array, num_shards: int) -> jax.Array:
    """Returns the table, with zeros added to a number of rows that is divisible by `num_shards`."""
    n_missing = -table.shape[0] % num_shards
    if not n_missing:
        return table
    return jnp.pad(table, ((0, n_missing), (0, 0)))


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


def _blocked_chunk_size(n_position: int) -> int:
    """Returns the positions per chunk of a tail that is computed in blocks, a power of two.

    A chunk reads the tail's weights three times and its float32 gradients once, and writes the
    gradients. On a v5e 512 positions take as long to multiply (160,000 x 410 weights, 1.4 ms by the
    data sheet) as to read and write all this (1.0 GB, 1.3 ms): fewer would wait for the memory, and
    more would multiply empty slots.
    """
    # 512 of wt103_base's 9,000 positions, of which some 450 are in the tail of 160,000.
    n_slot = max(n_position // 16, min(n_position // 8, 128), 1)
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
    products = multiply_by_rows(_project(hidden, cluster), cluster.table, wide)
    return products + jnp.broadcast_to(cluster.bias.astype(wide), products.shape)


def _project(hidden: jax.Array, cluster: Cluster) -> jax.Array:
    """Projects hidden states into a cluster's space: [..., D] -> [..., width]."""
    if cluster.projection is None:
        return hidden
    # Projection [d, D] and table [rows, d] are multiplied by their rows, as x W^T.
    return multiply_by_rows(hidden, cluster.projection, hidden.dtype)
