"""Tests of the adaptive input and softmax: against loops over tokens, and against their own log probabilities."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from txl_jax.ops import adaptive

B, L, D, V = 2, 5, 6, 13
# (cutoffs, width of each cluster, which of them have a projection)
CASES = {
    "one cluster": ((), (6,), (False,)),
    "one cluster, projected": ((), (7,), (True,)),
    "div_val 1": ((4, 9), (6, 6, 6), (False, False, False)),
    "div_val 1, projected": ((4, 9), (7, 7, 7), (True, True, True)),
    "div_val 2": ((4, 9), (8, 4, 2), (True, True, True)),
    "div_val 4": ((3, 4), (16, 4, 1), (True, True, True)),
    "mixed projections": ((4, 9), (6, 3, 7), (False, True, True)),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_clusters(case) -> tuple[list[oracles.Cluster], tuple[np.ndarray, np.ndarray] | None]:
    cutoffs, widths, projected = case
    rng, bounds = np.random.default_rng(3), [0, *cutoffs, V]
    clusters = []
    for c, width in enumerate(widths):
        rows = bounds[c + 1] - bounds[c]
        projection = rng.normal(size=(width, D)) if projected[c] else None
        clusters.append(oracles.Cluster(rng.normal(size=(rows, width)), rng.normal(size=rows), projection))
    tails = (rng.normal(size=(len(cutoffs), widths[0])), rng.normal(size=len(cutoffs))) if cutoffs else None
    return clusters, tails


def as_arrays(case):
    clusters, tails = make_clusters(case)
    weights = [adaptive.Cluster(*cluster) for cluster in clusters], tails and adaptive.TailEntries(*tails)
    return jax.tree.map(jnp.asarray, weights)


def make_hidden() -> np.ndarray:
    return np.random.default_rng(4).normal(size=(B, L, D))


def every_token() -> np.ndarray:
    """[2, V]: all tokens, forwards and backwards."""
    return np.stack([np.arange(V), np.arange(V)[::-1]])


@by_case
def test_embedding_matches_a_loop_over_tokens(case, x64):
    clusters, _ = as_arrays(case)
    found = adaptive.embed(jnp.asarray(every_token()), clusters, case[0], dtype=jnp.float64)
    expected = oracles.embed(every_token(), make_clusters(case)[0], case[0], D)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_gradients_of_a_frequent_token_add_up_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    table = jnp.ones((3, 2))
    tokens = jnp.ones((1, 1000), jnp.int32)

    def total(table):
        vectors = adaptive.embed(tokens, [adaptive.Cluster(table, None, None)], (), dtype=jnp.bfloat16)
        assert vectors.dtype == jnp.bfloat16
        return jnp.sum(vectors.astype(jnp.float32))

    np.testing.assert_array_equal(jax.grad(total)(table), [[0, 0], [1000, 1000], [0, 0]])


@by_case
def test_losses_match_a_loop_over_tokens(case, x64):
    hidden = np.random.default_rng(4).normal(size=(2, V, D))
    clusters, tails = make_clusters(case)
    expected = oracles.adaptive_nll(hidden, every_token(), clusters, *(tails or (None, None)), case[0])
    found = adaptive.negative_log_likelihood(hidden, jnp.asarray(every_token()), *as_arrays(case), case[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@by_case
def test_log_probabilities_are_the_losses_and_sum_to_one(case, x64):
    clusters, tails = make_clusters(case)
    log_p = adaptive.log_probabilities(make_hidden(), *as_arrays(case))
    assert log_p.shape == (B, L, V)
    np.testing.assert_allclose(np.exp(log_p).sum(-1), np.ones((B, L)), rtol=1e-12)
    for token in range(V):
        targets = np.full((B, L), token)
        expected = oracles.adaptive_nll(make_hidden(), targets, clusters, *(tails or (None, None)), case[0])
        np.testing.assert_allclose(-log_p[..., token], expected, rtol=0, atol=1e-12)


@functools.cache
def gradients_of(name: str):
    """Gradients of the summed nll, ours and through all log probabilities: (hidden, targets) -> two trees."""
    case = CASES[name]

    def ours(hidden, weights, targets):
        return adaptive.negative_log_likelihood(hidden, targets, *weights, case[0]).sum()

    def dense(hidden, weights, targets):
        log_p = adaptive.log_probabilities(hidden, *weights)
        return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).sum()

    return [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (ours, dense)]


def check_gradients(name: str, targets: np.ndarray) -> None:
    weights = as_arrays(CASES[name])
    (loss, found), (dense_loss, expected) = (f(make_hidden(), weights, targets) for f in gradients_of(name))
    np.testing.assert_allclose(loss, dense_loss, rtol=1e-12)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_dense_log_probabilities(name, x64):
    check_gradients(name, np.random.default_rng(5).integers(V, size=(B, L)))


@hypothesis.given(data=st.data())
@pytest.mark.parametrize("name", ["div_val 2", "mixed projections"])
def test_any_distribution_of_targets(name, data):
    """Among them: no target in a tail, all targets in one tail, each cluster's first and last token."""
    cutoffs = CASES[name][0]
    bounds = [0, *cutoffs, V]
    used = data.draw(st.sets(st.integers(0, len(cutoffs)), min_size=1), label="clusters")
    tokens = [token for c in sorted(used) for token in range(bounds[c], bounds[c + 1])]
    targets = data.draw(st.lists(st.sampled_from(tokens), min_size=B * L, max_size=B * L), label="targets")
    with jax.enable_x64(True):
        check_gradients(name, np.reshape(targets, (B, L)))


def test_losses_of_bfloat16_states_are_float32():
    clusters, tails = jax.tree.map(lambda a: a.astype(jnp.bfloat16), as_arrays(CASES["div_val 2"]))
    targets = jnp.zeros((B, L), jnp.int32)
    nll = adaptive.negative_log_likelihood(jnp.asarray(make_hidden(), jnp.bfloat16), targets, clusters, tails, (4, 9))
    assert nll.dtype == jnp.float32
    assert adaptive.log_probabilities(jnp.asarray(make_hidden(), jnp.bfloat16), clusters, tails).dtype == jnp.float32
