"""Attention over tiles of the scores, forward and backward, in plain XLA.

The scores [B, H, L, K] are never written.

The definition is `ops.attention.reference.attention`; tests/ops/attention/test_training.py compares
values and all gradients with it.

A loop runs over groups of rows of one head. Its body cuts the scores into strips of queries
(`Layout`), each with blocks of keys: a product for content, one for positions, the shift of the
tile (`distances.skew`), an online softmax (Milakov and Gimelshein, 2018) over the blocks, the
product with the values. Kept for the backward pass are the result and the logarithm of each query's
sum. It computes the scores again (Dao et al., 2022).

Tried on an AMD EPYC (2 cores), forward and backward in processor time, L = M = 512, B 2, H 8, E 64.
The reference takes 290 ms, this 145, its products alone 110:
    no masks                                               the same: part of passes that run anyway
    sums of the softmax by a column of ones in the values  the same
    keys in blocks of 256 with an online softmax           205 ms: rescaling, and more distances
                                                           per pair
    strips of 64, 256 and 512 queries instead of 128       152, 143 and 159 ms
    two loops over half of the heads each                  the same: XLA runs one after the other

Letters as in `txl_jax.ops.attention`, and: G rows of a group, n queries and m keys of a block, W
distances of a block, P' position keys with the padding behind them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.distances import skew, unskew
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Operands, Tile, default_device
from txl_jax.ops.matmul import product, wide_type

# Most scores of a group on a CPU: they should stay in a cache of 1 or 2 MB a core between one pass
# and the next, and a pass over too few is not shared among cores (L = M = 512, B 2, AMD EPYC, 2
# cores: 2^17 142 ms, 2^18 109, 2^20 109).
_CPU_SCORES = 2**18
# The highest score of a query that has seen no key: finite, or hidden scores minus it would be NaN.
_LOWEST = -1e30

Carry = TypeVar("Carry")


def tiled_attention(
    operands: Operands, visibility: Visibility, dropout: Dropout | None = None, *, tile: Tile
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E], or zeros for a query that sees no key."""
    layout = Layout(
        visibility.segment_len, visibility.mem_len, visibility.window, visibility.causal, tile
    )
    row_head = None if dropout is None else dropout.row_heads(*operands.query.shape[:2])
    return _attention(layout, operands, _Masking(visibility.key_range(), dropout, row_head))


# `Operands` holds gradients too. While they are summed, those with an axis E after K or P' are
# transposed, [.., E, K], as the matmuls that give them are fast that way (`_transposed`), and those
# without an axis B are wide. Within a group all are wide, without the axes B and H but with G for
# B, and the query's is None.


class _Masking(NamedTuple):
    """Conditions that hide a pair besides its distance."""

    key_range: tuple[jax.Array, jax.Array]  # The first visible key and the end, int32 [B] each.
    dropout: Dropout | None
    row_head: jax.Array | None  # Numbers of rows and heads in the masks of dropout, int32 [B, H].


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(layout: "Layout", arrays: Operands, masking: _Masking) -> jax.Array:
    return _forward(layout, arrays, masking)[0]


