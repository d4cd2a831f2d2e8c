"""Cross-entropy over a large vocabulary whose logits are never kept, for accelerators.

A plain softmax writes its logits, which are 0.7 GB in float32 for 9,000 positions and 20,000
tokens, and reads them four times more: for the sum, and for the gradients of the states, the table
and the bias. On an accelerator, memory traffic is what they cost. Here the vocabulary is processed
in blocks of rows, small enough that the logits of a block stay in fast memory on the chip. The
forward pass keeps a running sum of exponentials for each position, and the backward pass computes
the logits again, with one matmul more than the three of a plain softmax.

Forward mode (`jax.jvp`) is not supported.

Letters: T positions, n positions that are processed together, V rows of the table, w its width, v
rows of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.ops.chunked_apply import split_into_chunks, take_or_zero, wide_zeros
from txl_jax.ops.matmul import wide_type

# Most logits of a block, 64 MiB in float32. For wt103_base, libtpu keeps such a block in the vector
# memory of a v5e (128 MiB), so that the logits of the head never pass through HBM.
MAX_BLOCK_LOGITS = 2**24
# A block begins at a multiple of the rows of a TPU's tile.
_ROWS_PER_TILE = 128


class Weights(NamedTuple):
    """The weights of a softmax, and the shape of their gradients."""

    table: jax.Array  # [V, w]
    bias: jax.Array  # [V]


class _Gradients(NamedTuple):
    """The gradients that one block of the backward pass hands to the next."""

    weights: Weights  # May be wider than the weights.
    states: jax.Array  # [n, w], summed over the blocks so far, in at least float32.


class _SoftmaxResiduals(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    weights: Weights
    states: jax.Array  # [T, w]
    labels: jax.Array  # int [T]
    log_total: jax.Array  # [T], the logsumexp of each position's logits.


# All positions


@jax.custom_vjp
def negative_log_likelihood(weights: Weights, states: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes each label's loss in nats: [T, w] and int [T] -> [T], in at least float32."""
    values, _ = _forward(weights, states, labels)
    return values


def _forward(
    weights: Weights, states: jax.Array, labels: jax.Array
) -> tuple[jax.Array, _SoftmaxResiduals]:
    """Computes `negative_log_likelihood`, and returns what the backward pass needs with it."""
    log_total, label_logit = _totals(weights, states, labels)
    return log_total - label_logit, _SoftmaxResiduals(weights, states, labels, log_total)


def _backward(
    residuals: _SoftmaxResiduals, cotangent: jax.Array
) -> tuple[Weights, jax.Array, None]:
    """Returns the gradients of weights and states."""
    # Each row of the table is in one block, so its gradient is complete when it is written, and is
    # written in the table's dtype.
    gradients = _gradients(
        residuals, cotangent, jax.tree.map(jnp.zeros_like, residuals.weights), add=False
    )
    return gradients.weights, gradients.states.astype(residuals.states.dtype), None


negative_log_likelihood.defvjp(_forward, _backward)


# Selected positions


