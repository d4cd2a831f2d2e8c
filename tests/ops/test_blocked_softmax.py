"""Tests of the cross-entropy in blocks of the vocabulary, against one plain softmax.

The blocks are platform-neutral code, so they run on this CPU too. That the adaptive softmax takes
them on accelerators only is read from programs that are lowered for each platform.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from support import tiny, tiny_run
from txl_jax.ops import adaptive_softmax, blocked_softmax
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.ops.blocked_softmax import Weights

# Positions, and columns of a table.
T = 7
WIDTH = 5
# Positions per chunk, where only some are selected.
CHUNK_SIZE = 3


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 rows, the smallest: no block has as few logits as this maximum."""
    monkeypatch.setattr(blocked_softmax, "MAX_BLOCK_LOGITS", 1)


# Losses and gradients. Compiled programs keep the size of their blocks, so only tests with
# `small_blocks` may call these.
blocked = tiny.with_gradients(blocked_softmax.negative_log_likelihood)
selected_and_blocked = tiny.with_gradients(
    functools.partial(blocked_softmax.selected_negative_log_likelihood, CHUNK_SIZE)
)


class Call(NamedTuple):
    """Arguments of a softmax, on the host."""

    weights: Weights
    states: np.ndarray
    labels: np.ndarray


def draw(rows: int, *, scale: float = 3.0, dtype=np.float64) -> Call:
    """Draws arguments. The labels include the first and the last row.

    `scale` is the standard deviation of the table, and thereby spreads the logits.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(rows, size=T)
    labels[:2] = (0, rows - 1)
    table = rng.normal(size=(rows, WIDTH)) * scale
    bias = rng.normal(size=rows)
    states = rng.normal(size=(T, WIDTH))
    return Call(Weights(table.astype(dtype), bias.astype(dtype)), states.astype(dtype), labels)


def plain(
    weights: Weights, states: np.ndarray, labels: np.ndarray, selected=None, dtype=np.float64
):
    """Losses and gradients of one plain softmax, as of `tiny.with_gradients`.

    Positions that are not selected have the loss 0.
    """
    table = np.asarray(weights.table, dtype)
    bias = np.asarray(weights.bias, dtype)
    states = np.asarray(states, dtype)
    if selected is None:
        selected = np.ones(len(labels), bool)
    position = np.arange(len(labels))

    log_p = scipy.special.log_softmax(states @ table.T + bias, axis=-1)
    losses = np.where(selected, -log_p[position, labels], 0)

    # The gradient of a loss by the logits is the probabilities, minus 1 at the label. In the sum
    # of `tiny.with_gradients` the losses have the weights 1, 2, ..
    logit_gradients = np.exp(log_p)
    logit_gradients[position, labels] -= 1
    logit_gradients *= np.where(selected, position + 1, 0)[:, None]
    weight_gradients = Weights(logit_gradients.T @ states, logit_gradients.sum(axis=0))
    return losses, (weight_gradients, logit_gradients @ table)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(1, id="one row"),
        pytest.param(100, id="less than a block"),
        pytest.param(128, id="one block"),
        pytest.param(300, id="blocks and a part"),
        pytest.param(1000, id="many blocks"),
    ],
)
def test_values_and_gradients_of_all_positions(rows, small_blocks, x64):
    call = draw(rows)

    tiny_run.assert_close(blocked(*call), plain(*call), atol=1e-12)


@pytest.mark.parametrize(
    "n_selected",
    [
        pytest.param(0, id="none"),
        pytest.param(1, id="a part of a chunk"),
        pytest.param(CHUNK_SIZE, id="one chunk"),
        pytest.param(CHUNK_SIZE + 1, id="one more than a chunk"),
        pytest.param(T, id="all"),
    ],
)
def test_values_and_gradients_of_selected_positions(n_selected, small_blocks, x64):
    selected = np.random.default_rng(1).permutation(np.arange(T) < n_selected)
    call = draw(300)

    results = selected_and_blocked(*call, selected)

    tiny_run.assert_close(results, plain(*call, selected), atol=1e-12)


def test_logits_far_apart_and_empty_slots_do_not_overflow(small_blocks):
    """In float32, exp(89) is infinite. An empty slot's logits are the biases, up to 1000."""
    weights, states, labels = draw(300, dtype=np.float32)
    weights = Weights(weights.table, np.linspace(-1000, 1000, 300, dtype=np.float32))
    # The last chunk has two empty slots.
    n_selected = CHUNK_SIZE + 1
    selected = np.arange(T) < n_selected

    losses, gradients = selected_and_blocked(weights, states, labels, selected)

    expected_losses, _ = plain(weights, states, labels, dtype=np.float32)
    np.testing.assert_allclose(losses[:n_selected], expected_losses[:n_selected], rtol=1e-5)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), jax.tree_util.keystr(path)


