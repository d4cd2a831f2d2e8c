"""Tests of the cross-entropy in blocks of the vocabulary, against one plain softmax.

It is platform-neutral code, so it runs on this CPU. That accelerators take it, and CPUs do not, is
read from programs that are lowered for both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import tiny, tiny_run
from txl_jax.ops import adaptive_softmax, blocked_softmax
from txl_jax.ops.adaptive_softmax import Cluster, TailEntries
from txl_jax.ops.blocked_softmax import Weights

T, WIDTH = 7, 5
# Rows that are no whole block, one block, a block and a part, and many blocks.
VOCABULARIES = (1, 100, 128, 300, 1000)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 rows, the smallest."""
    monkeypatch.setattr(blocked_softmax, "MAX_BLOCK_LOGITS", 1)


def drawn(rows: int, *, scale: float = 3.0) -> tuple[Weights, jax.Array, jax.Array]:
    """Weights, states and labels, among them the first and the last row."""
    rng = np.random.default_rng(0)
    labels = rng.integers(rows, size=T)
    labels[:2] = (0, rows - 1)
    table = jnp.asarray(rng.normal(size=(rows, WIDTH)) * scale)
    bias = jnp.asarray(rng.normal(size=rows))
    return Weights(table, bias), jnp.asarray(rng.normal(size=(T, WIDTH))), jnp.asarray(labels)


