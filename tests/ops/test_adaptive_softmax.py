"""Tests of the adaptive input and softmax: against loops over tokens, and against the softmax's own
log probabilities.

Also tests a function that is computed at selected positions, like a tail, against the function at
all positions.
"""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from support import oracles, tiny, tiny_run
from support.cases import full_but
from support.tiny import enable_x64
from txl_jax.errors import UserError
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.ops.chunked_apply import chunked_apply

B = 2
L = 5
D = 6
V = 13


class Layers(NamedTuple):
    """The clusters of a vocabulary of V tokens."""

    cutoffs: tuple[int, ...]
    widths: tuple[int, ...]  # Columns of each cluster.
    projected: tuple[bool, ...]  # Whether each cluster has a projection.


CASES = {}
CASES["one cluster"] = Layers((), (6,), (False,))
CASES["one cluster, projected"] = Layers((), (7,), (True,))
CASES["div_val 1"] = Layers((4, 9), (6, 6, 6), (False, False, False))
CASES["div_val 1, projected"] = Layers((4, 9), (7, 7, 7), (True, True, True))
CASES["div_val 2"] = Layers((4, 9), (8, 4, 2), (True, True, True))
# The first tail has a single token.
CASES["div_val 4"] = Layers((3, 4), (16, 4, 1), (True, True, True))
# The head is as wide as the hidden states, one tail is narrower, and one is wider.
CASES["mixed projections"] = Layers((4, 9), (6, 3, 7), (False, True, True))


class Weights(NamedTuple):
    """The weights of an adaptive softmax."""

    clusters: list[Cluster]
    tails: TailEntries | None  # None for a single cluster.


def make_weights(layers: Layers) -> Weights:
    """Draws numbers in float64, on the host."""
    rng = np.random.default_rng(3)
    bounds = [0, *layers.cutoffs, V]

    clusters = []
    for c, width in enumerate(layers.widths):
        rows = bounds[c + 1] - bounds[c]
        projection = rng.normal(size=(width, D)) if layers.projected[c] else None
        table = rng.normal(size=(rows, width))
        clusters.append(Cluster(table, rng.normal(size=rows), projection))

    tails = None
    if layers.cutoffs:
        n_tail = len(layers.cutoffs)
        table = rng.normal(size=(n_tail, layers.widths[0]))
        tails = TailEntries(table, rng.normal(size=n_tail))
    return Weights(clusters, tails)


@pytest.mark.parametrize("layers", CASES.values(), ids=CASES)
def test_vectors_losses_and_log_probabilities_match_loops_over_tokens(layers, x64):
    """With three leading axes: any number is supported."""
    clusters, tails = weights = make_weights(layers)
    tail_table = None if tails is None else tails.table
    tail_bias = None if tails is None else tails.bias
    tokens = np.stack([np.arange(V), np.arange(V)[::-1]])[:, None]
    hidden = np.random.default_rng(4).normal(size=(2, 1, V, D))

    @jax.jit
    def compute(weights, hidden, tokens):
        vectors = adaptive_softmax.embed(
            tokens, weights.clusters, layers.cutoffs, dtype=jnp.float64
        )
        nll = adaptive_softmax.negative_log_likelihood(hidden, tokens, *weights, layers.cutoffs)
        return vectors, nll, adaptive_softmax.log_probabilities(hidden, *weights)

    vectors, nll, log_p = jax.device_get(compute(weights, hidden, tokens))

    expected_vectors = oracles.embed(tokens, clusters, layers.cutoffs, D)
    np.testing.assert_allclose(vectors, expected_vectors, rtol=0, atol=1e-13)

    def expected_nll(hidden, targets):
        return oracles.adaptive_nll(
            hidden, targets, clusters, tail_table, tail_bias, layers.cutoffs
        )

    np.testing.assert_allclose(nll, expected_nll(hidden, tokens), rtol=0, atol=1e-12)
    # The oracle loops over positions, so two positions of each row stand for all.
    assert log_p.shape == (2, 1, V, V)
    for token in range(V):
        expected = expected_nll(hidden[:, 0, :2], np.full((2, 2), token))
        np.testing.assert_allclose(
            -log_p[:, 0, :2, token], expected, rtol=0, atol=1e-12, err_msg=f"token {token}"
        )