def test_a_first_block_of_excluded_tokens_gives_no_nan(small_blocks):
    """Biases of -inf exclude tokens, as in a plain softmax. The first block has 128 of the 200."""
    weights, states, _ = draw(300, dtype=np.float32)
    weights.bias[:200] = -np.inf
    labels = np.full(T, 299)

    losses, _ = blocked(weights, states, labels)

    expected_losses, _ = plain(weights, states, labels, dtype=np.float32)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_in_bfloat16_it_is_as_accurate_as_the_plain_softmax(small_blocks):
    """Both are compared with float64, from the same rounded numbers."""
    weights, states, labels = draw(1000, scale=1.0, dtype=np.float32)
    narrow = Call(
        Weights(jnp.asarray(weights.table, jnp.bfloat16), weights.bias),
        jnp.asarray(states, jnp.bfloat16),
        labels,
    )
    exact = plain(*narrow)

    def plain_in_bfloat16(weights, states, labels):
        cluster = Cluster(weights.table, weights.bias, None)
        logits = adaptive_softmax.logits(states, cluster)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def relative_errors(results):
        """The largest error of losses, table, bias and states, relative to the largest number."""
        losses, _ = results
        assert losses.dtype == jnp.float32
        errors = []
        for array, expected in zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True):
            errors.append(np.abs(np.float64(array) - expected).max() / np.abs(expected).max())
        return np.array(errors)

    errors = relative_errors(blocked(*narrow))
    plain_errors = relative_errors(tiny.with_gradients(plain_in_bfloat16)(*narrow))

    # Losses are sums in float32. Gradients come from factors in bfloat16, which has 8 bits (2**-8).
    assert (errors < [1e-6, 4e-3, 4e-3, 4e-3]).all(), errors
    assert (errors < 2 * plain_errors + 1e-6).all(), (errors, plain_errors)


# The layers of an adaptive softmax


B = 2
L = 4
D = 6
V = 700
CUTOFFS = (150, 400)


def adaptive(projected: bool, n_tail: int = 2) -> tuple[list[Cluster], TailEntries]:
    """A head of 150 tokens, and tails of 250 and 300, or the first tail only. On the host."""
    rng = np.random.default_rng(2)
    tail_widths = (4, 2) if projected else (D, D)

    clusters = []
    for rows, width in ((150, D), (250, tail_widths[0]), (300, tail_widths[1])):
        projection = rng.normal(size=(width, D)) if projected else None
        table = rng.normal(size=(rows, width))
        clusters.append(Cluster(table, rng.normal(size=rows), projection))
    table = rng.normal(size=(n_tail, D))
    return clusters[: 1 + n_tail], TailEntries(table, rng.normal(size=n_tail))


def losses(hidden: jax.Array, weights: tuple, targets: jax.Array) -> jax.Array:
    clusters, tails = weights
    cutoffs = CUTOFFS[: len(clusters) - 1]
    return adaptive_softmax.negative_log_likelihood(hidden, targets, clusters, tails, cutoffs)