class _ChunkedResiduals(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass, with the chunks of positions."""

    all_positions: _SoftmaxResiduals  # Totals are 0 at the positions that are not selected.
    # int [chunks, n], the selected positions. An empty slot of the last chunk has T, which is none.
    chunks: jax.Array
    n_chunk: jax.Array  # int [], the chunks that are processed.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def selected_negative_log_likelihood(
    chunk_size: int, weights: Weights, states: jax.Array, labels: jax.Array, selected: jax.Array
) -> jax.Array:
    """Computes the labels' losses where `selected` (bool [T]), and 0 elsewhere: -> [T].

    It is a `chunked_apply` of `negative_log_likelihood` whose backward pass does not compute the
    logsumexp again. Gradients of the weights are summed over chunks in at least float32.
    """
    values, _ = _selected_forward(chunk_size, weights, states, labels, selected)
    return values


class _Values(NamedTuple):
    """Results [T] that one chunk of the forward pass hands to the next."""

    nll: jax.Array
    log_total: jax.Array


def _selected_forward(
    chunk_size: int, weights: Weights, states: jax.Array, labels: jax.Array, selected: jax.Array
) -> tuple[jax.Array, _ChunkedResiduals]:
    """Computes the losses of selected positions, and returns what the backward pass needs."""
    chunks, n_chunk = split_into_chunks(selected, chunk_size)

    def add_chunk(i: jax.Array, values: _Values) -> _Values:
        positions = chunks[i]
        chunk_states = take_or_zero(states, positions)
        chunk_labels = take_or_zero(labels, positions)
        log_total, label_logit = _totals(weights, chunk_states, chunk_labels)
        return _Values(
            values.nll.at[positions].set(log_total - label_logit, mode="drop"),
            values.log_total.at[positions].set(log_total, mode="drop"),
        )

    zeros = jnp.zeros(labels.shape, wide_type(states))
    values = jax.lax.fori_loop(0, n_chunk, add_chunk, _Values(zeros, zeros))
    all_positions = _SoftmaxResiduals(weights, states, labels, values.log_total)
    return values.nll, _ChunkedResiduals(all_positions, chunks, n_chunk)


class _GradientsOfChunks(NamedTuple):
    """The gradients that one chunk of the backward pass hands to the next."""

    weights: Weights  # Summed over the chunks so far, in at least float32.
    states: jax.Array  # [T, w], complete for the positions of the chunks so far, and 0 elsewhere.


def _selected_backward(
    chunk_size: int, residuals: _ChunkedResiduals, cotangent: jax.Array
) -> tuple[Weights, jax.Array, None, None]:
    """Returns the gradients of weights and states, and None for labels and selection."""
    del chunk_size  # The residuals have the chunks.
    weights, states, labels, log_total = residuals.all_positions

    def add_chunk(i: jax.Array, gradients: _GradientsOfChunks) -> _GradientsOfChunks:
        positions = residuals.chunks[i]
        # An empty slot has the cotangent 0, and logits that are the biases. With an infinite total
        # its probabilities are 0, as the exponential of a large bias would give inf * 0.
        chunk_total = jnp.take(log_total, positions, mode="fill", fill_value=jnp.inf)
        chunk = _SoftmaxResiduals(
            weights,
            take_or_zero(states, positions),
            take_or_zero(labels, positions),
            chunk_total,
        )
        of_chunk = _gradients(
            chunk, take_or_zero(cotangent, positions), gradients.weights, add=True
        )
        # Each position is in one chunk, so nothing is summed.
        of_states = of_chunk.states.astype(states.dtype)
        return _GradientsOfChunks(
            of_chunk.weights, gradients.states.at[positions].set(of_states, mode="drop")
        )

    start = _GradientsOfChunks(jax.tree.map(wide_zeros, weights), jnp.zeros_like(states))
    gradients = jax.lax.fori_loop(0, residuals.n_chunk, add_chunk, start)
    of_weights = jax.tree.map(
        lambda weight, total: total.astype(weight.dtype), weights, gradients.weights
    )
    return of_weights, gradients.states, None, None


selected_negative_log_likelihood.defvjp(_selected_forward, _selected_backward)


# Blocks


class _Totals(NamedTuple):
    """Sums that one block of the forward pass hands to the next, [n] each."""

    highest: jax.Array  # The largest logit so far.
    total: jax.Array  # The sum of exp(logit - highest).
    label_logit: jax.Array  # The label's logit, or 0 before the label's block.


def _totals(weights: Weights, states: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes each position's logsumexp and its label's logit: [n, w] and int [n] -> [n] each."""

    def add_block(totals: _Totals, block: Weights, start: jax.Array | int) -> _Totals:
        logits = _logits(states, block)
        highest = jnp.maximum(totals.highest, jnp.max(logits, axis=-1))

        # The sum so far is relative to the largest logit of the blocks before.
        before = totals.total * jnp.exp(totals.highest - highest)
        of_block = jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)

        is_label = _is_label(labels - start, logits)
        label_logit = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
        return _Totals(highest, before + of_block, totals.label_logit + label_logit)

    zeros = jnp.zeros(labels.shape, wide_type(states))
    # The least finite number: with -inf, a first block whose logits are all -inf would give nan.
    lowest = jnp.full_like(zeros, jnp.finfo(zeros.dtype).min)
    start = _Totals(highest=lowest, total=zeros, label_logit=zeros)
    totals = _over_blocks(add_block, start, weights, n_position=len(states))
    return totals.highest + jnp.log(totals.total), totals.label_logit