def test_gradients_of_a_frequent_token_add_up_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    tokens = jnp.asarray(np.ones((1, 1000), np.int32))

    @jax.jit
    @jax.grad
    def gradient(table):
        clusters = [Cluster(table, None, None)]
        vectors = adaptive_softmax.embed(tokens, clusters, (), dtype=jnp.bfloat16)
        assert vectors.dtype == jnp.bfloat16
        return jnp.sum(vectors.astype(jnp.float32))

    np.testing.assert_array_equal(
        gradient(np.ones((3, 2), np.float32)), [[0, 0], [1000, 1000], [0, 0]]
    )


@functools.cache
def chunked_losses(name: str, chunk_size: int | None):
    """Losses and gradients, with this many positions per chunk of a tail."""

    def nll(hidden, weights, targets):
        return adaptive_softmax.negative_log_likelihood(
            hidden, targets, *weights, CASES[name].cutoffs, chunk_size=chunk_size
        )

    return tiny.with_gradients(nll)


@tiny.with_gradients
def losses_by_all_log_probabilities(hidden, weights, targets):
    """The dense oracle: every tail at every position."""
    log_p = adaptive_softmax.log_probabilities(hidden, *weights)
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


@hypothesis.given(data=st.data())
def test_losses_and_gradients_match_a_dense_softmax_for_any_distribution_of_targets(data):
    """The examples include no target in a tail, all targets in one tail, and each cluster's first
    and last token.

    The gradients of other clusters are compared with the original's in tests/test_golden.py.
    """
    name = "mixed projections"
    bounds = [0, *CASES[name].cutoffs, V]
    used = data.draw(st.sets(st.integers(0, len(bounds) - 2), min_size=1), label="clusters")
    tokens = []
    for c in sorted(used):
        tokens.extend(range(bounds[c], bounds[c + 1]))
    targets = data.draw(
        st.lists(st.sampled_from(tokens), min_size=B * L, max_size=B * L), label="targets"
    )
    # Chunks of one position, of some, and of more than there are. The default of the product, None,
    # would always be 1 for so few positions.
    chunk_size = data.draw(st.sampled_from([1, 3, 128]), label="chunk_size")

    with enable_x64(True):
        hidden = np.random.default_rng(4).normal(size=(B, L, D))
        arguments = (hidden, make_weights(CASES[name]), np.reshape(targets, (B, L)))
        results = chunked_losses(name, chunk_size)(*arguments)
        expected = losses_by_all_log_probabilities(*arguments)

        tiny_run.assert_close(results, expected, atol=1e-12)


def losses_under_a_mask(name: str, chunk_size: int | None):
    """Losses and gradients, with 0 as the loss of negative targets, by a mask outside of the
    softmax.
    """

    def nll(hidden, weights, targets):
        tokens = jnp.maximum(targets, 0)
        losses = adaptive_softmax.negative_log_likelihood(
            hidden, tokens, *weights, CASES[name].cutoffs, chunk_size=chunk_size
        )
        return jnp.where(targets < 0, 0, losses)

    return tiny.with_gradients(nll)


# Cases and dtypes with ignored targets: without tails, and with tails in both dtypes.
IGNORED = [
    ("one cluster, projected", "float32"),
    ("mixed projections", "bfloat16"),
    ("div_val 2", "float32"),
]


