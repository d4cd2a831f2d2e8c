"""Attention over tiles of the scores, forward and backward, in plain XLA: `relative_attention` without [B, H, L, K].

A loop runs over groups of rows of one head. Its body holds the strips of queries (`layout.py`), each with blocks of
keys: a product for content, one for positions, the shift of the tile, an online softmax (Milakov and Gimelshein,
2018) over the blocks, the product with the values. Kept for the backward pass are the result and the logarithm of
each query's sum; it computes the scores again (Dao et al., 2022).

Tried on an AMD EPYC (2 cores), forward and backward in processor time, L = M = 512, B 2, H 8, E 64; the reference
takes 290 ms, this 145, its products alone 110:
    masks left out                                          the same: they are part of passes that are there anyway
    sums of the softmax by a column of ones in the values   the same
    keys in blocks of 256 with an online softmax            205 ms: rescaling, and more distances per pair
    strips of 64, 256 and 512 queries in place of 128       152, 143 and 159 ms
    two loops over half of the heads each                   the same: XLA runs them one after the other
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tiled import groups
from txl_jax.ops.attention.tiled.blocks import Block, product, transposed
from txl_jax.ops.attention.tiled.groups import Arrays, Gradients, Group, Masking, Place
from txl_jax.ops.attention.tiled.layout import Layout, Strip

_LOWEST = -1e30  # The highest score of a query that has seen no key: finite, or hidden scores minus it would be NaN.

Carry = TypeVar("Carry")


def tiled_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position_key: jax.Array | None = None,
    *,
    content_bias: jax.Array | None = None,
    position_bias: jax.Array | None = None,
    position_score: jax.Array | None = None,
    visibility: Visibility,
    dropout: Dropout | None = None,
    tile: Tile,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E].
      key: [B, H, K, E], memory first.
      value: [B, H, K, E].
      position_key: [H, P, E], of the distances K - 1, .. (`Visibility.n_positions`); None: without.
      content_bias: [H, E], u; None: without.
      position_bias: [H, E], v; None: without.
      position_score: [H, P], added to the scores of these distances before the division by sqrt(E); None: nothing.
      visibility: which keys a query sees; one that sees none gets zeros.
      dropout: dropout on the probabilities; None: none.
      tile: most queries and keys of a piece of the scores.
    """
    layout = Layout(visibility.segment_len, visibility.mem_len, visibility.window, visibility.causal, tile)
    arrays = Arrays(query, key, value, position_key, content_bias, position_bias, position_score)
    row_head = None if dropout is None else dropout.row_heads(*query.shape[:2])
    return _attention(layout, arrays, Masking(visibility.key_range(), dropout, row_head))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(layout: Layout, arrays: Arrays, masking: Masking) -> jax.Array:
    return _forward(layout, arrays, masking)[0]


def _save(layout: Layout, arrays: Arrays, masking: Masking) -> tuple[jax.Array, tuple[Any, ...]]:
    result, log_total = _forward(layout, arrays, masking)
    return result, (arrays, masking, result, log_total)


