"""Tests of the adaptive input and softmax: against loops over tokens, and against their own log
probabilities.

And of a function that is computed at selected positions, as a tail is, against the function at all
of them.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles, tiny, tiny_run
from support.cases import full_but
from support.tiny import enable_x64
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.ops.chunked_apply import chunked_apply

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


def make_clusters(case) -> tuple[list[Cluster], TailEntries | None]:
    cutoffs, widths, projected = case
    rng, bounds = np.random.default_rng(3), [0, *cutoffs, V]
    clusters = []
    for c, width in enumerate(widths):
        rows = bounds[c + 1] - bounds[c]
        projection = rng.normal(size=(width, D)) if projected[c] else None
        clusters.append(Cluster(rng.normal(size=(rows, width)), rng.normal(size=rows), projection))
    n_tail = len(cutoffs)
    return clusters, TailEntries(
        rng.normal(size=(n_tail, widths[0])), rng.normal(size=n_tail)
    ) if cutoffs else None


def as_arrays(case):
    return jax.tree.map(jnp.asarray, make_clusters(case))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vectors_losses_and_log_probabilities_match_loops_over_tokens(case, x64):
    (clusters, tails), (arrays, entries) = make_clusters(case), as_arrays(case)
    # Any number of leading axes will do.
    tokens = np.stack([np.arange(V), np.arange(V)[::-1]])[:, None]
    hidden, tail_arrays = np.random.default_rng(4).normal(size=(2, 1, V, D)), tails or (None, None)

    @jax.jit
    def compute(hidden, tokens):
        nll = adaptive_softmax.negative_log_likelihood(hidden, tokens, arrays, entries, case[0])
        vectors = adaptive_softmax.embed(tokens, arrays, case[0], dtype=jnp.float64)
        return vectors, nll, adaptive_softmax.log_probabilities(hidden, arrays, entries)

    vectors, nll, log_p = compute(hidden, tokens)
    np.testing.assert_allclose(
        vectors, oracles.embed(tokens, clusters, case[0], D), rtol=0, atol=1e-13
    )
    expected = oracles.adaptive_nll(hidden, tokens, clusters, *tail_arrays, case[0])
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-12)
    assert log_p.shape == (2, 1, V, V)
    for token in range(V):
        expected = oracles.adaptive_nll(
            hidden[:, 0, :2], np.full((2, 2), token), clusters, *tail_arrays, case[0]
        )
        np.testing.assert_allclose(-log_p[:, 0, :2, token], expected, rtol=0, atol=1e-12)


def test_gradients_of_a_frequent_token_add_up_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    table = jnp.ones((3, 2))
    tokens = jnp.ones((1, 1000), jnp.int32)

    def total(table):
        vectors = adaptive_softmax.embed(
            tokens, [Cluster(table, None, None)], (), dtype=jnp.bfloat16
        )
        assert vectors.dtype == jnp.bfloat16
        return jnp.sum(vectors.astype(jnp.float32))

    np.testing.assert_array_equal(jax.grad(total)(table), [[0, 0], [1000, 1000], [0, 0]])


@functools.cache
def walking_tails(name: str, chunk_size: int | None):
    """Ours, with this many positions per chunk of a tail."""
    nll = functools.partial(adaptive_softmax.negative_log_likelihood, chunk_size=chunk_size)
    return tiny.with_gradients(
        lambda hidden, weights, targets: nll(hidden, targets, *weights, CASES[name][0])
    )


@tiny.with_gradients
def through_all_log_probabilities(hidden, weights, targets):
    """The dense oracle: every tail at every position."""
    log_p = adaptive_softmax.log_probabilities(hidden, *weights)
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


@hypothesis.given(data=st.data())
def test_any_distribution_of_targets(data):
    """Losses and gradients.

    Among them: no target in a tail, all in one tail, each cluster's first and last token.

    The gradients of other clusters are compared with the original's in tests/test_golden.py.
    """
    name = "mixed projections"
    bounds = [0, *CASES[name][0], V]
    used = data.draw(st.sets(st.integers(0, len(bounds) - 2), min_size=1), label="clusters")
    tokens = [token for c in sorted(used) for token in range(bounds[c], bounds[c + 1])]
    targets = data.draw(
        st.lists(st.sampled_from(tokens), min_size=B * L, max_size=B * L), label="targets"
    )
    chunk_size = data.draw(st.sampled_from([None, 1, 3, 128]), label="chunk_size")
    with enable_x64(True):
        args = (
            np.random.default_rng(4).normal(size=(B, L, D)),
            as_arrays(CASES[name]),
            np.reshape(targets, (B, L)),
        )
        found, expected = (
            walking_tails(name, chunk_size)(*args),
            through_all_log_probabilities(*args),
        )
        tiny_run.assert_close(found, expected, atol=1e-12)


def masked(name: str, chunk_size: int | None):
    """The losses of targets, with 0 instead of those that are negative, by a mask outside of the
    softmax.
    """

    def nll(hidden, weights, targets):
        tokens = jnp.maximum(targets, 0)
        losses = adaptive_softmax.negative_log_likelihood(
            hidden, tokens, *weights, CASES[name][0], chunk_size=chunk_size
        )
        return jnp.where(targets < 0, 0, losses)

    return tiny.with_gradients(nll)


IGNORED = [
    ("one cluster, projected", "float32"),
    ("mixed projections", "bfloat16"),
    ("div_val 2", "float32"),
]


@pytest.mark.parametrize(("name", "dtype"), full_but(IGNORED[:2], IGNORED))
def test_negative_targets_are_ignored_and_targets_beyond_the_vocabulary_are_nan(name, dtype):
    """Losses and gradients are those under a mask.

    -1 and -100 are the usual marks; -V counted from the end is 0.
    """
    targets = np.array([[-1, 2, 12, -100, 5], [0, -V, -(2**31), 9, 3]], np.int32)
    hidden = np.random.default_rng(4).normal(size=(B, L, D))
    args = jax.tree.map(lambda array: jnp.asarray(array, dtype), (hidden, as_arrays(CASES[name])))
    found = walking_tails(name, 3)(*args, targets)
    tiny_run.assert_close(found, masked(name, 3)(*args, targets))
    losses, (of_hidden, _) = found
    assert (np.equal(losses, 0) == (targets < 0)).all()
    assert (np.any(of_hidden, axis=-1) == (targets >= 0)).all()

    beyond = np.where(targets < 0, targets, V + targets)
    losses, _ = walking_tails(name, 3)(*args, beyond)
    assert (np.isnan(losses) == (targets >= 0)).all()
    assert (np.equal(losses, 0) == (targets < 0)).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_targets_of_few_bits(dtype):
    """A vocabulary of bytes has 256 tokens, a number that 8 bits cannot hold."""
    rng = np.random.default_rng(5)
    hidden = jnp.asarray(rng.normal(size=(1, 3, D)))
    clusters = [
        adaptive_softmax.Cluster(jnp.asarray(rng.normal(size=(256, D))), jnp.zeros(256), None)
    ]
    targets = np.array([[0, 97, 127]], dtype)
    losses = adaptive_softmax.negative_log_likelihood(
        hidden, targets, clusters, None, (), chunk_size=None
    )
    expected = -jax.nn.log_softmax(hidden @ clusters[0].table.T)
    np.testing.assert_allclose(
        losses[0], [expected[0, i, int(targets[0, i])] for i in range(3)], rtol=1e-5
    )


T, WIDTH = 11, 3  # Positions, and columns of a kernel.


def squashed(weights, states, labels):
    """Each position's own: [n, D] and int [n] -> [n]."""
    return jnp.tanh(states @ weights["kernel"]).sum(-1) * (1 + labels)