@pytest.mark.parametrize(("name", "dtype"), full_but(IGNORED[:2], IGNORED))
def test_negative_targets_are_ignored_and_targets_beyond_the_vocabulary_are_nan(name, dtype):
    """Losses and gradients are the same as under a mask.

    -1 and -100 are the usual marks. As an index from the end, -V would be the token 0. -2**31 is
    the smallest int32.
    """
    targets = np.array([[-1, 2, 12, -100, 5], [0, -V, -(2**31), 9, 3]], np.int32)
    is_ignored = targets < 0
    hidden = np.random.default_rng(4).normal(size=(B, L, D)).astype(jnp.dtype(dtype))
    weights = make_weights(CASES[name])
    weights = jax.tree.map(lambda array: array.astype(jnp.dtype(dtype)), weights)

    results = jax.device_get(chunked_losses(name, 3)(hidden, weights, targets))

    expected = losses_under_a_mask(name, 3)(hidden, weights, targets)
    tiny_run.assert_close(results, expected)
    losses, (hidden_gradient, _) = results
    assert (np.equal(losses, 0) == is_ignored).all()
    assert (np.any(hidden_gradient, axis=-1) == ~is_ignored).all()

    # All targets that are not ignored become V or more, which is beyond the vocabulary.
    beyond = np.where(is_ignored, targets, V + targets)
    losses, _ = chunked_losses(name, 3)(hidden, weights, beyond)
    assert (np.isnan(losses) == ~is_ignored).all()
    assert (np.equal(losses, 0) == is_ignored).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_targets_of_8_and_16_bits_have_their_tokens_losses(dtype):
    """A vocabulary of bytes has 256 tokens, a number that 8 bits cannot hold.

    Compared in 8 bits, all targets would be beyond the vocabulary, and their losses nan.
    """
    rng = np.random.default_rng(5)
    hidden = rng.normal(size=(1, 3, D)).astype(np.float32)
    table = rng.normal(size=(256, D)).astype(np.float32)
    # 127 is the largest int8.
    targets = np.array([[0, 97, 127]], dtype)

    @jax.jit
    def losses(hidden, table, targets):
        clusters = [Cluster(table, jnp.zeros(256), None)]
        return adaptive_softmax.negative_log_likelihood(
            hidden, targets, clusters, None, (), chunk_size=None
        )

    log_p = scipy.special.log_softmax(hidden[0] @ table.T, axis=-1)
    expected = [-log_p[0, 0], -log_p[1, 97], -log_p[2, 127]]
    np.testing.assert_allclose(losses(hidden, table, targets)[0], expected, rtol=1e-5)


# A function that is computed at selected positions

# Positions, and columns of a kernel.
T = 11
WIDTH = 3


def squashed(weights, states, labels):
    """A number for each position from its own state and label: [n, D] and int [n] -> [n]."""
    return jnp.tanh(states @ weights["kernel"]).sum(-1) * (1 + labels)


class Arguments(NamedTuple):
    """Arguments of a function that is computed at selected positions."""

    weights: dict[str, np.ndarray]
    states: np.ndarray
    labels: np.ndarray
    selected: np.ndarray


def draw_arguments(n_selected: int, *, seed: int = 0) -> Arguments:
    """Draws arguments, with this many positions selected at random."""
    rng = np.random.default_rng(seed)
    selected = rng.permutation(np.arange(T) < n_selected)
    kernel = rng.normal(size=(D, WIDTH))
    states = rng.normal(size=(T, D))
    labels = rng.integers(7, size=T)
    return Arguments({"kernel": kernel}, states, labels, selected)


def everywhere(weights, states, labels, selected):
    """The oracle of `in_chunks`, which computes every position."""
    return jnp.where(selected, squashed(weights, states, labels), 0)


def in_chunks(chunk_size):
    """The function under test, `chunked_apply`, of the same arguments as `everywhere`."""
    return functools.partial(chunked_apply, squashed, chunk_size)


def test_positions_that_are_not_selected_are_not_read():
    # Four positions in chunks of three: the second chunk has empty slots.
    weights, states, labels, selected = draw_arguments(4)
    states = np.where(selected[:, None], states, np.nan)

    values, gradients = tiny.with_gradients(in_chunks(3))(weights, states, labels, selected)

    weight_gradients, state_gradients = gradients
    assert np.isfinite(values).all()
    assert np.isfinite(weight_gradients["kernel"]).all()
    assert np.array_equal(np.any(state_gradients, axis=1), selected)