@tiny.with_gradients
def losses_by_all_log_probabilities(hidden, weights, targets):
    """The dense oracle: every tail at every position. Negative targets have the loss 0."""
    log_p = adaptive_softmax.log_probabilities(hidden, *weights)
    tokens = jnp.maximum(targets, 0)[..., None]
    return jnp.where(targets < 0, 0, -jnp.take_along_axis(log_p, tokens, axis=-1)[..., 0])


def as_on_an_accelerator(*args, cpu, default):
    """Takes the branch for accelerators of `jax.lax.platform_dependent`."""
    del cpu
    return default(*args)


@pytest.mark.parametrize("projected", [False, True], ids=["not projected", "projected"])
def test_an_adaptive_softmax_in_blocks(projected, small_blocks, monkeypatch, x64):
    """Every cluster, with ignored targets, against whole log probabilities."""
    rng = np.random.default_rng(3)
    targets = rng.integers(V, size=(B, L))
    # Ignored, the head's first token, the first tail's last token, and the last token of all.
    targets[0] = (-1, 0, CUTOFFS[1] - 1, V - 1)
    arguments = (rng.normal(size=(B, L, D)), adaptive(projected), targets)
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_an_accelerator)

    results = tiny.with_gradients(losses)(*arguments)

    expected = losses_by_all_log_probabilities(*arguments)
    tiny_run.assert_close(results, expected, atol=1e-12)


def test_on_a_cpu_no_bit_changes(monkeypatch):
    """Losses and gradients, where a softmax is large enough for blocks and where it is not."""
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(B, L, D)).astype(np.float32)
    weights = jax.tree.map(np.float32, adaptive(True, n_tail=1))
    arguments = (hidden, weights, rng.integers(CUTOFFS[1], size=(B, L)))

    too_small = tiny.with_gradients(losses)(*arguments)
    monkeypatch.setattr(blocked_softmax, "MAX_BLOCK_LOGITS", 1)
    large_enough = tiny.with_gradients(losses)(*arguments)

    tiny_run.assert_equal(large_enough, too_small)


@functools.cache
def traced():
    """The traced gradient, with the sizes of wt103_base, but without its last tail."""
    shape = jax.ShapeDtypeStruct
    clusters = []
    for rows in (20_000, 20_000, 160_000):
        table = shape((rows, 410), jnp.bfloat16)
        clusters.append(Cluster(table, shape((rows,), jnp.float32), None))
    tails = TailEntries(shape((2, 410), jnp.bfloat16), shape((2,), jnp.float32))

    def loss(hidden, weights, targets):
        nll = adaptive_softmax.negative_log_likelihood(hidden, targets, *weights, (20_000, 40_000))
        return nll.sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
        shape((60, 150, 410), jnp.bfloat16), (clusters, tails), shape((60, 150), jnp.int32)
    )


def matmuls(platform: str) -> str:
    """The matmuls of `traced`, lowered for a platform.

    Only matmuls: the gradient of a choice between platforms has zeros in place of what other
    platforms keep. Nothing reads them, and XLA removes them.
    """
    text = traced().lower(lowering_platforms=(platform,)).as_text()
    return "\n".join(line for line in text.splitlines() if "dot_general" in line)


# The logits of the whole head: 20,000 tokens and the entries of two tails.
WHOLE_HEAD = "x20002xf32>"


def test_logits_of_a_large_vocabulary_are_computed_whole_on_a_cpu():
    assert WHOLE_HEAD in matmuls("cpu")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_logits_of_a_large_vocabulary_are_computed_in_blocks_on_accelerators(platform):
    text = matmuls(platform)

    # Blocks of the head at all 60 x 150 positions, and of the last tail in chunks of 512 positions.
    # Their columns are the most multiples of 128 within 2**24 logits.
    assert "-> tensor<9000x1792xf32>" in text
    assert "-> tensor<512x32768xf32>" in text
    assert WHOLE_HEAD not in text
    assert "x160000xf32>" not in text