def inputs(n_selected: int, *, seed: int = 0):
    """(weights, states, labels, selected), with this many positions selected at random."""
    rng = np.random.default_rng(seed)
    selected = rng.permutation(np.arange(T) < n_selected)
    kernel, states = rng.normal(size=(D, WIDTH)), rng.normal(size=(T, D))
    return (
        {"kernel": jnp.asarray(kernel)},
        jnp.asarray(states),
        jnp.asarray(rng.integers(7, size=T)),
        selected,
    )


def everywhere(weights, states, labels, selected):
    return jnp.where(selected, squashed(weights, states, labels), 0)


def selectively(chunk_size):
    return lambda *args: chunked_apply(squashed, chunk_size, *args)


def test_positions_that_are_not_selected_are_not_read():
    weights, states, labels, selected = inputs(4)
    states = jnp.where(selected[:, None], states, jnp.nan)
    values, (of_weights, of_states) = tiny.with_gradients(selectively(3))(
        weights, states, labels, selected
    )
    assert np.isfinite(values).all() and np.isfinite(of_weights["kernel"]).all()
    assert np.array_equal(np.any(of_states, axis=1), selected)


def test_the_function_is_computed_for_as_many_chunks_as_are_begun():
    """Forward, and again backward."""
    calls = []

    def counted(weights, states, labels):
        jax.debug.callback(lambda _: calls.append(states.shape), states[0, 0])
        return squashed(weights, states, labels)

    gradient = jax.jit(
        jax.grad(lambda *given: chunked_apply(counted, 3, *given).sum(), argnums=(0, 1))
    )
    for n_selected in (0, 1, 3, 4, T):
        calls.clear()
        jax.block_until_ready(gradient(*inputs(n_selected)))
        jax.effects_barrier()
        assert calls == [(3, D)] * 2 * -(-n_selected // 3)


def test_gradients_of_bfloat16_weights_add_up_over_chunks_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    n_position = 2000
    weights = jnp.ones((2,), jnp.bfloat16)
    states = jnp.ones((n_position, 2), jnp.bfloat16)
    labels, selected = jnp.zeros(n_position, jnp.int32), jnp.ones(n_position, bool)

    def product(weights, states, labels):
        return jnp.einsum("nd,d->n", states, weights, preferred_element_type=jnp.float32)

    def total(weights, states):
        return chunked_apply(product, 3, weights, states, labels, selected).sum()

    of_weights, of_states = jax.jit(jax.grad(total, argnums=(0, 1)))(weights, states)
    assert of_weights.dtype == of_states.dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_weights, jnp.full((2,), n_position, jnp.bfloat16))
    np.testing.assert_array_equal(of_states, np.ones((n_position, 2)))


def test_rows_of_a_vmap_have_as_many_chunks_as_each_needs(x64):
    weights, *_ = inputs(0)
    rows = [inputs(n, seed=n)[1:] for n in (0, 3, 7, T)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    by_row = [jax.vmap(f, in_axes=(None, 0, 0, 0)) for f in (selectively(2), everywhere)]
    tiny_run.assert_close(*(tiny.with_gradients(f)(weights, *stacked) for f in by_row), atol=1e-12)