def plain(weights: Weights, states: jax.Array, labels: jax.Array) -> jax.Array:
    logits = states @ weights.table.T + weights.bias[None, :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.parametrize("rows", VOCABULARIES)
def test_values_and_gradients_of_all_positions(rows, small_blocks, x64):
    args = drawn(rows)
    found = tiny.with_gradients(blocked_softmax.negative_log_likelihood)(*args)
    tiny_run.assert_close(found, tiny.with_gradients(plain)(*args), atol=1e-12)


@pytest.mark.parametrize("n_selected", [0, 1, 3, 4, T])
def test_values_and_gradients_of_selected_positions(n_selected, small_blocks, x64):
    selected = np.random.default_rng(1).permutation(np.arange(T) < n_selected)
    weights, states, labels = drawn(300)

    def expected(weights, states, labels, selected):
        return jnp.where(selected, plain(weights, states, labels), 0)

    in_chunks = functools.partial(blocked_softmax.selected_negative_log_likelihood, 3)
    found = tiny.with_gradients(in_chunks)(weights, states, labels, selected)
    tiny_run.assert_close(
        found, tiny.with_gradients(expected)(weights, states, labels, selected), atol=1e-12
    )


def test_logits_far_apart_and_empty_slots_do_not_overflow(small_blocks):
    """In float32, exp(89) is infinite. An empty slot's logits are the biases."""
    weights, states, labels = drawn(300)
    weights = Weights(weights.table, jnp.linspace(-1000.0, 1000.0, 300))
    selected = jnp.arange(T) < 4
    in_chunks = functools.partial(blocked_softmax.selected_negative_log_likelihood, 3)
    values, gradients = tiny.with_gradients(in_chunks)(weights, states, labels, selected)
    np.testing.assert_allclose(values[:4], plain(weights, states, labels)[:4], rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_first_block_of_tokens_that_cannot_be_is_no_nan(small_blocks):
    """Biases of -inf leave tokens out, as in a plain softmax."""
    weights, states, _ = drawn(300)
    labels = jnp.full(T, 299)
    weights = Weights(weights.table, weights.bias.at[:200].set(-jnp.inf))
    values = blocked_softmax.negative_log_likelihood(weights, states, labels)
    np.testing.assert_allclose(values, plain(weights, states, labels), rtol=1e-5)


def test_in_bfloat16_it_is_as_accurate_as_the_plain_softmax(small_blocks):
    """Both against float64 from the same rounded numbers.

    The largest errors relative to the largest number, of losses, table, bias and states.
    """
    weights, states, labels = drawn(1000, scale=1.0)
    narrow = (
        Weights(weights.table.astype(jnp.bfloat16), weights.bias),
        states.astype(jnp.bfloat16),
        labels,
    )

    def plain_in_bfloat16(weights, states, labels):
        cluster = Cluster(weights.table, weights.bias, None)
        logits = adaptive_softmax.logits(states, cluster)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    with tiny.enable_x64(True):
        wide = jax.tree.map(lambda array: jnp.asarray(array, jnp.float64), narrow[:2])
        exact = jax.tree.map(np.asarray, tiny.with_gradients(plain)(*wide, labels))

    def errors(function):
        results = tiny.with_gradients(function)(*narrow)
        assert results[0].dtype == jnp.float32
        relative = jax.tree.map(
            lambda found, right: np.abs(np.float64(found) - right).max() / np.abs(right).max(),
            results,
            exact,
        )
        return np.array(jax.tree.leaves(relative))

    blocked = errors(blocked_softmax.negative_log_likelihood)
    assert (blocked < [1e-6, 4e-3, 4e-3, 4e-3]).all(), blocked
    assert (blocked < 2 * errors(plain_in_bfloat16) + 1e-6).all(), blocked


# The layers of an adaptive softmax


B, L, D, V = 2, 4, 6, 700
CUTOFFS = (150, 400)


def adaptive(projected: bool) -> tuple[list[Cluster], TailEntries]:
    """A head of 150 tokens, and tails of 250 and 300."""
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    clusters = []
    for rows, width in ((150, D), (250, 4 if projected else D), (300, 2 if projected else D)):
        projection = draw(width, D) if projected else None
        clusters.append(Cluster(draw(rows, width), draw(rows), projection))
    return clusters, TailEntries(draw(2, D), draw(2))


def losses(hidden: jax.Array, weights: tuple, targets: jax.Array) -> jax.Array:
    return adaptive_softmax.negative_log_likelihood(hidden, targets, *weights, CUTOFFS)


def as_on_an_accelerator(*args, cpu, default):
    del cpu
    return default(*args)


@pytest.mark.parametrize("projected", [False, True])
def test_an_adaptive_softmax_in_blocks(projected, small_blocks, monkeypatch, x64):
    """Every cluster, with ignored targets, against the plain softmax of a CPU."""
    rng = np.random.default_rng(3)
    targets = rng.integers(V, size=(B, L))
    targets[0] = (-1, 0, 399, V - 1)
    args = (jnp.asarray(rng.normal(size=(B, L, D))), adaptive(projected), jnp.asarray(targets))
    expected = tiny.with_gradients(losses)(*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_an_accelerator)
    found = tiny.with_gradients(losses)(*args)
    tiny_run.assert_close(found, expected, atol=1e-12)


def test_on_a_cpu_no_bit_changes(monkeypatch):
    """Losses and gradients, where a softmax is large enough for blocks and where it is not."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(B, L, D)), jnp.float32)
    weights = jax.tree.map(lambda array: array.astype(jnp.float32), adaptive(True))
    args = (hidden, weights, jnp.asarray(rng.integers(V, size=(B, L))))
    expected = tiny.with_gradients(losses)(*args)
    monkeypatch.setattr(blocked_softmax, "MAX_BLOCK_LOGITS", 1)
    found = tiny.with_gradients(losses)(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def lowered(platform: str) -> str:
    """The gradient's program for a platform, with the sizes of wt103_base."""
    shapes = {"head": 20_000, "small": 20_000, "large": 160_000}
    clusters = [
        Cluster(
            jax.ShapeDtypeStruct((rows, 410), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            None,
        )
        for rows in shapes.values()
    ]
    tails = TailEntries(
        jax.ShapeDtypeStruct((2, 410), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)
    )

    def loss(hidden, weights, targets):
        nll = adaptive_softmax.negative_log_likelihood(hidden, targets, *weights, (20_000, 40_000))
        return nll.sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
        jax.ShapeDtypeStruct((60, 150, 410), jnp.bfloat16),
        (clusters, tails),
        jax.ShapeDtypeStruct((60, 150), jnp.int32),
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


def matmuls(platform: str) -> str:
    """The matmuls of `lowered`.

    Only these: the gradient of a choice between platforms has zeros in place of what other
    platforms keep. Nothing reads them, and XLA removes them.
    """
    lines = lowered(platform).splitlines()
    return "\n".join(line for line in lines if "dot_general" in line)


def test_logits_of_a_large_vocabulary_are_computed_whole_on_cpus_only():
    of_head = "x20002xf32>"
    assert of_head in matmuls("cpu")
    for platform in ("tpu", "cuda"):
        text = matmuls(platform)
        # Blocks of the head, and of a tail with chunks of 512 positions.
        assert "-> tensor<9000x1792xf32>" in text
        assert "-> tensor<512x32768xf32>" in text
        assert of_head not in text
        assert "x160000xf32>" not in text
