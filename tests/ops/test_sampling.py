"""Tests of sampling with lazy tails against the full distribution: which tokens are sampled, how
often, and which tails are computed.
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from support.cases import nightly_but
from txl_jax.ops import adaptive_softmax, sampling
from txl_jax.ops.adaptive_softmax import Cluster

D = 6
V = 13
CUTOFFS = (4, 9)


@functools.cache
def make_clusters(strength=1.0, cutoffs=CUTOFFS, size=V) -> tuple[Cluster, ...]:
    """A head of 4 words and 2 tails, the head joined with their entries. On the host.

    `strength` is the standard deviation of the tables' numbers: large ones make a few words likely.
    """
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    clusters = []
    for start, end in itertools.pairwise([0, *cutoffs, size]):
        table = np.float32(strength) * normal(end - start, D)
        clusters.append(Cluster(table, normal(end - start), None))
    if cutoffs:
        head = clusters[0]
        entries = normal(len(cutoffs), D)
        table = np.concatenate([head.table, entries])
        bias = np.concatenate([head.bias, normal(len(cutoffs))])
        clusters[0] = Cluster(table, bias, None)
    return tuple(clusters)


def hidden_states(rows: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, D)).astype(np.float32)


all_log_p = jax.jit(functools.partial(adaptive_softmax.log_probabilities, tails=None))
top_k_tokens = jax.jit(sampling.top_k_tokens, static_argnums=2)


@hypothesis.given(
    k_and_rows=st.sampled_from([(1, 3), (5, 1), (V, 3)]),
    seed=st.integers(0, 1000),
    strength=st.sampled_from([0.1, 1.0, 4.0]),
    layout=st.sampled_from([(CUTOFFS, V), (CUTOFFS, 98), ((), 98)]),
)
@hypothesis.settings(max_examples=60)
def test_the_likeliest_are_those_of_the_full_distribution(k_and_rows, seed, strength, layout):
    """Among few words, and among many, which are searched in groups.

    k may be more words than a cluster has, and the whole vocabulary.
    """
    k, rows = k_and_rows
    clusters = make_clusters(strength, *layout)
    # Always the same number of rows, for one compiled program.
    full = np.asarray(all_log_p(hidden_states(3, seed), clusters))[:rows]

    log_p, tokens = top_k_tokens(hidden_states(rows, seed), clusters, k)

    largest = -np.sort(-full, axis=1)[:, :k]
    np.testing.assert_allclose(log_p, largest, rtol=0, atol=1e-5)
    of_tokens = np.take_along_axis(full, np.asarray(tokens), axis=1)
    np.testing.assert_allclose(of_tokens, log_p, rtol=0, atol=1e-5)
    for row in tokens.tolist():
        assert len(set(row)) == k, row


def test_of_equal_numbers_the_first_is_the_likeliest():
    """Equal in one group, in two groups, and in the last group, which is shorter.

    The private search gets the numbers as logits, since computed logits are hardly ever equal. 98
    numbers are ten groups of 9, and a last one of 8.
    """
    numbers = np.zeros((3, 98), np.float32)
    numbers[0, [23, 25]] = 1
    numbers[1, [15, 71]] = 1
    numbers[2, [95, 97]] = 1

    @jax.jit
    def likeliest(numbers):
        _, places = sampling._Groups.cut(numbers, 1).top(1)
        return places

    assert likeliest(numbers).ravel().tolist() == [23, 15, 95]


class TailCounter:
    """Records which clusters the compiled sampling functions compute, by their rows."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._computed = []
        logits = adaptive_softmax.logits

        def counted(hidden, cluster):
            rows = cluster.table.shape[0]
            jax.debug.callback(lambda _: self._computed.append(rows), hidden[0, 0])
            return logits(hidden, cluster)

        patch.setattr(adaptive_softmax, "logits", counted)
        self._top_2 = jax.jit(functools.partial(sampling.top_k_tokens, k=2))
        self._sample = jax.jit(
            functools.partial(sampling.sample, temperature=1.0, top_k=None, top_p=1.0)
        )

    def of_the_two_likeliest(self, clusters):
        return self._count(self._top_2, hidden_states(2), clusters)

    def of_samples(self, clusters):
        keys = jax.random.split(jax.random.key(0), 2)
        return self._count(self._sample, keys, hidden_states(2), clusters)

    def _count(self, function, *arguments):
        self._computed.clear()
        jax.block_until_ready(function(*arguments))
        jax.effects_barrier()
        return list(self._computed)


