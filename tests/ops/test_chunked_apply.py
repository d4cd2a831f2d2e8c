"""Tests of a function computed at selected positions against the function at all of them."""

import jax
import jax.numpy as jnp
import numpy as np

from support import tiny, tiny_run
from txl_jax.ops.chunked_apply import chunked_apply

T, D, WIDTH = 11, 5, 3


def squashed(weights, states, labels):
    """Each position's own: [n, D] and int [n] -> [n]."""
    return jnp.tanh(states @ weights["kernel"]).sum(-1) * (1 + labels)


def inputs(n_selected: int, *, seed: int = 0):
    """(weights, states, labels, selected), with this many positions selected at random."""
    rng = np.random.default_rng(seed)
    selected = rng.permutation(np.arange(T) < n_selected)
    kernel, states = rng.normal(size=(D, WIDTH)), rng.normal(size=(T, D))
    return {"kernel": jnp.asarray(kernel)}, jnp.asarray(states), jnp.asarray(rng.integers(7, size=T)), selected


def everywhere(weights, states, labels, selected):
    return jnp.where(selected, squashed(weights, states, labels), 0)


def selectively(chunk_size):
    return lambda *args: chunked_apply(squashed, chunk_size, *args)


def test_positions_that_are_not_selected_are_not_read():
    weights, states, labels, selected = inputs(4)
    states = jnp.where(selected[:, None], states, jnp.nan)
    values, (of_weights, of_states) = tiny.with_gradients(selectively(3))(weights, states, labels, selected)
    assert np.isfinite(values).all() and np.isfinite(of_weights["kernel"]).all()
    assert np.array_equal(np.any(of_states, axis=1), selected)


def test_the_function_is_computed_for_as_many_chunks_as_are_begun():
    """Forward, and again backward."""
    calls = []

    def counted(weights, states, labels):
        jax.debug.callback(lambda _: calls.append(states.shape), states[0, 0])
        return squashed(weights, states, labels)

    gradient = jax.jit(jax.grad(lambda *given: chunked_apply(counted, 3, *given).sum(), argnums=(0, 1)))
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
