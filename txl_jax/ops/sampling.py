"""Samples the next token, and skips tails of an adaptive softmax that cannot change the result.

The probability of a tail bounds the probability of each of its tokens. So the k most likely tokens,
which are all that greedy and top-k sampling need, need a tail only if its bound reaches the k-th
token found so far, at any temperature. Plain sampling at temperature 1 samples the cluster first,
and computes only the tail that was sampled. All other cases, such as top-p without top-k, need
every probability, and every tail is computed.

Letters: B rows, D model dimension, V vocabulary size.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops import adaptive_softmax
from txl_jax.ops.adaptive_softmax import Cluster


def sample(
    keys: jax.Array,
    hidden: jax.Array,
    clusters: Sequence[Cluster],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> jax.Array:
    """Samples one token per row: keys [B] and hidden states [B, D] -> int32 [B].

    Args:
      keys: A random key per row.
      hidden: The hidden states.
      clusters: The head, which ends with the tails' entries (`adaptive_softmax.with_tails`), and
        the tails.
      temperature: Divisor of the logits. 0 means greedy.
      top_k: Sample among the k most likely tokens, or among all if None.
      top_p: Sample among the most likely of these tokens that together reach this probability
        (nucleus sampling). 1 disables it.
    """
    if temperature == 0:
        return _most_likely(hidden, clusters)
    vocab_size = _bounds(clusters)[-1]
    if top_k is not None and top_k < vocab_size:
        log_p, tokens = top_k_tokens(hidden, clusters, top_k)
        chosen = _categorical(keys, mask_top_p(log_p / temperature, top_p))
        return jnp.take_along_axis(tokens, chosen[:, None], axis=1)[:, 0]
    if temperature == 1 and top_p == 1:
        return _sample_cluster_first(keys, hidden, clusters)
    log_p = adaptive_softmax.log_probabilities(hidden, clusters, None)
    return _categorical(keys, mask_top_p(log_p / temperature, top_p))


def sample_rows(
    keys: jax.Array,
    hidden: jax.Array,
    clusters: Sequence[Cluster],
    *,
    temperature: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Samples one token per row: keys [B] and hidden states [B, D] -> int32 [B].

    For the server, whose rows belong to different requests. A row gets the token that `sample`
    returns with its `temperature` and `top_p`, [B] each, and without top-k, whatever the other
    rows' are. Greedy rows, plain rows (temperature and top_p 1) and all others are sampled
    separately, each kind only if it has a row.
    """
    is_greedy = temperature == 0
    is_plain = (temperature == 1) & (top_p == 1)
    is_other = ~is_greedy & ~is_plain

    def most_likely() -> jax.Array:
        return _most_likely(hidden, clusters)

    def cluster_first() -> jax.Array:
        return _sample_cluster_first(keys, hidden, clusters)

    def from_all() -> jax.Array:
        log_p = adaptive_softmax.log_probabilities(hidden, clusters, None)
        # What this samples for greedy rows is not used. They must only not be divided by 0.
        divisor = jnp.where(is_greedy, 1, temperature)[:, None].astype(log_p.dtype)
        return _categorical(keys, mask_top_p(log_p / divisor, top_p))

    zeros = jnp.zeros(hidden.shape[:1], jnp.int32)
    tokens = zeros
    kinds = ((is_greedy, most_likely), (is_plain, cluster_first), (is_other, from_all))
    for is_kind, sample_kind in kinds:
        sampled = jax.lax.cond(jnp.any(is_kind), sample_kind, lambda: zeros)
        tokens = jnp.where(is_kind, sampled, tokens)
    return tokens


def _most_likely(hidden: jax.Array, clusters: Sequence[Cluster]) -> jax.Array:
    """Returns the most likely token of each row: [B, D] -> int32 [B]."""
    _, tokens = top_k_tokens(hidden, clusters, 1)
    return tokens[:, 0]


class _Best(NamedTuple):
    """The k most likely tokens in the clusters so far, the most likely first."""

    log_p: jax.Array  # [B, k], -inf where there are fewer than k tokens so far.
    tokens: jax.Array  # int32 [B, k]


