"""Tests drawing with lazy tails against the full distribution: what may be drawn, how often, and
what is computed.
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import nightly_but
from txl_jax.ops import adaptive_softmax, sampling

D, V = 6, 13
CUTOFFS = (4, 9)


@functools.cache
def make_clusters(strength=1.0, cutoffs=CUTOFFS, size=V) -> tuple[adaptive_softmax.Cluster, ...]:
    """A head of 4 words and 2 tails, the head joined with their entries."""
    rng, bounds = np.random.default_rng(3), [0, *cutoffs, size]

    def normal(*shape, strength=1.0):
        return jnp.asarray(strength * rng.normal(size=shape), jnp.float32)

    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    clusters = [
        adaptive_softmax.Cluster(normal(n, D, strength=strength), normal(n), None) for n in sizes
    ]
    if cutoffs:
        tails = adaptive_softmax.TailEntries(normal(len(cutoffs), D), normal(len(cutoffs)))
        clusters[0] = adaptive_softmax.with_tails(clusters[0], tails)
    return tuple(clusters)


def hidden_states(rows: int, seed: int = 5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, D)), jnp.float32)


all_log_p = jax.jit(functools.partial(adaptive_softmax.log_probabilities, tails=None))


top_k_tokens = jax.jit(sampling.top_k_tokens, static_argnums=2)


@hypothesis.given(
    k=st.sampled_from([1, 5, V]),
    rows=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
    strength=st.sampled_from([0.1, 1.0, 4.0]),
    layout=st.sampled_from([(CUTOFFS, V), (CUTOFFS, 98), ((), 98)]),
)
@hypothesis.settings(max_examples=60)
def test_the_likeliest_are_those_of_the_full_distribution(k, rows, seed, strength, layout):
    """Of few words and of many, which are searched in groups, and with more asked for than a
    cluster has.
    """
    clusters, hidden = make_clusters(strength, *layout), hidden_states(rows, seed)
    log_p, tokens = top_k_tokens(hidden, clusters, k)
    full = np.asarray(all_log_p(hidden, clusters))
    np.testing.assert_allclose(log_p, -np.sort(-full, axis=1)[:, :k], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(full, np.asarray(tokens), 1), log_p, rtol=0, atol=1e-5
    )
    assert all(len(set(row)) == k for row in tokens.tolist())


def test_of_equal_numbers_the_first_is_the_likeliest():
    """Equal in one group, in two groups, and in the last group, which is shorter."""
    numbers = np.zeros((3, 98), np.float32)
    numbers[0, [23, 25]] = numbers[1, [15, 71]] = numbers[2, [95, 97]] = 1
    places = jax.jit(lambda numbers: sampling._Groups.cut(numbers, 1).top(1)[1])(numbers)
    assert places.ravel().tolist() == [23, 15, 95]


def test_a_tail_is_computed_only_if_its_bound_reaches_the_kth_word(monkeypatch):
    """Entries of the tails at -20, then one of them at +20, then both likely."""
    computed, logits = [], adaptive_softmax.logits

    def counted(hidden, cluster):
        jax.debug.callback(lambda _: computed.append(cluster.table.shape[0]), hidden[0, 0])
        return logits(hidden, cluster)

    monkeypatch.setattr(adaptive_softmax, "logits", counted)
    likeliest = jax.jit(functools.partial(sampling.top_k_tokens, k=2))
    draw = jax.jit(functools.partial(sampling.sample, temperature=1.0, top_k=None, top_p=1.0))
    keys, hidden = jax.random.split(jax.random.key(0), 2), hidden_states(2)
    for entries, tails in (((-20, -20), []), ((-20, 20), [4]), ((20, -20), [5]), ((5, 5), [5, 4])):
        head, *rest = make_clusters(0.01)
        clusters = (head._replace(bias=jnp.asarray([0.0, 0, 0, 0, *entries])), *rest)
        calls = (
            lambda: likeliest(hidden, clusters),  # noqa: B023
            lambda: draw(keys, hidden, clusters),  # noqa: B023
        )
        for call in calls:
            computed.clear()
            jax.block_until_ready(call())
            jax.effects_barrier()
            if entries == (5, 5):
                break  # Plain sampling computes the tail that was drawn, which may be either.
            assert computed == [6, *tails]
        assert computed == [6, *tails]


LIMITS = {
    "plain": {"temperature": 1.0, "top_k": None, "top_p": 1.0},
    "warm": {"temperature": 1.3, "top_k": None, "top_p": 1.0},
    "cold top-k": {"temperature": 0.7, "top_k": 7, "top_p": 1.0},
    "top-p": {"temperature": 1.0, "top_k": None, "top_p": 0.6},
    # Without cutoffs these keep 2, 3 and 2 words. They would be 4, 2 and 6 if the temperature came
    # after top-p, and 4 of the second if top-k left the sum of the probabilities below 1.
    "cold, top-k, then top-p": {"temperature": 0.5, "top_k": 7, "top_p": 0.8},
    "warm, top-k, then top-p": {"temperature": 1.3, "top_k": 4, "top_p": 0.7},
    "cold, then top-p": {"temperature": 0.5, "top_k": None, "top_p": 0.8},
    "more than there are": {"temperature": 1.0, "top_k": V + 3, "top_p": 1.0},
}
ORDERS = tuple(name for name in LIMITS if ", " in name)  # Where the order of the limits decides.


def expected_probabilities(
    log_p: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray:
    """Probabilities by a loop: divided by the temperature, cut to the k likeliest, then to those
    that reach p.
    """
    order = np.argsort(-log_p)[:top_k]
    weights = np.exp(log_p[order].astype(np.float64) / temperature)
    weights /= weights.sum()
    reached, kept = 0.0, np.zeros(V)
    for token, weight in zip(order, weights, strict=True):
        if reached < top_p:
            kept[token] = weight
        reached += weight
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("name", "cutoffs"),
    nightly_but(
        [
            *((name, CUTOFFS) for name in ("plain", "warm", "cold top-k", "top-p")),
            *((name, ()) for name in ("plain", *ORDERS)),
        ],
        itertools.product(LIMITS, [CUTOFFS, ()]),
    ),
)
def test_draws_are_as_frequent_as_under_the_full_softmax(name, cutoffs):
    limits, clusters, n = LIMITS[name], make_clusters(0.7, cutoffs), 20_000
    hidden = hidden_states(1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(n))
    draw = jax.jit(functools.partial(sampling.sample, **limits))
    drawn = np.asarray(draw(keys, jnp.broadcast_to(hidden, (n, D)), clusters))
    assert drawn.dtype == np.int32
    found = np.bincount(drawn, minlength=V) / n
    expected = expected_probabilities(np.asarray(all_log_p(hidden, clusters)[0]), **limits)
    assert found[expected == 0].sum() == 0
    # Pearson's statistic: for 12 degrees of freedom above 39.1 once in 10,000 seeds.
    likely = expected > 0
    assert (n * (found - expected)[likely] ** 2 / expected[likely]).sum() < 39.1
