"""Applies a function at selected positions only, in chunks of fixed size.

This works under `jit` and with gradients.

The number of selected positions is known only when the program runs, but shapes are fixed before
that. So the selected positions are processed in chunks of `chunk_size`, as many as they fill. No
position is dropped, whatever their number. The work grows with their number, and the memory is
one chunk's. Without selected positions nothing is computed.

A loop with a dynamic number of rounds has no reverse-mode derivative, so this file defines one: it
goes through the chunks again, recomputes each and takes its gradient. Forward mode (`jax.jvp`) is
not supported.

Letters: T positions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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

    Unused slots of the last chunk are zeros. Gradients of the weights are summed over chunks in at
    least float32: a bfloat16 sum of ones stops at 256.

    Args:
      function: Must not close over arrays that need gradients.
      chunk_size: Positions per chunk.
      weights: A tree of arrays.
      states: [T, ...].
      labels: int [T].
      selected: bool [T].
      sync_axes: Inside `jax.shard_map`, mesh axes whose devices must run the same number of rounds,
        as collectives in `function` need. Devices with fewer positions process empty chunks.

    Returns:
      Values [T].
    """
    values, _ = _forward(function, chunk_size, weights, states, labels, selected, sync_axes)
    return values


class _ChunkResiduals(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    weights: Any
    states: jax.Array  # [T, ...]
    labels: jax.Array  # int [T]
    chunks: jax.Array  # int [chunks, chunk_size], positions as `split_into_chunks` returns them.
    n_chunk: jax.Array  # int [], the chunks that are processed, the same on all synced devices.


def _forward(
    function: PositionFunction,
    chunk_size: int,
    weights: Any,
    states: jax.Array,
    labels: jax.Array,
    selected: jax.Array,
    sync_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, _ChunkResiduals]:
    """Computes `chunked_apply`, and returns what the backward pass needs with it."""
    chunks, n_chunk = split_into_chunks(selected, chunk_size)
    if sync_axes:
        n_chunk = jax.lax.pmax(n_chunk, sync_axes)

    def add_chunk(i: jax.Array, values: jax.Array) -> jax.Array:
        positions = chunks[i]
        chunk_values = function(
            weights, take_or_zero(states, positions), take_or_zero(labels, positions)
        )
        return values.at[positions].set(chunk_values, mode="drop")

    result = jax.eval_shape(function, weights, states, labels)
    values = jax.lax.fori_loop(0, n_chunk, add_chunk, jnp.zeros(result.shape, result.dtype))
    return values, _ChunkResiduals(weights, states, labels, chunks, n_chunk)


class _ChunkGradients(NamedTuple):
    """Gradients that one chunk of the backward pass hands to the next."""

    weights: Any  # The sums over the chunks so far, in at least float32.
    states: jax.Array  # [T, ...], zeros at the positions of chunks to come.


def _backward(
    function: PositionFunction,
    chunk_size: int,
    sync_axes: tuple[str, ...],
    residuals: _ChunkResiduals,
    cotangent: jax.Array,
) -> tuple[Any, jax.Array, None, None]:
    """Returns the gradients of weights and states. Labels and selection have none."""
    del chunk_size, sync_axes  # The residuals have the chunks and their synchronised number.
    weights, states, labels, chunks, n_chunk = residuals

    def add_chunk(i: jax.Array, gradients: _ChunkGradients) -> _ChunkGradients:
        positions = chunks[i]
        chunk_labels = take_or_zero(labels, positions)
        _, pull_back = jax.vjp(
            lambda w, s: function(w, s, chunk_labels), weights, take_or_zero(states, positions)
        )
        of_weights, of_states = pull_back(take_or_zero(cotangent, positions))
        return _ChunkGradients(
            jax.tree.map(_add, gradients.weights, of_weights),
            gradients.states.at[positions].set(of_states, mode="drop"),
        )

    start = _ChunkGradients(jax.tree.map(wide_zeros, weights), jnp.zeros_like(states))
    gradients = jax.lax.fori_loop(0, n_chunk, add_chunk, start)
    of_weights = jax.tree.map(
        lambda weight, total: total.astype(weight.dtype), weights, gradients.weights
    )
    return of_weights, gradients.states, None, None


chunked_apply.defvjp(_forward, _backward)


def wide_zeros(weight: jax.Array) -> jax.Array:
    """Returns zeros in the shape of a weight, in at least float32."""
    return jnp.zeros(weight.shape, jnp.promote_types(weight.dtype, jnp.float32))


def _add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """Adds a gradient to a total that may be wider."""
    return total + gradient.astype(total.dtype)


def split_into_chunks(selected: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the selected positions in chunks, and how many chunks they fill.

    The positions are int [chunks, chunk_size], with T in empty slots.
    """
    n_position = selected.shape[0]
    max_chunk = -(-n_position // chunk_size)
    positions = jnp.flatnonzero(selected, size=max_chunk * chunk_size, fill_value=n_position)
    n_chunk = -(-jnp.sum(selected) // chunk_size)
    return positions.reshape(max_chunk, chunk_size), n_chunk


def take_or_zero(array: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rows at some positions, and zeros for T, where writes are dropped."""
    return jnp.take(array, positions, axis=0, mode="fill", fill_value=0)
