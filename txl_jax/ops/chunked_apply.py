"""Applies a function at selected positions only, in chunks of fixed size.

This works under `jit` and with gradients.

How many positions are selected is known only when the program runs, and shapes are fixed before. So
the selected positions are processed in chunks of `chunk_size`, as many as they fill: no position is
dropped whatever their number, work grows with it, and memory is one chunk's. Without selected
positions nothing is computed.

T positions. A loop with a dynamic number of rounds has no reverse-mode derivative, so a custom one
is given: it goes through the chunks again, recomputes each and takes its gradient. Forward mode
(`jax.jvp`) is not supported.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (weights, states [n, ...], labels int [n]) -> [n], each value from its own state and label.
PositionFunction = Callable[[Any, jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 6))
def chunked_apply(
    function: PositionFunction,
    chunk_size: int,
    weights: Any,
    states: jax.Array,
    labels: jax.Array,
    selected: jax.Array,
    sync_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Computes `function(weights, states, labels)` where `selected`, and 0 elsewhere.

    `states` is [T, ...], `labels` is int [T] and `selected` is bool [T]. The result is [T].

    The function must not close over arrays that need gradients. Unused slots of the last chunk are
    zeros. Gradients of the weights are summed over chunks in at least float32: a bfloat16 sum of
    ones stops at 256. `sync_axes` are, inside `jax.shard_map`, mesh axes whose devices must run the
    same number of rounds, as collectives in `function` need. Devices with fewer positions process
    empty chunks.
    """
    values, _ = _forward(function, chunk_size, weights, states, labels, selected, sync_axes)
    return values


def _forward(
    function: PositionFunction,
    chunk_size: int,
    weights: Any,
    states: jax.Array,
    labels: jax.Array,
    selected: jax.Array,
    sync_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, Any]:
    chunks, n_chunk = _chunks(selected, chunk_size)
    if sync_axes:
        n_chunk = jax.lax.pmax(n_chunk, sync_axes)

    def add_chunk(i: jax.Array, values: jax.Array) -> jax.Array:
        positions = chunks[i]
        found = function(weights, _take(states, positions), _take(labels, positions))
        return values.at[positions].set(found, mode="drop")

    whole = jax.eval_shape(function, weights, states, labels)
    values = jax.lax.fori_loop(0, n_chunk, add_chunk, jnp.zeros(whole.shape, whole.dtype))
    return values, (weights, states, labels, chunks, n_chunk)


def _backward(
    function: PositionFunction,
    chunk_size: int,
    sync_axes: tuple[str, ...],
    residuals: Any,
    cotangent: jax.Array,
) -> tuple[Any, ...]:
    del chunk_size, sync_axes  # The residuals have the chunks and their synchronised number.
    weights, states, labels, chunks, n_chunk = residuals

    def add_chunk(i: jax.Array, gradients: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        of_weights, of_states = gradients
        positions = chunks[i]
        chunk_labels = _take(labels, positions)
        _, pull_back = jax.vjp(
            lambda w, s: function(w, s, chunk_labels), weights, _take(states, positions)
        )
        more, of_chunk = pull_back(_take(cotangent, positions))
        of_weights = jax.tree.map(
            lambda total, new: total + new.astype(total.dtype), of_weights, more
        )
        return of_weights, of_states.at[positions].set(of_chunk, mode="drop")

    def zeros(weight: jax.Array) -> jax.Array:
        return jnp.zeros(weight.shape, jnp.promote_types(weight.dtype, jnp.float32))

    start = jax.tree.map(zeros, weights), jnp.zeros_like(states)
    of_weights, of_states = jax.lax.fori_loop(0, n_chunk, add_chunk, start)
    of_weights = jax.tree.map(lambda weight, total: total.astype(weight.dtype), weights, of_weights)
    return of_weights, of_states, None, None


chunked_apply.defvjp(_forward, _backward)


def _chunks(selected: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the selected positions in chunks, and how many chunks they fill.

    The positions are int [chunks, chunk_size], with T in empty slots.
    """
    n_position = selected.shape[0]
    most = -(-n_position // chunk_size)
    positions = jnp.flatnonzero(selected, size=most * chunk_size, fill_value=n_position)
    return positions.reshape(most, chunk_size), -(-jnp.sum(selected) // chunk_size)


def _take(array: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rows at some positions, and zeros for T, where writes are dropped."""
    return jnp.take(array, positions, axis=0, mode="fill", fill_value=0)