@pytest.fixture(scope="module")
def tail_counter():
    with pytest.MonkeyPatch.context() as patch:
        yield TailCounter(patch)


def clusters_with_entries(first, second):
    """Clusters whose two tails have these entries in the head, and are of 5 and 4 words.

    The head's other logits are near 0, so that the entries decide which cluster is likely.
    """
    head, *tails = make_clusters(0.01)
    return (head._replace(bias=np.asarray([0, 0, 0, 0, first, second], np.float32)), *tails)


HEAD = 6  # Rows of the head: 4 words and the entries of 2 tails.


@pytest.mark.parametrize(
    ("entries", "tails"),
    [
        pytest.param((-20, -20), [], id="no tail is likely"),
        pytest.param((-20, 20), [4], id="the second tail is likely"),
        pytest.param((20, -20), [5], id="the first tail is likely"),
    ],
)
def test_a_tail_is_computed_only_if_its_bound_reaches_the_kth_word(entries, tails, tail_counter):
    clusters = clusters_with_entries(*entries)

    assert tail_counter.of_the_two_likeliest(clusters) == [HEAD, *tails]
    assert tail_counter.of_samples(clusters) == [HEAD, *tails]


def test_both_tails_are_computed_if_both_bounds_reach_the_kth_word(tail_counter):
    """Plain sampling computes only the tail that was sampled, which may be either."""
    assert tail_counter.of_the_two_likeliest(clusters_with_entries(5, 5)) == [HEAD, 5, 4]


def limits(temperature=1.0, top_k=None, top_p=1.0):
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


LIMITS = {
    "plain": limits(),
    "warm": limits(temperature=1.3),
    "cold top-k": limits(temperature=0.7, top_k=7),
    "top-p": limits(top_p=0.6),
    "more than there are": limits(top_k=V + 3),
}
# Without cutoffs the next three keep 2, 3 and 2 words. They would be 4, 2 and 6 if the temperature
# came after top-p, and 4 of the second if top-k left the sum of the probabilities below 1.
LIMITS["cold, top-k, then top-p"] = limits(temperature=0.5, top_k=7, top_p=0.8)
LIMITS["warm, top-k, then top-p"] = limits(temperature=1.3, top_k=4, top_p=0.7)
LIMITS["cold, then top-p"] = limits(temperature=0.5, top_p=0.8)
# The three limits whose order decides. Without cutoffs, all three are in the default tests.
ORDERS = ("cold, top-k, then top-p", "warm, top-k, then top-p", "cold, then top-p")


def expected_probabilities(
    log_p: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray:
    """Probabilities by a loop: divided by the temperature, cut to the k likeliest, then to the
    likeliest that reach p.
    """
    order = np.argsort(-log_p)[:top_k]
    weights = np.exp(log_p[order].astype(np.float64) / temperature)
    weights /= weights.sum()

    reached = 0.0
    kept = np.zeros(V)
    for token, weight in zip(order, weights, strict=True):
        if reached < top_p:
            kept[token] = weight
        reached += weight
    return kept / kept.sum()


@functools.cache
def random_keys(n):
    fold_in = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
    return fold_in(jax.random.key(0), np.arange(n))


QUICK = [
    ("plain", CUTOFFS),
    ("warm", CUTOFFS),
    ("cold top-k", CUTOFFS),
    ("top-p", CUTOFFS),
    ("plain", ()),
    *((name, ()) for name in ORDERS),
]


@pytest.mark.parametrize(
    ("name", "cutoffs"), nightly_but(QUICK, itertools.product(LIMITS, [CUTOFFS, ()]))
)
def test_draws_are_as_frequent_as_under_the_full_softmax(name, cutoffs):
    n = 20_000
    clusters = make_clusters(0.7, cutoffs)
    hidden = hidden_states(1)

    sample = jax.jit(functools.partial(sampling.sample, **LIMITS[name]))
    sampled = np.asarray(sample(random_keys(n), np.broadcast_to(hidden, (n, D)), clusters))

    assert sampled.dtype == np.int32
    frequencies = np.bincount(sampled, minlength=V) / n
    log_p = np.asarray(all_log_p(hidden, clusters)[0])
    expected = expected_probabilities(log_p, **LIMITS[name])
    likely = expected > 0
    assert frequencies[~likely].sum() == 0
    # Pearson's statistic: for 12 degrees of freedom, of 13 words, above 39.1 once in 10,000 seeds.
    deviations = n * (frequencies - expected)[likely] ** 2 / expected[likely]
    assert deviations.sum() < 39.1
