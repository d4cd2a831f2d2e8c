"""Sampling of the next token, without computing tails of an adaptive softmax that cannot matter.

The probability of a tail bounds the probability of each of its words. So the k most likely words,
which are all that greedy and top-k sampling need, need a tail only if its bound reaches the k-th
word found so far, at any temperature. Plain sampling at temperature 1 draws the cluster first and
computes that tail alone. All other cases, such as top-p without top-k, need every probability, and
every tail is computed.
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

    The head ends with the tails' entries (`adaptive_softmax.with_tails`). A temperature of 0 means
    greedy. Top-k samples among the k most likely, top-p (nucleus sampling) among the most likely of
    them that together reach it.
    """
    if temperature == 0:
        return top_k_tokens(hidden, clusters, 1)[1][:, 0]
    if top_k is not None and top_k < _bounds(clusters)[-1]:
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

    Each row has its own limits, `temperature` and `top_p`, [B] each.

    A row gets what `sample` draws with its limits and without top-k, whatever the other rows'
    limits are: greedy rows, plain ones (temperature and top_p 1) and all others are drawn apart,
    each kind only if there is a row of it.
    """
    greedy = temperature == 0
    plain = (temperature == 1) & (top_p == 1)

    def likeliest() -> jax.Array:
        return top_k_tokens(hidden, clusters, 1)[1][:, 0]

    def from_all() -> jax.Array:
        log_p = adaptive_softmax.log_probabilities(hidden, clusters, None)
        divisor = jnp.where(greedy, 1, temperature)[:, None].astype(log_p.dtype)
        return _categorical(keys, mask_top_p(log_p / divisor, top_p))

    drawn = jnp.zeros(hidden.shape[:1], jnp.int32)
    nothing, by_cluster = drawn, functools.partial(_sample_cluster_first, keys, hidden, clusters)
    for rows, draw in ((greedy, likeliest), (plain, by_cluster), (~greedy & ~plain, from_all)):
        drawn = jnp.where(rows, jax.lax.cond(jnp.any(rows), draw, lambda: nothing), drawn)
    return drawn


def top_k_tokens(
    hidden: jax.Array, clusters: Sequence[Cluster], k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the log probabilities of the k most likely tokens, and the tokens.

    The log probabilities are [B, k], the largest first, and the tokens are int32 [B, k]. The tokens
    follow hidden states [B, D].

    k is at most V. The choice among equal probabilities at the border is unspecified. For k = 1 it
    is the lowest id.
    """
    bounds, head = _bounds(clusters), adaptive_softmax.logits(hidden, clusters[0])
    log_p, tokens, entries = _top_log_p(head[:, : bounds[1]], k, head[:, bounds[1] :])
    pad = [(0, 0), (0, k - log_p.shape[1])]  # With tokens of probability 0.
    found = jnp.pad(log_p, pad, constant_values=-jnp.inf), jnp.pad(tokens, pad)
    for c, cluster in enumerate(clusters[1:]):

        def merge(
            found: tuple[jax.Array, jax.Array], c: int = c, cluster: Cluster = cluster
        ) -> tuple[jax.Array, jax.Array]:
            inside, places, _ = _top_log_p(adaptive_softmax.logits(hidden, cluster), k, head[:, :0])
            more = entries[:, c, None] + inside, bounds[c + 1] + places
            log_p, tokens = (
                jnp.concatenate(pair, axis=1) for pair in zip(found, more, strict=True)
            )
            log_p, chosen = jax.lax.top_k(log_p, k)
            return log_p, jnp.take_along_axis(tokens, chosen, axis=1)

        may_matter = jnp.any(entries[:, c] >= found[0][:, -1])
        found = jax.lax.cond(may_matter, merge, lambda found: found, found)
    return found