def _forward(
    layout: "Layout", arrays: Operands, masking: _Masking
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the result [B, H, L, E], and the residuals.

    The last one is each query's log sum, [B, H, L], wide.
    """
    padded = _pad_positions(arrays, layout)

    def body(place: _Place, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        group = place.take(layout, padded, masking)
        strips = [_forward_strip(group, strip) for strip in layout.strips()]
        summed, log_total = (jnp.concatenate(parts, axis=1) for parts in zip(*strips, strict=True))
        return place.write(results[0], summed), place.write(results[1], log_total)

    result = jnp.zeros(arrays.query.shape, arrays.value.dtype)
    log_total = jnp.zeros(arrays.query.shape[:3], wide_type(arrays.query))
    result, log_total = _over_groups(arrays, layout, body, (result, log_total))
    return result, (arrays, masking, result, log_total)


class Softmax(NamedTuple):
    """The state of an online softmax over blocks of keys, wide."""

    summed: jax.Array  # [.., n, E], values weighted by exp(score - highest).
    highest: jax.Array  # [.., n, 1], the highest score so far.
    total: jax.Array  # [.., n, 1], the sum of exp(score - highest).

    def add(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> "Softmax":
        """Adds the scores [.., n, m] of a block.

        `weigh` sums the block's values, with weights in the shape of the scores.
        """
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - highest), jnp.exp(self.highest - highest)
        summed, total = weigh(weights), jnp.sum(weights, axis=-1, keepdims=True)
        return Softmax(self.summed * shrink + summed, highest, self.total * shrink + total)


def _forward_strip(group: "_Group", strip: "Strip") -> tuple[jax.Array, jax.Array]:
    """Returns the result [G, n, E] of a strip and its logarithms [G, n], wide."""
    dropout, wide = group.dropout, group.wide

    def add_block(index: Any, state: Softmax) -> Softmax:
        block = _Block(group, strip, index)

        def weigh(weights: jax.Array) -> jax.Array:
            kept = weights if dropout is None else jnp.where(block.keep(dropout), weights, 0)
            return product(
                "gnm,gme->gne", kept.astype(group.value.dtype), block.rows_of(group.value)
            )

        return state.add(block.scores(), weigh)

    shape = group.key.shape[0], strip.n_query
    state = Softmax(
        jnp.zeros((*shape, group.value.shape[-1]), wide),
        jnp.full((*shape, 1), _LOWEST, wide),
        jnp.zeros((*shape, 1), wide),
    )
    state = _over_blocks(strip, add_block, state)
    total = jnp.where(state.total == 0, 1, state.total)
    kept_part = 1 if dropout is None else 1 - jnp.asarray(dropout.rate, wide)
    return state.summed / (total * kept_part), (state.highest + jnp.log(total))[..., 0]


def _backward(layout: "Layout", saved: tuple[Any, ...], given: jax.Array) -> tuple[Operands, None]:
    """Returns the gradients of the arrays."""
    arrays, masking, result, log_total = saved
    wide = wide_type(arrays.query)
    delta = jnp.sum(given.astype(wide) * result.astype(wide), axis=-1)
    padded = _pad_positions(arrays, layout)

    def body(place: _Place, gradients: Operands) -> Operands:
        group = place.take(layout, padded, masking)
        rows = _Rows(
            place.rows(given), place.rows(log_total)[..., None], place.rows(delta)[..., None]
        )
        of_group, of_strips = _zeros_of_group(gradients, place.n_rows), []
        for strip in layout.strips():
            of_strip, of_group = _backward_strip(group, strip, rows.of(strip), of_group)
            of_strips.append(of_strip)
        return place.put(gradients, of_group._replace(query=jnp.concatenate(of_strips, axis=1)))

    gradients = _over_groups(arrays, layout, body, _zero_gradients(padded))
    query, others = gradients.query, gradients._replace(query=None)
    return jax.tree.map(_as_given, others, arrays._replace(query=None))._replace(query=query), None


class _Rows(NamedTuple):
    """Numbers of each query that the backward pass has."""

    given: jax.Array  # [G, L, E], the gradient of the result.
    log_total: jax.Array  # [G, L, 1], wide.
    delta: jax.Array  # [G, L, 1], the sum of the result times its gradient, wide.

    def of(self, strip: "Strip") -> "_Rows":
        """Returns the rows of a strip."""
        return _Rows(*(rows[:, strip.first : strip.first + strip.n_query] for rows in self))


def _backward_strip(
    group: "_Group", strip: "Strip", rows: _Rows, gradients: Operands
) -> tuple[jax.Array, Operands]:
    """Returns the gradient of a strip's queries, [G, n, E].

    The function also adds to the other gradients of the group.
    """
    dropout, wide, dtype = group.dropout, group.wide, group.key.dtype

    def add_block(
        index: Any, state: tuple[jax.Array, jax.Array, Operands]
    ) -> tuple[jax.Array, jax.Array, Operands]:
        of_content, of_position, gradients = state
        block = _Block(group, strip, index)
        weights = jnp.exp(block.scores() - rows.log_total)
        of_weights = product("gne,gme->gnm", rows.given, block.rows_of(group.value))
        kept = weights
        if dropout is not None:
            keep, kept_part = block.keep(dropout), 1 - jnp.asarray(dropout.rate, wide)
            kept, of_weights = (
                jnp.where(keep, array / kept_part, 0) for array in (weights, of_weights)
            )
        of_scores = (weights * (of_weights - rows.delta)).astype(dtype)
        of_value = product("gen,gnm->gem", _transposed(rows.given), kept.astype(rows.given.dtype))
        of_key = product("gen,gnm->gem", _transposed(block.content_query), of_scores)
        gradients = gradients._replace(
            key=_add_at(gradients.key, of_key, block.first_key),
            value=_add_at(gradients.value, of_value, block.first_key),
        )
        of_content += product("gnm,gme->gne", of_scores, block.rows_of(group.key))
        part, gradients = block.add_position_gradients(gradients, of_scores)
        return of_content, of_position if part is None else of_position + part, gradients

    zeros = jnp.zeros((*rows.given.shape[:2], group.key.shape[-1]), wide)
    of_content, of_position, gradients = _over_blocks(strip, add_block, (zeros, zeros, gradients))
    of_content, of_position = of_content * group.scale, of_position * group.scale
    if gradients.content_bias is not None:
        gradients = gradients._replace(
            content_bias=gradients.content_bias + jnp.sum(of_content, axis=(0, 1))
        )
    if gradients.position_bias is not None:
        gradients = gradients._replace(
            position_bias=gradients.position_bias + jnp.sum(of_position, axis=(0, 1))
        )
    return of_content + of_position, gradients


_attention.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class Strip:
    """Neighbouring queries, and the keys that some of them may see."""

    # The first query.
    first: int
    # n, their number.
    n_query: int
    # The first key.
    begin: int
    # Behind the last key.
    end: int
    # m, keys of a block. The last block starts early enough to be whole, and hides what it repeats.
    n_key: int
    # Columns of scores by distance that `skew` needs of a block.
    width: int

    @property
    def n_blocks(self) -> int:
        """Returns the number of blocks."""
        return -(-(self.end - self.begin) // self.n_key)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static description of the parts of one head's scores.

    The parts are strips of queries, each with the blocks of keys that it may attend to.
    """

    segment_len: int  # L
    mem_len: int  # M
    window: int | None  # Maximum keys of a query, on each side, or None for no limit.
    causal: bool
    tile: Tile  # Maximum queries of a strip and keys of a block.

    def strips(self) -> list[Strip]:
        """Returns the strips, of nearly equal height."""
        length, height = self.segment_len, _even(self.segment_len, self.tile.query)
        return [
            self._strip(first, min(height, length - first)) for first in range(0, length, height)
        ]

    def _strip(self, first: int, n_query: int) -> Strip:
        begin, end = 0, self.mem_len + self.segment_len
        if self.causal:
            end = self.mem_len + first + n_query
        if self.window is not None:
            begin = max(0, self.mem_len + first - self.window + 1)
            end = min(end, self.mem_len + first + n_query - 1 + self.window)
        n_key = _even(end - begin, self.tile.key)
        width = n_query + n_key - 1
        if self.causal and n_key == end - begin and n_query > 1:
            # Distances below 0 are hidden: `skew` may read anything there, if only each row is one
            # column longer.
            width = n_key + 1
        return Strip(first, n_query, begin, end, n_key, width)

    def column(self, strip: Strip, key: Any) -> Any:
        """Returns the column of the position keys at which a block begins.

        `key` is the first key of the block.
        """
        return self.segment_len - strip.n_query - strip.first + key

    def n_columns(self, n_positions: int) -> int:
        """Returns P', the number of position keys that the blocks read: P and zeros behind."""
        return max(
            [n_positions, *(int(self.column(s, s.end - s.n_key)) + s.width for s in self.strips())]
        )


def _even(length: int, most: int) -> int:
    """Returns the least size that cuts a length into as few pieces as `most` does."""
    n_pieces = -(-length // most)
    return -(-length // n_pieces)


def _over_blocks(strip: Strip, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body` over the blocks of a strip.

    If there is one block with fixed bounds, no loop is used.
    """
    return (
        body(0, carry) if strip.n_blocks == 1 else jax.lax.fori_loop(0, strip.n_blocks, body, carry)
    )


class _Group(NamedTuple):
    """G rows of one head."""

    layout: Layout
    dropout: Dropout | None
    content_query: jax.Array  # [G, L, E], with u, divided by sqrt(E).
    position_query: jax.Array  # [G, L, E], with v, divided by sqrt(E).
    key: jax.Array  # [G, K, E]
    value: jax.Array  # [G, K, E]
    position_key: jax.Array | None  # [P', E], with zeros behind the P.
    position_score: jax.Array | None  # [P'], divided by sqrt(E), wide.
    key_range: tuple[jax.Array, jax.Array]  # int32 [G] each.
    row_head: Any  # int32 [G], or None without dropout.
    scale: float  # 1 / sqrt(E).
    wide: jnp.dtype  # Of scores and sums.


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a group: rows [first_row, first_row + n_rows) of a head."""

    n_rows: int
    first_row: jax.Array
    head: jax.Array

    def rows(self, array: jax.Array) -> jax.Array:
        """[B, H, ..] -> [G, ..]."""
        part = jax.lax.dynamic_slice(array, self._start(array), (self.n_rows, 1, *array.shape[2:]))
        return part.reshape(self.n_rows, *array.shape[2:])

    def of_head(self, array: jax.Array) -> jax.Array:
        """[H, ..] -> [..]."""
        return jax.lax.dynamic_index_in_dim(array, self.head, 0, keepdims=False)

    def write(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns [B, H, ..] with [G, ..] in place."""
        return jax.lax.dynamic_update_slice(
            array, part[:, None].astype(array.dtype), self._start(array)
        )

    def put(self, everything: Operands, group: Operands) -> Operands:
        """Returns the gradients of all groups, updated with the gradients of one group.

        The group's gradients are put in their place, or added where they are shared within a head.
        """

        def one(array: jax.Array, part: jax.Array) -> jax.Array:
            if array.ndim == 4:
                return self.write(array, part)
            return jax.lax.dynamic_update_index_in_dim(
                array, self.of_head(array) + part, self.head, 0
            )

        return jax.tree.map(one, everything, group)

    def take(self, layout: Layout, arrays: Operands, masking: _Masking) -> _Group:
        """Returns a group of arrays whose positions were padded."""
        start, stop = (
            jax.lax.dynamic_slice_in_dim(x, self.first_row, self.n_rows) for x in masking.key_range
        )
        query, scale, wide = (
            self.rows(arrays.query),
            float(arrays.query.shape[-1] ** -0.5),
            wide_type(arrays.query),
        )
        position_key, position_score = jax.tree.map(
            self.of_head, (arrays.position_key, arrays.position_score)
        )

        def biased(bias: jax.Array | None) -> jax.Array:
            return query if bias is None else query + self.of_head(bias)[None, None, :]

        return _Group(
            layout=layout,
            dropout=masking.dropout,
            content_query=biased(arrays.content_bias) * scale,
            position_query=biased(arrays.position_bias) * scale,
            key=self.rows(arrays.key),
            value=self.rows(arrays.value),
            position_key=position_key,
            position_score=None if position_score is None else position_score.astype(wide) * scale,
            key_range=(start, stop),
            row_head=None if masking.row_head is None else self.rows(masking.row_head),
            scale=scale,
            wide=wide,
        )

    def _start(self, array: jax.Array) -> list[Any]:
        return [self.first_row, self.head, *[0] * (array.ndim - 2)]


def _over_groups(
    arrays: Operands, layout: Layout, body: Callable[[_Place, Carry], Carry], carry: Carry
) -> Carry:
    """Runs `body` over all groups, the rows of one head one after the other."""
    batch, n_head = arrays.query.shape[:2]
    n_rows = batch
    if default_device().platform == "cpu":
        largest = max(strip.n_query * strip.n_key for strip in layout.strips())
        n_rows = max(
            n
            for n in range(1, batch + 1)
            if batch % n == 0 and (n == 1 or n * largest <= _CPU_SCORES)
        )
    per_head = batch // n_rows

    def step(index: Any, carry: Carry) -> Carry:
        return body(_Place(n_rows, (index % per_head) * n_rows, index // per_head), carry)

    return jax.lax.fori_loop(0, n_head * per_head, step, carry)


def _pad_positions(arrays: Operands, layout: Layout) -> Operands:
    """Returns the arrays with zeros behind the position keys and scores.

    Blocks read these zeros beyond the last distance.
    """

    def pad(table: jax.Array) -> jax.Array:
        behind = layout.n_columns(table.shape[1]) - table.shape[1]
        return jnp.pad(table, [(0, 0), (0, behind), *[(0, 0)] * (table.ndim - 2)])

    position_key, position_score = jax.tree.map(pad, (arrays.position_key, arrays.position_score))
    return arrays._replace(position_key=position_key, position_score=position_score)


def _zero_gradients(arrays: Operands) -> Operands:
    """Returns the gradients of all, before any group, of arrays whose positions were padded."""
    wide = wide_type(arrays.query)

    def zeros(array: jax.Array) -> jax.Array:
        shape = (
            array.shape
            if array.ndim == 2
            else (*array.shape[:-2], array.shape[-1], array.shape[-2])
        )
        return jnp.zeros(shape, array.dtype if array.ndim == 4 else wide)

    return jax.tree.map(zeros, arrays._replace(query=None))._replace(
        query=jnp.zeros_like(arrays.query)
    )


def _zeros_of_group(gradients: Operands, n_rows: int) -> Operands:
    """Returns the gradients of a group, before any block."""
    wide = wide_type(gradients.key)

    def zeros(array: jax.Array) -> jax.Array:
        return jnp.zeros((n_rows, *array.shape[2:]) if array.ndim == 4 else array.shape[1:], wide)

    return jax.tree.map(zeros, gradients._replace(query=None))


def _as_given(gradient: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a gradient in the shape and type of the array, the query aside."""
    gradient = gradient if array.ndim == 2 else gradient.swapaxes(-1, -2)
    return gradient[:, : array.shape[1]].astype(array.dtype) if array.ndim < 4 else gradient


class _Block:
    """A strip's queries with neighbouring keys, for a group."""

    def __init__(self, group: _Group, strip: Strip, index: Any) -> None:
        self._group, self._strip = group, strip
        rows = slice(strip.first, strip.first + strip.n_query)
        last = strip.end - strip.n_key
        # Keys before it belong to the block before.
        self._begin = strip.begin + index * strip.n_key
        self.first_key = strip.begin if strip.n_blocks == 1 else jnp.minimum(self._begin, last)
        self._first_column = group.layout.column(strip, self.first_key)
        self.content_query, self._position_query = (
            group.content_query[:, rows],
            group.position_query[:, rows],
        )

    def rows_of(self, array: jax.Array) -> jax.Array:
        """Returns the block's rows [G, m, E] of keys or values [G, K, E]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first_key, self._strip.n_key, 1)

    def scores(self) -> jax.Array:
        """Returns the scores [G, n, m], wide, minus infinity where hidden."""
        group, strip = self._group, self._strip
        scores = product("gne,gme->gnm", self.content_query, self.rows_of(group.key))
        if group.position_key is not None:
            # Position keys are the same for all rows: one product for the group.
            by_distance = product(
                "ne,we->nw", _flat(self._position_query), self._columns_of(group.position_key)
            )
            scores += skew(by_distance.reshape(*scores.shape[:2], strip.width), strip.n_key)
        if group.position_score is not None:
            by_distance = jnp.broadcast_to(
                self._columns_of(group.position_score), (strip.n_query, strip.width)
            )
            scores += skew(by_distance, strip.n_key)[None]
        return jnp.where(self._visible(), scores, -jnp.inf)

    def keep(self, dropout: Dropout) -> jax.Array:
        """Returns which probabilities are kept, bool [G, n, m]."""
        query, key = self._pairs()
        return dropout.keep(self._group.row_head[:, None, None], query[None], key[None])

    def add_position_gradients(
        self, gradients: Operands, of_scores: jax.Array
    ) -> tuple[jax.Array | None, Operands]:
        """Returns the block's part of the position queries' gradient.

        The part is [G, n, E], or None. The method also adds to the group's gradients.
        """
        group = self._group
        if group.position_key is None and group.position_score is None:
            return None, gradients
        by_distance = unskew(of_scores, self._strip.width)
        if group.position_score is not None:
            of_score = jnp.sum(by_distance.astype(group.wide), axis=(0, 1)) * group.scale
            added = _add_at(gradients.position_score, of_score, self._first_column)
            gradients = gradients._replace(position_score=added)
        if group.position_key is None:
            return None, gradients
        flat = _flat(by_distance)
        of_query = product("nw,we->ne", flat, self._columns_of(group.position_key))
        of_key = product("en,nw->ew", _transposed(_flat(self._position_query)), flat)
        gradients = gradients._replace(
            position_key=_add_at(gradients.position_key, of_key, self._first_column)
        )
        return of_query.reshape(self._position_query.shape), gradients

    def _columns_of(self, table: jax.Array) -> jax.Array:
        """Returns the block's rows [W, ..] of a table of distances [P', ..]."""
        return jax.lax.dynamic_slice_in_dim(table, self._first_column, self._strip.width, 0)

    def _pairs(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of queries [n, 1] and keys [1, m]."""
        query = self._strip.first + jnp.arange(self._strip.n_query, dtype=jnp.int32)
        key = self.first_key + jnp.arange(self._strip.n_key, dtype=jnp.int32)
        return query[:, None], key[None, :]

    def _visible(self) -> jax.Array:
        """Returns the visible pairs, bool [G, n, m]."""
        layout, (query, key), (start, stop) = (
            self._group.layout,
            self._pairs(),
            self._group.key_range,
        )
        seen = (key >= start[:, None]) & (key < stop[:, None])
        if self._strip.n_blocks > 1:
            seen &= key >= self._begin
        distance = layout.mem_len + query - key
        near = jnp.ones_like(distance, bool)
        if layout.causal:
            near &= distance >= 0
        if layout.window is not None:
            near &= jnp.abs(distance) < layout.window
        return seen[:, None, :] & near[None]


def _transposed(rows: jax.Array) -> jax.Array:
    """[.., n, E] -> [.., E, n], as a separate array.

    Without the barrier XLA makes the transposition part of the product, for which its CPU backend
    has no fast routine:
    64 x 128 times 128 x 1024 takes 297 us with it and 116 us without (AMD EPYC, 2 cores).
    """
    return jax.lax.optimization_barrier(rows.swapaxes(-1, -2))


def _flat(rows: jax.Array) -> jax.Array:
    """[G, n, x] -> [G n, x]."""
    return rows.reshape(-1, rows.shape[-1])


def _add_at(total: jax.Array, part: jax.Array, first: Any) -> jax.Array:
    """Adds to the columns [first, ..) of the last axis."""
    here = jax.lax.dynamic_slice_in_dim(total, first, part.shape[-1], total.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(total, here + part, first, total.ndim - 1)