def top_k_tokens(
    hidden: jax.Array, clusters: Sequence[Cluster], k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the log probabilities of the k most likely tokens, and the tokens.

    The choice among equal probabilities at the border is unspecified. For k = 1 it is the lowest
    id.

    Args:
      hidden: Hidden states [B, D].
      clusters: As in `sample`.
      k: At most V.

    Returns:
      The log probabilities [B, k], the largest first, and the tokens, int32 [B, k].
    """
    bounds = _bounds(clusters)
    head = adaptive_softmax.logits(hidden, clusters[0])
    n_head_token = bounds[1]
    # The head's k most likely tokens, and all entries of the tails, which are in the same softmax
    # but no tokens.
    log_p, tokens, entries = _top_log_p(head[:, :n_head_token], k, others=head[:, n_head_token:])

    # A head of fewer than k tokens is padded with tokens of probability 0.
    pad = [(0, 0), (0, k - log_p.shape[1])]
    best = _Best(jnp.pad(log_p, pad, constant_values=-jnp.inf), jnp.pad(tokens, pad))

    # A tail is computed only if its probability reaches the k-th token's in some row.
    for c, cluster in enumerate(clusters[1:]):
        add_tail = functools.partial(
            _add_tail,
            hidden=hidden,
            cluster=cluster,
            entry=entries[:, c, None],
            first_token=bounds[c + 1],
        )
        may_matter = jnp.any(entries[:, c] >= best.log_p[:, -1])
        best = jax.lax.cond(may_matter, add_tail, lambda best: best, best)
    return best.log_p, best.tokens


def _add_tail(
    best: _Best, *, hidden: jax.Array, cluster: Cluster, entry: jax.Array, first_token: int
) -> _Best:
    """Returns the k most likely tokens among `best` and a tail's tokens.

    `entry` is the tail's log probability in the head, [B, 1].
    """
    k = best.tokens.shape[1]
    tail = adaptive_softmax.logits(hidden, cluster)
    # Nothing but the tail's tokens is in the tail's softmax.
    tail_log_p, places, _ = _top_log_p(tail, k, others=tail[:, :0])
    log_p = jnp.concatenate([best.log_p, entry + tail_log_p], axis=1)
    tokens = jnp.concatenate([best.tokens, first_token + places], axis=1)

    log_p, chosen = jax.lax.top_k(log_p, k)
    return _Best(log_p, jnp.take_along_axis(tokens, chosen, axis=1))


def mask_top_p(logits: jax.Array, top_p: float | jax.Array) -> jax.Array:
    """Applies the top-p (nucleus) filter: [B, n] -> [B, n].

    All entries become -inf, except the most likely ones that together reach `top_p`. The most
    likely always stays, and so do all ties at the border. `top_p` is one number, or an array [B].
    """
    if isinstance(top_p, jax.Array):
        # 1 keeps all entries: the sum may be rounded to 1 before the last entry.
        top_p = jnp.where(top_p < 1, top_p, jnp.inf)[:, None]
    elif top_p == 1:
        return logits
    sorted_logits = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(sorted_logits, axis=-1)
    # An entry stays if the more likely entries do not reach `top_p` without it.
    more_likely = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept_logits = jnp.where(more_likely < top_p, sorted_logits, jnp.inf)
    smallest = jnp.min(kept_logits, axis=-1, keepdims=True)
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def _sample_cluster_first(
    keys: jax.Array, hidden: jax.Array, clusters: Sequence[Cluster]
) -> jax.Array:
    """Samples from the head, and then inside the tail that was sampled.

    The head's last entries are the tails.
    """
    bounds = _bounds(clusters)
    n_head_token = bounds[1]
    head_log_p = jax.nn.log_softmax(adaptive_softmax.logits(hidden, clusters[0]))
    drawn = _categorical(_fold(keys, 0), head_log_p)
    zeros = jnp.zeros_like(drawn)
    for c, cluster in enumerate(clusters[1:]):
        is_in_tail = drawn == n_head_token + c

        def sample_tail(c: int = c, cluster: Cluster = cluster) -> jax.Array:
            tail_logits = adaptive_softmax.logits(hidden, cluster)
            return bounds[c + 1] + _categorical(_fold(keys, c + 1), tail_logits)

        token = jax.lax.cond(jnp.any(is_in_tail), sample_tail, lambda: zeros)
        # A token's id may equal the place of an entry: tokens of tails are negative until all tails
        # are done.
        drawn = jnp.where(is_in_tail, -1 - token, drawn)
    return jnp.where(drawn < 0, -1 - drawn, drawn)


def _bounds(clusters: Sequence[Cluster]) -> list[int]:
    """Returns the first token of each cluster, and V."""
    sizes = [cluster.table.shape[0] for cluster in clusters]
    # The head's last entries are the tails.
    sizes[0] -= len(clusters) - 1
    return list(itertools.accumulate(sizes, initial=0))


def _top_log_p(
    logits: jax.Array, k: int, *, others: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the k most likely entries of a softmax over `logits` and `others`, or all if fewer.

    Only the k entries are normalized. With 16 rows all tables of wt103_base take 36.5 ms so, and
    42.5 with the log probabilities of all tokens, which are 17 MB to write. Matmuls by themselves
    take 33 (2 AMD EPYC cores, jax 0.10.2).

    Args:
      logits: [B, n], which are searched.
      k: Entries to find.
      others: [B, m], which are not searched.

    Returns:
      The log probabilities (largest first) and the places in `logits` of the entries, at most
      [B, k], and the log probabilities of `others`.
    """
    groups = _Groups.cut(logits, k)
    largest, places = groups.top(k)
    highest = largest[:, :1]
    # An array without entries, such as a tail's `others`, has no maximum.
    if others.shape[1]:
        highest = jnp.maximum(highest, jnp.max(others, axis=1, keepdims=True))

    # A single row in groups would be summed a number at a time: for wt103_base's tables this takes
    # 16.7 ms instead of 13.9.
    if len(logits) == 1:
        total = jnp.sum(jnp.exp(logits - highest), axis=1, keepdims=True)
    else:
        total = groups.sum_exp(highest)
    total += jnp.sum(jnp.exp(others - highest), axis=1, keepdims=True)
    log_total = jnp.log(total)
    return largest - highest - log_total, places, others - highest - log_total


class _Groups(NamedTuple):
    """Logits of B rows in groups of w neighbours, the last of which may be shorter.

    The k largest logits are in the k groups whose largest logits are the largest. XLA's CPU backend
    sorts the whole input of `top_k`: 20,000 numbers in 6.8 ms, but the two short lists of `top` in
    under 0.5.
    """

    full: jax.Array  # [G, w, B], the groups before the last.
    rest: jax.Array  # [r, B], the last group, 0 < r <= w.

    @classmethod
    def cut(cls, logits: jax.Array, k: int) -> "_Groups":
        """Cuts logits [B, n] into groups. They are not padded, which would copy them."""
        batch, n = logits.shape
        # The two searches of `top` are about as long: n / w groups, and k w members of groups.
        width = max(math.isqrt(n // k), 1)
        # With n - 1 the last group has at least one member, also if w divides n.
        n_full = (n - 1) // width
        columns = logits.T
        full = columns[: n_full * width].reshape(n_full, width, batch)
        return cls(full, columns[n_full * width :])

    def top(self, k: int) -> tuple[jax.Array, jax.Array]:
        """Returns the k largest logits of each row, or all if fewer, and their places."""
        n_full, width, batch = self.full.shape
        largest_of_rest = jnp.max(self.rest, axis=0, keepdims=True)
        largest_of_group = jnp.concatenate([jnp.max(self.full, axis=1), largest_of_rest])
        # Without the barrier XLA computes the largest of each group again while it sorts them.
        largest_of_group = jax.lax.optimization_barrier(largest_of_group)
        _, groups = jax.lax.top_k(largest_of_group.T, min(k, n_full + 1))

        # The members of these groups, [k, w, B]. The groups of `full` have the numbers 0 to G - 1,
        # and the last group, `rest`, has the number G. `full` has no row G, so "clip" takes row
        # G - 1 in its place, which the `where` below replaces by `rest`, padded to w members.
        members = jnp.take_along_axis(self.full, groups.T[:, None], axis=0, mode="clip")
        n_missing = width - self.rest.shape[0]
        rest = jnp.pad(self.rest, [(0, n_missing), (0, 0)], constant_values=-jnp.inf)
        is_rest = (groups == n_full).T[:, None]
        members = jnp.where(is_rest, rest[None], members).reshape(-1, batch)

        largest, places = jax.lax.top_k(members.T, min(k, len(members)))
        # Place p is member p % w of the chosen group p // w. A group's logits begin at group * w.
        group = jnp.take_along_axis(groups, places // width, axis=1)
        return largest, group * width + places % width

    def sum_exp(self, highest: jax.Array) -> jax.Array:
        """Computes the sum of exp(logit - highest): [B, 1]."""
        # Without the barrier both sums would become one, with a thread for each row's whole sum,
        # and XLA uses one.
        sums = jnp.sum(jnp.exp(self.full - highest.T[None]), axis=1)
        sums = jax.lax.optimization_barrier(sums)
        sum_of_rest = jnp.sum(jnp.exp(self.rest - highest.T), axis=0)
        return (jnp.sum(sums, axis=0) + sum_of_rest)[:, None]


def _categorical(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Samples an entry per row, with the row's key: [B] and [B, n] -> int32 [B]."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


# (keys [B], number) -> [B], a new key for each row.
_fold: Callable[[jax.Array, int], jax.Array] = jax.vmap(jax.random.fold_in, (0, None))