def _forward(layout: Layout, arrays: Arrays, masking: Masking) -> tuple[jax.Array, jax.Array]:
    """Returns the result [B, H, L, E] and the logarithm of each query's sum, [B, H, L], wide."""
    padded = groups.pad_positions(arrays, layout)

    def body(place: Place, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        group = place.take(padded, masking)
        strips = [_forward_strip(layout, group, strip, masking.dropout) for strip in layout.strips()]
        summed, log_total = (jnp.concatenate(parts, axis=1) for parts in zip(*strips, strict=True))
        return place.write(results[0], summed), place.write(results[1], log_total)

    result = jnp.zeros(arrays.query.shape, arrays.value.dtype)
    log_total = jnp.zeros(arrays.query.shape[:3], groups.wide_type(arrays.query))
    return groups.loop(arrays, layout, body, (result, log_total))


class _Softmax(NamedTuple):
    """The state of an online softmax over blocks of keys, wide.

    Attributes:
      summed: [G, n, E], values weighted by exp(score - highest).
      highest: [G, n, 1], the highest score so far.
      total: [G, n, 1], the sum of exp(score - highest).
    """

    summed: jax.Array
    highest: jax.Array
    total: jax.Array


def _forward_strip(layout: Layout, group: Group, strip: Strip, dropout: Dropout | None) -> tuple[jax.Array, jax.Array]:
    """Returns the result [G, n, E] of a strip and its logarithms [G, n], wide."""

    def add_block(index: Any, state: _Softmax) -> _Softmax:
        block = Block(layout, group, strip, index)
        scores = block.scores()
        highest = jnp.maximum(state.highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - highest), jnp.exp(state.highest - highest)
        kept = weights if dropout is None else jnp.where(block.keep(dropout), weights, 0)
        summed = product("gnm,gme->gne", kept.astype(group.value.dtype), block.rows_of(group.value))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return _Softmax(state.summed * shrink + summed, highest, state.total * shrink + total)

    shape, wide = (group.key.shape[0], strip.n_query), group.wide
    state = _Softmax(
        jnp.zeros((*shape, group.value.shape[-1]), wide),
        jnp.full((*shape, 1), _LOWEST, wide),
        jnp.zeros((*shape, 1), wide),
    )
    state = _over_blocks(strip, add_block, state)
    total = jnp.where(state.total == 0, 1, state.total)
    kept_part = 1 if dropout is None else 1 - jnp.asarray(dropout.rate, wide)
    return state.summed / (total * kept_part), (state.highest + jnp.log(total))[..., 0]


def _backward(layout: Layout, saved: tuple[Any, ...], given: jax.Array) -> tuple[Arrays, None]:
    """Returns the gradients of the arrays."""
    arrays, masking, result, log_total = saved
    wide = groups.wide_type(arrays.query)
    delta = jnp.sum(given.astype(wide) * result.astype(wide), axis=-1)
    padded = groups.pad_positions(arrays, layout)

    def body(place: Place, carry: tuple[jax.Array, Gradients]) -> tuple[jax.Array, Gradients]:
        of_query, gradients = carry
        group = place.take(padded, masking)
        rows = _Rows(place.rows(given), place.rows(log_total)[..., None], place.rows(delta)[..., None])
        of_group, of_strips = groups.zeros_of_group(gradients, place.n_rows), []
        for strip in layout.strips():
            of_strip, of_group = _backward_strip(layout, group, strip, masking.dropout, rows.of(strip), of_group)
            of_strips.append(of_strip)
        return place.write(of_query, jnp.concatenate(of_strips, axis=1)), place.put(gradients, of_group)

    zeros = jnp.zeros_like(arrays.query), groups.zero_gradients(padded)
    of_query, gradients = groups.loop(arrays, layout, body, zeros)
    return groups.in_layout_of(arrays, of_query, gradients), None


class _Rows(NamedTuple):
    """Numbers of each query that the backward pass has.

    Attributes:
      given: [G, L, E], the gradient of the result.
      log_total: [G, L, 1], wide.
      delta: [G, L, 1], the sum of the result times its gradient, wide.
    """

    given: jax.Array
    log_total: jax.Array
    delta: jax.Array

    def of(self, strip: Strip) -> "_Rows":
        """Returns those of a strip."""
        return _Rows(*(rows[:, strip.first : strip.first + strip.n_query] for rows in self))


def _backward_strip(
    layout: Layout, group: Group, strip: Strip, dropout: Dropout | None, rows: _Rows, gradients: Gradients
) -> tuple[jax.Array, Gradients]:
    """Returns the gradient of a strip's queries, [G, n, E], and adds to the other gradients of the group."""
    wide, dtype = group.wide, group.key.dtype

    def add_block(index: Any, state: tuple[jax.Array, jax.Array, Gradients]) -> tuple[jax.Array, jax.Array, Gradients]:
        of_content, of_position, gradients = state
        block = Block(layout, group, strip, index)
        weights = jnp.exp(block.scores() - rows.log_total)
        of_weights = product("gne,gme->gnm", rows.given, block.rows_of(group.value))
        kept = weights
        if dropout is not None:
            keep, kept_part = block.keep(dropout), 1 - jnp.asarray(dropout.rate, wide)
            kept, of_weights = (jnp.where(keep, array / kept_part, 0) for array in (weights, of_weights))
        of_scores = (weights * (of_weights - rows.delta)).astype(dtype)
        of_value = product("gen,gnm->gem", transposed(rows.given), kept.astype(rows.given.dtype))
        of_key = product("gen,gnm->gem", transposed(block.content_query), of_scores)
        gradients = block.add_key_gradients(gradients, of_key, of_value)
        of_content += product("gnm,gme->gne", of_scores, block.rows_of(group.key))
        part, gradients = block.add_position_gradients(gradients, of_scores)
        return of_content, of_position if part is None else of_position + part, gradients

    zeros = jnp.zeros((*rows.given.shape[:2], group.key.shape[-1]), wide)
    of_content, of_position, gradients = _over_blocks(strip, add_block, (zeros, zeros, gradients))
    of_content, of_position = of_content * group.scale, of_position * group.scale
    if gradients.content_bias is not None:
        gradients = gradients._replace(content_bias=gradients.content_bias + jnp.sum(of_content, axis=(0, 1)))
    if gradients.position_bias is not None:
        gradients = gradients._replace(position_bias=gradients.position_bias + jnp.sum(of_position, axis=(0, 1)))
    return of_content + of_position, gradients


_attention.defvjp(_save, _backward)


def _over_blocks(strip: Strip, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body` over the blocks of a strip; a single one without a loop, with fixed bounds."""
    return body(0, carry) if strip.n_blocks == 1 else jax.lax.fori_loop(0, strip.n_blocks, body, carry)