@pytest.fixture(scope="module")
def counted_gradient():
    """A compiled gradient in chunks of 3, and a list of the shapes that it has computed."""
    calls = []

    def counted(weights, states, labels):
        jax.debug.callback(lambda _: calls.append(states.shape), states[0, 0])
        return squashed(weights, states, labels)

    def total(*arguments):
        return chunked_apply(counted, 3, *arguments).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1))), calls


@pytest.mark.parametrize(("n_selected", "n_chunk"), [(0, 0), (1, 1), (3, 1), (4, 2), (T, 4)])
def test_the_function_is_computed_for_as_many_chunks_as_are_begun(
    n_selected, n_chunk, counted_gradient
):
    """Forward, and again backward."""
    gradient, calls = counted_gradient
    calls.clear()

    jax.block_until_ready(gradient(*draw_arguments(n_selected)))
    jax.effects_barrier()

    assert calls == [(3, D)] * 2 * n_chunk


def test_gradients_of_bfloat16_weights_add_up_over_chunks_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    n_position = 2000
    weights = jnp.asarray(np.ones(2), jnp.bfloat16)
    states = jnp.asarray(np.ones((n_position, 2)), jnp.bfloat16)
    labels = np.zeros(n_position, np.int32)
    selected = np.ones(n_position, bool)

    def product(weights, states, labels):
        return jnp.einsum("nd,d->n", states, weights, preferred_element_type=jnp.float32)

    def total(weights, states):
        return chunked_apply(product, 3, weights, states, labels, selected).sum()

    weight_gradients, state_gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(weights, states)

    assert weight_gradients.dtype == state_gradients.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight_gradients, np.full(2, n_position, jnp.bfloat16))
    np.testing.assert_array_equal(state_gradients, np.ones((n_position, 2)))


def test_rows_of_a_vmap_may_fill_different_numbers_of_chunks(x64):
    """Values and gradients match the oracle, although the rows share one loop over chunks."""
    weights = draw_arguments(0).weights
    rows = []
    for n_selected in (0, 3, 7, T):
        arguments = draw_arguments(n_selected, seed=n_selected)
        rows.append((arguments.states, arguments.labels, arguments.selected))
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *rows)

    def by_row(function):
        return tiny.with_gradients(jax.vmap(function, in_axes=(None, 0, 0, 0)))

    results = by_row(in_chunks(2))(weights, *stacked)
    expected = by_row(everywhere)(weights, *stacked)

    tiny_run.assert_close(results, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("cutoffs", "words"),
    [
        pytest.param((4,), r"2 clusters.*got 3", id="too few"),
        pytest.param((3, 9), r"clusters\[0\].*3 rows.*got 4", id="another head"),
        pytest.param((4, 8), r"clusters\[1\].*4 rows.*got 5", id="another tail"),
    ],
)
def test_clusters_that_do_not_match_the_cutoffs_are_an_error(cutoffs, words):
    clusters, tails = make_weights(CASES["div_val 2"])
    hidden = np.ones((B, L, D))
    targets = np.zeros((B, L), int)
    with pytest.raises(UserError, match=words):
        adaptive_softmax.negative_log_likelihood(hidden, targets, clusters, tails, cutoffs)


def test_entries_of_tails_that_are_missing_are_an_error():
    clusters, tails = make_weights(CASES["div_val 2"])
    hidden = np.ones((B, L, D))
    targets = np.zeros((B, L), int)
    with pytest.raises(UserError, match=r"clusters\[0\].*6 rows.*got 4"):
        adaptive_softmax.negative_log_likelihood(hidden, targets, clusters, None, (4, 9))
    one = TailEntries(tails.table[:1], tails.bias[:1])
    with pytest.raises(UserError, match=r"tails\.table.*2 rows.*got 1"):
        adaptive_softmax.negative_log_likelihood(hidden, targets, clusters, one, (4, 9))