def _gradients(
    residuals: _SoftmaxResiduals, cotangent: jax.Array, of_weights: Weights, *, add: bool
) -> _Gradients:
    """Computes the gradients of n positions.

    Those of the weights are added to `of_weights`, or with `add` false written over it.
    """
    weights, states, labels, log_total = residuals
    wide = wide_type(states)

    def add_block(gradients: _Gradients, block: Weights, start: jax.Array | int) -> _Gradients:
        logits = _logits(states, block)
        probabilities = jnp.exp(logits - log_total[:, None])
        of_logits = (probabilities - _is_label(labels - start, logits)) * cotangent[:, None]

        # Matrix units multiply in the compute dtype, with wide sums. The bias's sum is wide too.
        narrow = of_logits.astype(states.dtype)
        of_states = jnp.einsum("nv,vw->nw", narrow, block.table, preferred_element_type=wide)
        of_table = jnp.einsum("nv,nw->vw", narrow, states, preferred_element_type=wide)
        of_bias = jnp.sum(of_logits, axis=0)

        put = functools.partial(_put, start=start, add=add)
        return _Gradients(
            jax.tree.map(put, gradients.weights, Weights(of_table, of_bias)),
            gradients.states + of_states,
        )

    start = _Gradients(of_weights, jnp.zeros(states.shape, wide))
    return _over_blocks(add_block, start, weights, n_position=len(states))


def _put(whole: jax.Array, rows: jax.Array, *, start: jax.Array | int, add: bool) -> jax.Array:
    """Returns the array with some rows added to its own from `start` on, or written over them."""
    if add:
        rows += jax.lax.dynamic_slice_in_dim(whole, start, len(rows))
    return jax.lax.dynamic_update_slice_in_dim(whole, rows.astype(whole.dtype), start, axis=0)


def _logits(states: jax.Array, block: Weights) -> jax.Array:
    """Computes the logits of a block's rows: [n, w] -> [n, v], in at least float32."""
    wide = wide_type(states)
    products = jnp.einsum("nw,vw->nv", states, block.table, preferred_element_type=wide)
    return products + block.bias.astype(wide)[None, :]


def _is_label(row: jax.Array, logits: jax.Array) -> jax.Array:
    """Says which logit [n, v] is a label's, from the label's row in the block, int [n].

    A row outside of the block has no logit in it.
    """
    return row[:, None] == jnp.arange(logits.shape[-1])[None, :]


def _over_blocks(
    add_block: Callable[[Any, Weights, jax.Array | int], Any],
    carry: Any,
    weights: Weights,
    *,
    n_position: int,
) -> Any:
    """Calls `add_block(carry, block, its first row)` for all blocks, and returns the last carry."""
    rows = len(weights.table)
    by_logits = MAX_BLOCK_LOGITS // n_position // _ROWS_PER_TILE * _ROWS_PER_TILE
    size = min(max(by_logits, _ROWS_PER_TILE), rows)
    n_block = rows // size

    def call_on(carry: Any, start: jax.Array | int, n_row: int) -> Any:
        block = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, start, n_row), weights
        )
        return add_block(carry, block, start)

    carry = jax.lax.fori_loop(0, n_block, lambda i, carry: call_on(carry, i * size, size), carry)

    # The rows that do not fill a block.
    rest = rows - n_block * size
    if rest > 0:
        carry = call_on(carry, n_block * size, rest)
    return carry