def mask_top_p(logits: jax.Array, top_p: float | jax.Array) -> jax.Array:
    """Applies the top-p (nucleus) filter: [B, n] -> [B, n].

    All entries become -inf, except the most likely ones that reach `top_p`.

    The most likely always stays, and so do all ties at the border. `top_p` is one number, or an
    array [B].
    """
    if isinstance(top_p, jax.Array):
        # The sum of all may be rounded to 1 before the last.
        top_p = jnp.where(top_p < 1, top_p, jnp.inf)[:, None]
    elif top_p == 1:
        return logits
    sorted_logits = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(sorted_logits, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # The sum of the likelier ones.
    smallest = jnp.min(jnp.where(before < top_p, sorted_logits, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def _sample_cluster_first(
    keys: jax.Array, hidden: jax.Array, clusters: Sequence[Cluster]
) -> jax.Array:
    """Samples from the head, and then inside the tail that was sampled.

    The head's last entries are the tails.
    """
    bounds, head = (
        _bounds(clusters),
        jax.nn.log_softmax(adaptive_softmax.logits(hidden, clusters[0])),
    )
    drawn = _categorical(_fold(keys, 0), head)
    nothing = jnp.zeros_like(drawn)
    for c, cluster in enumerate(clusters[1:]):
        inside = drawn == bounds[1] + c

        def sample_tail(c: int = c, cluster: Cluster = cluster) -> jax.Array:
            return bounds[c + 1] + _categorical(
                _fold(keys, c + 1), adaptive_softmax.logits(hidden, cluster)
            )

        word = jax.lax.cond(jnp.any(inside), sample_tail, lambda: nothing)
        # A word's id may equal the place of an entry: found words are negative until all tails are
        # done.
        drawn = jnp.where(inside, -1 - word, drawn)
    return jnp.where(drawn < 0, -1 - drawn, drawn)


def _bounds(clusters: Sequence[Cluster]) -> list[int]:
    """First token of each cluster, and V."""
    sizes = [cluster.table.shape[0] for cluster in clusters]
    return list(itertools.accumulate([sizes[0] - (len(clusters) - 1), *sizes[1:]], initial=0))


def _top_log_p(
    logits: jax.Array, k: int, others: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the up to k most likely entries of a softmax over `logits` and `others`.

    `logits` is [B, n] and `others` is [B, m]. `others` is not searched.

    Only what is found is normalized. With 16 rows all tables of wt103_base take 36.5 ms so, and
    42.5 with the log probabilities of all tokens, which are 17 MB to write. Matmuls by themselves
    take 33 (2 AMD EPYC cores, jax 0.10.2). Returns their log probabilities (largest first), their
    places, and the log probabilities of `others`.
    """
    groups = _Groups.of(logits, k)
    found, places = groups.top(k)
    most = found[:, :1]
    if others.shape[1]:
        most = jnp.maximum(most, jnp.max(others, axis=1, keepdims=True))
    # One row in groups would be summed a number at a time: 16.7 ms for wt103_base's tables, and
    # 13.9 so.
    total = (
        jnp.sum(jnp.exp(logits - most), axis=1, keepdims=True)
        if len(logits) == 1
        else groups.sum_exp(most)
    )
    total += jnp.sum(jnp.exp(others - most), axis=1, keepdims=True)
    log_total = jnp.log(total)
    return found - most - log_total, places, others - most - log_total


class _Groups(NamedTuple):
    """Logits of B rows in groups of w neighbours, the last of which may be shorter.

    The k largest lie in the k groups whose largest are the largest. XLA's CPU backend sorts the
    whole input of `top_k`:
    20,000 numbers in 6.8 ms, the two short lists of `top` in under 0.5.
    """

    full: jax.Array  # [G, w, B]
    rest: jax.Array  # [r, B], 0 < r <= w.

    @classmethod
    def of(cls, logits: jax.Array, k: int) -> "_Groups":
        """Cuts logits [B, n] into groups. They are not padded, which would copy them."""
        batch, n = logits.shape
        width = max(math.isqrt(n // k), 1)  # Makes the two searches about as long.
        n_full = (n - 1) // width
        columns = logits.T
        return cls(
            columns[: n_full * width].reshape(n_full, width, batch), columns[n_full * width :]
        )

    def top(self, k: int) -> tuple[jax.Array, jax.Array]:
        """Returns the up to k largest, and their places."""
        n_full, width, batch = self.full.shape
        largest = jnp.concatenate(
            [jnp.max(self.full, axis=1), jnp.max(self.rest, axis=0, keepdims=True)]
        )
        # Without the barrier XLA computes the largest of each group again while it sorts them.
        _, chosen = jax.lax.top_k(jax.lax.optimization_barrier(largest).T, min(k, n_full + 1))
        # [k, w, B]
        members = jnp.take_along_axis(self.full, chosen.T[:, None], axis=0, mode="clip")
        missing = [(0, width - self.rest.shape[0]), (0, 0)]
        rest = jnp.pad(self.rest, missing, constant_values=-jnp.inf)[None]
        members = jnp.where((chosen == n_full).T[:, None], rest, members).reshape(-1, batch)
        found, places = jax.lax.top_k(members.T, min(k, len(members)))
        return found, jnp.take_along_axis(chosen, places // width, axis=1) * width + places % width

    def sum_exp(self, most: jax.Array) -> jax.Array:
        """Computes the sum of exp(logit - most): [B, 1]."""
        # Without the barrier both sums would become one, with a thread for each row's whole sum,
        # and XLA uses one.
        full = jax.lax.optimization_barrier(jnp.sum(jnp.exp(self.full - most.T[None]), axis=1))
        return (jnp.sum(full, axis=0) + jnp.sum(jnp.exp(self.rest - most.T), axis=0))[:, None]


def _categorical(keys: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


_fold: Callable[[jax.Array, int], jax.Array] = jax.vmap(jax.random.fold_in, (0, None))
