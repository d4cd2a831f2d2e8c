"""Attention over tiles of the scores, forward and backward, in plain XLA.

The scores [B, H, L, K] are never written.

The definition is `ops.attention.reference.attention`; tests/ops/attention/test_training.py compares
values and all gradients with it.

A loop runs over groups of rows of one head. Its body cuts the scores into strips of queries
(`Layout`), each with blocks of keys. For each block, it computes a product for content and one for
positions, shifts the tile (`distances.skew`), updates an online softmax (Milakov and Gimelshein,
2018), and multiplies with the values. The result and the logarithm of each query's sum are kept for
the backward pass, which computes the scores again (Dao et al., 2022).

Variants measured on an AMD EPYC (2 cores), forward and backward in processor time, L = M = 512,
B 2, H 8, E 64. The reference takes 290 ms, this module 145 ms, and its products by themselves
110 ms:
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
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Operands, Tile, default_device
from txl_jax.ops.attention.saved import LOG_TOTAL, OUTPUT, mark_as_saved
from txl_jax.ops.matmul import product, wide_type

# Maximum scores of a group on a CPU. They should stay in a core's cache of 1 or 2 MB from one pass
# to the next, but a pass over too few is not shared among cores (L = M = 512, B 2, AMD EPYC, 2
# cores: 2^17 142 ms, 2^18 109, 2^20 109).
_CPU_SCORES = 2**18
# The highest score of a query that has not attended to any key yet. It is finite, because hidden
# scores minus an infinite one would be NaN.
_LOWEST = -1e30

Carry = TypeVar("Carry")


def tiled_attention(
    operands: Operands,
    visibility: Visibility,
    dropout: ProbabilityDropout | None = None,
    *,
    tile: Tile,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E], or zeros for a query that sees no key."""
    layout = Layout(
        segment_len=visibility.segment_len,
        mem_len=visibility.mem_len,
        window=visibility.window,
        causal=visibility.causal,
        tile=tile,
    )
    row_head = None
    if dropout is not None:
        batch, n_head = operands.query.shape[:2]
        row_head = dropout.row_heads(batch, n_head)
    return _attention(layout, operands, _Masking(visibility.key_range(), dropout, row_head))


# Strips and blocks: static parts of one head's scores.


@dataclasses.dataclass(frozen=True)
class Strip:
    """Neighbouring queries, and the keys that some of them may attend to."""

    # The first query.
    first: int
    # n, the number of queries.
    n_query: int
    # The first key.
    begin: int
    # The end of the keys, behind the last one.
    end: int
    # m, keys of a block. The last block starts early enough to be whole, and hides what it repeats.
    n_key: int
    # W, the columns of scores by distance that `skew` needs of a block.
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
    causal: bool  # Whether keys after the query are hidden.
    tile: Tile  # Maximum queries of a strip and keys of a block.

    def strips(self) -> list[Strip]:
        """Returns the strips, of nearly equal height."""
        height = _even(self.segment_len, self.tile.query)
        strips = []
        for first in range(0, self.segment_len, height):
            n_query = min(height, self.segment_len - first)
            strips.append(self._strip(first, n_query))
        return strips

    def _strip(self, first: int, n_query: int) -> Strip:
        """Returns the strip of `n_query` queries from `first` on."""
        # The strip's keys begin with the first one of its first query, and end with the last one of
        # its last query.
        begin = 0
        end = self.mem_len + self.segment_len
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
        n_columns = n_positions
        for strip in self.strips():
            first_of_last_block = strip.end - strip.n_key
            end = int(self.column(strip, first_of_last_block)) + strip.width
            n_columns = max(n_columns, end)
        return n_columns


def _even(length: int, max_size: int) -> int:
    """Returns the smallest size that cuts a length into as few pieces as `max_size` does."""
    n_pieces = -(-length // max_size)
    return -(-length // n_pieces)


# Groups: the rows of one head that are computed together.


class _Masking(NamedTuple):
    """Conditions that hide a pair, in addition to its distance."""

    key_range: tuple[jax.Array, jax.Array]  # The first visible key and the end, int32 [B] each.
    dropout: ProbabilityDropout | None  # Dropout on the probabilities, if any.
    row_head: jax.Array | None  # int32 [B, H], its `row_heads`, or None without dropout.


class _Group(NamedTuple):
    """The arrays of G rows of one head."""

    layout: Layout
    dropout: ProbabilityDropout | None  # Dropout on the probabilities, if any.
    content_query: jax.Array  # [G, L, E], with u, divided by sqrt(E).
    position_query: jax.Array  # [G, L, E], with v, divided by sqrt(E).
    key: jax.Array  # [G, K, E]
    value: jax.Array  # [G, K, E]
    position_key: jax.Array | None  # [P', E], with zeros behind the P.
    position_score: jax.Array | None  # [P'], divided by sqrt(E), wide.
    key_range: tuple[jax.Array, jax.Array]  # As in `_Masking`, int32 [G] each.
    row_head: Any  # As in `_Masking`, int32 [G], or None without dropout.
    scale: float  # 1 / sqrt(E).
    wide: jnp.dtype  # The dtype of scores and sums.


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a group in the arrays: rows [first_row, first_row + n_rows) of a head."""

    n_rows: int  # G
    first_row: jax.Array  # int32 []
    head: jax.Array  # int32 []

    def take(self, layout: Layout, padded: Operands, masking: _Masking) -> _Group:
        """Returns the group's part of arrays whose positions were padded."""
        scale = float(padded.query.shape[-1] ** -0.5)
        wide = wide_type(padded.query)

        query = self.rows(padded.query)
        content_query = query
        if padded.content_bias is not None:
            content_query = query + self.of_head(padded.content_bias)[None, None, :]
        position_query = query
        if padded.position_bias is not None:
            position_query = query + self.of_head(padded.position_bias)[None, None, :]

        position_key = None
        if padded.position_key is not None:
            position_key = self.of_head(padded.position_key)
        position_score = None
        if padded.position_score is not None:
            position_score = self.of_head(padded.position_score).astype(wide) * scale

        start, stop = masking.key_range
        return _Group(
            layout=layout,
            dropout=masking.dropout,
            content_query=content_query * scale,
            position_query=position_query * scale,
            key=self.rows(padded.key),
            value=self.rows(padded.value),
            position_key=position_key,
            position_score=position_score,
            key_range=(self._of_batch(start), self._of_batch(stop)),
            row_head=None if masking.row_head is None else self.rows(masking.row_head),
            scale=scale,
            wide=wide,
        )

    def rows(self, array: jax.Array) -> jax.Array:
        """Returns the group's rows of its head: [B, H, ..] -> [G, ..]."""
        sizes = (self.n_rows, 1, *array.shape[2:])
        part = jax.lax.dynamic_slice(array, self._start(array), sizes)
        return part.reshape(self.n_rows, *array.shape[2:])

    def of_head(self, array: jax.Array) -> jax.Array:
        """Returns the group's head: [H, ..] -> [..]."""
        return jax.lax.dynamic_index_in_dim(array, self.head, 0, keepdims=False)

    def write(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns [B, H, ..] with the group's rows replaced by [G, ..]."""
        part = part[:, None].astype(array.dtype)
        return jax.lax.dynamic_update_slice(array, part, self._start(array))

    def add_to_head(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns [H, ..] with [..] added to the group's head."""
        total = self.of_head(array) + part
        return jax.lax.dynamic_update_index_in_dim(array, total, self.head, 0)

    def _of_batch(self, array: jax.Array) -> jax.Array:
        """Returns the group's rows: [B] -> [G]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first_row, self.n_rows)

    def _start(self, array: jax.Array) -> list[Any]:
        """Returns the index in an array [B, H, ..] at which the group begins."""
        return [self.first_row, self.head, *[0] * (array.ndim - 2)]


def _over_groups(
    arrays: Operands, layout: Layout, body: Callable[[_Place, Carry], Carry], carry: Carry
) -> Carry:
    """Runs `body` over all groups, the rows of one head one after the other."""
    batch, n_head = arrays.query.shape[:2]
    n_rows = _rows_of_group(batch, layout)
    groups_per_head = batch // n_rows

    def step(index: Any, carry: Carry) -> Carry:
        first_row = (index % groups_per_head) * n_rows
        return body(_Place(n_rows, first_row, head=index // groups_per_head), carry)

    return jax.lax.fori_loop(0, n_head * groups_per_head, step, carry)


def _rows_of_group(batch: int, layout: Layout) -> int:
    """Returns G, a divisor of B.

    On a CPU, a group has as many rows as fit in blocks of `_CPU_SCORES` scores, but at least one.
    On other devices, a group has all rows.
    """
    if default_device().platform != "cpu":
        return batch
    scores_per_row = max(strip.n_query * strip.n_key for strip in layout.strips())
    return largest_divisor(batch, _CPU_SCORES // scores_per_row)


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` up to `limit`, or 1 if `limit` is less."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(limit, 1))


def _pad_positions(arrays: Operands, layout: Layout) -> Operands:
    """Returns the arrays with zeros appended to the position keys and scores.

    Blocks that extend beyond the last distance read these zeros.
    """

    def pad(table: jax.Array) -> jax.Array:
        n_padding = layout.n_columns(table.shape[1]) - table.shape[1]
        return jnp.pad(table, [(0, 0), (0, n_padding), *[(0, 0)] * (table.ndim - 2)])

    position_key = arrays.position_key
    if position_key is not None:
        position_key = pad(position_key)
    position_score = arrays.position_score
    if position_score is not None:
        position_score = pad(position_score)
    return arrays._replace(position_key=position_key, position_score=position_score)


class _ScoreBlock:
    """The scores of a strip's queries and neighbouring keys, for a group."""

    def __init__(self, group: _Group, strip: Strip, index: Any) -> None:
        """Makes block number `index` of a strip."""
        self.group = group
        self._strip = strip

        # The last block may repeat keys of the block before it: the keys before `_begin`.
        self._begin = strip.begin + index * strip.n_key
        self.first_key: Any = strip.begin
        if strip.n_blocks > 1:
            self.first_key = jnp.minimum(self._begin, strip.end - strip.n_key)
        self._first_column = group.layout.column(strip, self.first_key)

        queries = slice(strip.first, strip.first + strip.n_query)
        self.content_query = group.content_query[:, queries]
        self._position_query = group.position_query[:, queries]

    def rows_of(self, array: jax.Array) -> jax.Array:
        """Returns the block's rows [G, m, E] of keys or values [G, K, E]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first_key, self._strip.n_key, 1)

    def scores(self) -> jax.Array:
        """Returns the scores [G, n, m], wide, minus infinity where hidden."""
        group = self.group
        strip = self._strip
        scores = product("gne,gme->gnm", self.content_query, self.rows_of(group.key))
        if group.position_key is not None:
            # Position keys are the same for all rows: one product for the group.
            position_key = self._columns_of(group.position_key)
            by_distance = product("ne,we->nw", _flat(self._position_query), position_key)
            by_distance = by_distance.reshape(*scores.shape[:2], strip.width)
            scores += skew(by_distance, strip.n_key)
        if group.position_score is not None:
            position_score = self._columns_of(group.position_score)
            by_distance = jnp.broadcast_to(position_score, (strip.n_query, strip.width))
            scores += skew(by_distance, strip.n_key)[None]
        return jnp.where(self._visible(), scores, -jnp.inf)

    def keep(self, dropout: ProbabilityDropout) -> jax.Array:
        """Returns which probabilities dropout keeps, bool [G, n, m]."""
        query, key = self._pairs()
        return dropout.keep(self.group.row_head[:, None, None], query[None], key[None])

    def add_position_gradients(
        self, by_head: "_ByHead", score_gradient: jax.Array
    ) -> tuple[jax.Array | None, "_ByHead"]:
        """Computes the gradients of positions from the scores' gradient [G, n, m].

        Returns:
          The gradient of the position queries [G, n, E], or None without position keys, and
          `by_head` with the block's gradients of position keys and scores added.
        """
        group = self.group
        if group.position_key is None and group.position_score is None:
            return None, by_head
        by_distance = unskew(score_gradient, self._strip.width)

        if group.position_score is not None:
            gradient = jnp.sum(by_distance.astype(group.wide), axis=(0, 1)) * group.scale
            total = _add_at(by_head.position_score, gradient, self._first_column)
            by_head = by_head._replace(position_score=total)
        if group.position_key is None:
            return None, by_head

        flat = _flat(by_distance)
        query_gradient = product("nw,we->ne", flat, self._columns_of(group.position_key))
        gradient = product("en,nw->ew", _transposed(_flat(self._position_query)), flat)
        total = _add_at(by_head.position_key, gradient, self._first_column)
        by_head = by_head._replace(position_key=total)
        return query_gradient.reshape(self._position_query.shape), by_head

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
        layout = self.group.layout
        query, key = self._pairs()

        # Empty slots and padding are hidden from all queries of a row, and so are keys that the
        # block before has had.
        start, stop = self.group.key_range
        in_range = (key >= start[:, None]) & (key < stop[:, None])
        if self._strip.n_blocks > 1:
            in_range &= key >= self._begin

        # The order and the window hide pairs by their distance, in all rows alike.
        distance = layout.mem_len + query - key
        near = jnp.ones_like(distance, bool)
        if layout.causal:
            near &= distance >= 0
        if layout.window is not None:
            near &= jnp.abs(distance) < layout.window
        return in_range[:, None, :] & near[None]


def _over_blocks(strip: Strip, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body` over the blocks of a strip.

    If there is one block with fixed bounds, no loop is used.
    """
    if strip.n_blocks == 1:
        return body(0, carry)
    return jax.lax.fori_loop(0, strip.n_blocks, body, carry)


# The forward pass.


class _Results(NamedTuple):
    """Results of the forward pass for all queries, or for a strip of a group, [G, n, ..]."""

    attended: jax.Array  # [B, H, L, E], weighted sums of the values.
    log_total: jax.Array  # [B, H, L], logarithm of each query's sum of exp(score), wide.


class _TiledResiduals(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass."""

    arrays: Operands
    masking: _Masking
    results: _Results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(layout: Layout, arrays: Operands, masking: _Masking) -> jax.Array:
    attended, _ = _forward(layout, arrays, masking)
    return attended


def _forward(
    layout: Layout, arrays: Operands, masking: _Masking
) -> tuple[jax.Array, _TiledResiduals]:
    """Returns the weighted sums of the values [B, H, L, E], and the residuals."""
    padded = _pad_positions(arrays, layout)

    def write_group(place: _Place, results: _Results) -> _Results:
        group = place.take(layout, padded, masking)
        strips = [_forward_strip(group, strip) for strip in layout.strips()]
        of_group = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *strips)
        return jax.tree.map(place.write, results, of_group)

    results = _Results(
        attended=jnp.zeros(arrays.query.shape, arrays.value.dtype),
        log_total=jnp.zeros(arrays.query.shape[:3], wide_type(arrays.query)),
    )
    results = _over_groups(arrays, layout, write_group, results)
    results = _Results(
        attended=mark_as_saved(results.attended, OUTPUT),
        log_total=mark_as_saved(results.log_total, LOG_TOTAL),
    )
    return results.attended, _TiledResiduals(arrays, masking, results)


class OnlineSoftmax(NamedTuple):
    """The state of a softmax over blocks of keys, which are added one after the other. Wide.

    exp(score - highest) takes the place of exp(score), which may overflow. Sums of earlier blocks
    are rescaled when a block has a higher score.
    """

    summed: jax.Array  # [.., n, E], the sum of exp(score - highest) times the value.
    highest: jax.Array  # [.., n, 1], the highest score so far.
    total: jax.Array  # [.., n, 1], the sum of exp(score - highest).

    def highest_with(self, scores: jax.Array) -> jax.Array:
        """Returns the highest score [.., n, 1] so far and in a block of scores [.., n, m]."""
        return jnp.maximum(self.highest, jnp.max(scores, axis=-1, keepdims=True))

    def add(self, highest: jax.Array, exp_scores: jax.Array, summed: jax.Array) -> "OnlineSoftmax":
        """Adds a block of keys.

        Args:
          highest: `highest_with` of the block's scores.
          exp_scores: exp(score - highest) of the block, [.., n, m].
          summed: The sum of exp(score - highest) times the value over the block, [.., n, E].
        """
        shrink = jnp.exp(self.highest - highest)
        return OnlineSoftmax(
            summed=self.summed * shrink + summed,
            highest=highest,
            total=self.total * shrink + jnp.sum(exp_scores, axis=-1, keepdims=True),
        )


def _forward_strip(group: _Group, strip: Strip) -> _Results:
    """Returns the results of a strip's queries, wide: [G, n, E] and [G, n]."""
    dropout = group.dropout
    wide = group.wide

    def add_block(index: Any, softmax: OnlineSoftmax) -> OnlineSoftmax:
        block = _ScoreBlock(group, strip, index)
        scores = block.scores()
        highest = softmax.highest_with(scores)
        exp_scores = jnp.exp(scores - highest)

        # Dropout applies to the probabilities, so the total includes the dropped ones.
        kept = exp_scores
        if dropout is not None:
            kept = jnp.where(block.keep(dropout), exp_scores, 0)
        kept = kept.astype(group.value.dtype)
        summed = product("gnm,gme->gne", kept, block.rows_of(group.value))
        return softmax.add(highest, exp_scores, summed)

    shape = (group.key.shape[0], strip.n_query)
    softmax = OnlineSoftmax(
        summed=jnp.zeros((*shape, group.value.shape[-1]), wide),
        highest=jnp.full((*shape, 1), _LOWEST, wide),
        total=jnp.zeros((*shape, 1), wide),
    )
    softmax = _over_blocks(strip, add_block, softmax)

    # A query that sees no key has the total 0, and gets zeros.
    total = jnp.where(softmax.total == 0, 1, softmax.total)
    kept_fraction = 1 if dropout is None else 1 - jnp.asarray(dropout.rate, wide)
    attended = softmax.summed / (total * kept_fraction)
    log_total = softmax.highest + jnp.log(total)
    return _Results(attended, log_total[..., 0])


# The backward pass. Gradients of keys, values and position keys are summed transposed, [.., E, n]
# for [.., n, E], because the products that compute them are fast that way (`_transposed`).


class _ByHead(NamedTuple):
    """Arrays that all rows of a head share, or their gradients. Missing arrays are None.

    A gradient is wide and summed over rows. The shapes below are for all heads. Arrays of a group
    are for its head, without the axis H.
    """

    position_key: Any  # [H, P', E], a gradient [H, E, P'].
    content_bias: Any  # [H, E]
    position_bias: Any  # [H, E]
    position_score: Any  # [H, P']

    @classmethod
    def from_operands(cls, arrays: Operands) -> "_ByHead":
        """Returns the arrays of attention that rows share."""
        return cls(
            position_key=arrays.position_key,
            content_bias=arrays.content_bias,
            position_bias=arrays.position_bias,
            position_score=arrays.position_score,
        )


class _GroupGradients(NamedTuple):
    """Gradients of a group's arrays except the queries, summed over the blocks so far. Wide."""

    key: jax.Array  # [G, E, K]
    value: jax.Array  # [G, E, K]
    by_head: _ByHead  # Of the group's head.


class _TiledGradients(NamedTuple):
    """Gradients of all arrays, with the groups so far. The rest is zeros."""

    query: jax.Array  # [B, H, L, E], in the query's dtype.
    key: jax.Array  # [B, H, E, K], in the key's dtype.
    value: jax.Array  # [B, H, E, K], in the value's dtype.
    by_head: _ByHead  # Of all heads.

    @classmethod
    def zeros(cls, padded: Operands) -> "_TiledGradients":
        """Returns the gradients before any group, of arrays whose positions were padded."""
        wide = wide_type(padded.query)
        by_head = jax.tree.map(
            lambda array: jnp.zeros(array.shape, wide), _ByHead.from_operands(padded)
        )
        if by_head.position_key is not None:
            by_head = by_head._replace(position_key=_zeros_transposed(padded.position_key, wide))
        return cls(
            query=jnp.zeros_like(padded.query),
            key=_zeros_transposed(padded.key, padded.key.dtype),
            value=_zeros_transposed(padded.value, padded.value.dtype),
            by_head=by_head,
        )

    def zeros_of_group(self, n_rows: int, wide: jnp.dtype) -> _GroupGradients:
        """Returns the gradients of a group with G rows, before any block."""
        return _GroupGradients(
            key=jnp.zeros((n_rows, *self.key.shape[2:]), wide),
            value=jnp.zeros((n_rows, *self.value.shape[2:]), wide),
            by_head=jax.tree.map(lambda array: jnp.zeros(array.shape[1:], wide), self.by_head),
        )

    def add_group(
        self, place: _Place, query: jax.Array, group: _GroupGradients
    ) -> "_TiledGradients":
        """Returns the gradients with a group's gradients, of which `query` is [G, L, E].

        Gradients of a row are written to their place, and those that rows share are added.
        """
        return _TiledGradients(
            query=place.write(self.query, query),
            key=place.write(self.key, group.key),
            value=place.write(self.value, group.value),
            by_head=jax.tree.map(place.add_to_head, self.by_head, group.by_head),
        )

    def as_operands(self, arrays: Operands) -> Operands:
        """Returns the gradients in the shapes and dtypes of the arrays."""
        by_head = self.by_head
        if by_head.position_key is not None:
            by_head = by_head._replace(position_key=by_head.position_key.swapaxes(-1, -2))

        def like(gradient: jax.Array, array: jax.Array) -> jax.Array:
            # Position keys and scores lose their padding.
            return gradient[:, : array.shape[1]].astype(array.dtype)

        by_head = jax.tree.map(like, by_head, _ByHead.from_operands(arrays))
        return Operands(
            query=self.query,
            key=self.key.swapaxes(-1, -2),
            value=self.value.swapaxes(-1, -2),
            position_key=by_head.position_key,
            content_bias=by_head.content_bias,
            position_bias=by_head.position_bias,
            position_score=by_head.position_score,
        )


class _BackwardRows(NamedTuple):
    """Arrays per query that the backward pass reads, of a group, or of a strip with n for L."""

    gradient: jax.Array  # [G, L, E], the gradient of the result.
    log_total: jax.Array  # [G, L, 1], as in `_Results`.
    delta: jax.Array  # [G, L, 1], the sum of the result times its gradient, wide.

    def in_strip(self, strip: Strip) -> "_BackwardRows":
        """Returns the rows of a strip."""
        queries = slice(strip.first, strip.first + strip.n_query)
        return _BackwardRows(
            gradient=self.gradient[:, queries],
            log_total=self.log_total[:, queries],
            delta=self.delta[:, queries],
        )


def _backward(
    layout: Layout, residuals: _TiledResiduals, gradient: jax.Array
) -> tuple[Operands, None]:
    """Returns the gradients of the arrays, from the result's gradient [B, H, L, E]."""
    arrays, masking, results = residuals
    wide = wide_type(arrays.query)
    delta = jnp.sum(gradient.astype(wide) * results.attended.astype(wide), axis=-1)
    padded = _pad_positions(arrays, layout)

    def add_group(place: _Place, gradients: _TiledGradients) -> _TiledGradients:
        group = place.take(layout, padded, masking)
        rows = _BackwardRows(
            gradient=place.rows(gradient),
            log_total=place.rows(results.log_total)[..., None],
            delta=place.rows(delta)[..., None],
        )
        of_group = gradients.zeros_of_group(place.n_rows, wide)
        query_gradients = []
        for strip in layout.strips():
            query_gradient, of_group = _backward_strip(group, strip, rows.in_strip(strip), of_group)
            query_gradients.append(query_gradient)
        return gradients.add_group(place, jnp.concatenate(query_gradients, axis=1), of_group)

    gradients = _over_groups(arrays, layout, add_group, _TiledGradients.zeros(padded))
    return gradients.as_operands(arrays), None


_attention.defvjp(_forward, _backward)


class _StripGradients(NamedTuple):
    """Gradients that one block of a strip hands to the next."""

    content_query: jax.Array  # [G, n, E], wide, not yet divided by sqrt(E).
    position_query: jax.Array  # [G, n, E], wide, not yet divided by sqrt(E).
    group: _GroupGradients


def _backward_strip(
    group: _Group, strip: Strip, rows: _BackwardRows, of_group: _GroupGradients
) -> tuple[jax.Array, _GroupGradients]:
    """Returns the gradient of a strip's queries [G, n, E], and the group's with the strip added."""

    def add_block(index: Any, gradients: _StripGradients) -> _StripGradients:
        return _backward_block(_ScoreBlock(group, strip, index), rows, gradients)

    zeros = jnp.zeros((*rows.gradient.shape[:2], group.key.shape[-1]), group.wide)
    gradients = _over_blocks(strip, add_block, _StripGradients(zeros, zeros, of_group))
    content_query = gradients.content_query * group.scale
    position_query = gradients.position_query * group.scale

    # A bias is added to every query of its head.
    by_head = gradients.group.by_head
    if by_head.content_bias is not None:
        total = by_head.content_bias + jnp.sum(content_query, axis=(0, 1))
        by_head = by_head._replace(content_bias=total)
    if by_head.position_bias is not None:
        total = by_head.position_bias + jnp.sum(position_query, axis=(0, 1))
        by_head = by_head._replace(position_bias=total)
    return content_query + position_query, gradients.group._replace(by_head=by_head)


def _backward_block(
    block: _ScoreBlock, rows: _BackwardRows, gradients: _StripGradients
) -> _StripGradients:
    """Adds the gradients of one block to the sums over the blocks before it."""
    group = block.group
    probabilities = jnp.exp(block.scores() - rows.log_total)
    probability_gradient = product("gne,gme->gnm", rows.gradient, block.rows_of(group.value))
    kept = probabilities
    if group.dropout is not None:
        is_kept = block.keep(group.dropout)
        kept_fraction = 1 - jnp.asarray(group.dropout.rate, group.wide)
        kept = jnp.where(is_kept, probabilities / kept_fraction, 0)
        probability_gradient = jnp.where(is_kept, probability_gradient / kept_fraction, 0)

    # Through the softmax: `delta` has the contributions of all keys of a query.
    score_gradient = probabilities * (probability_gradient - rows.delta)
    score_gradient = score_gradient.astype(group.key.dtype)

    # Through the products of values, keys and position keys.
    kept = kept.astype(rows.gradient.dtype)
    value = product("gen,gnm->gem", _transposed(rows.gradient), kept)
    key = product("gen,gnm->gem", _transposed(block.content_query), score_gradient)
    content_query = product("gnm,gme->gne", score_gradient, block.rows_of(group.key))
    position_query, by_head = block.add_position_gradients(gradients.group.by_head, score_gradient)

    total_position_query = gradients.position_query
    if position_query is not None:
        total_position_query = total_position_query + position_query
    return _StripGradients(
        content_query=gradients.content_query + content_query,
        position_query=total_position_query,
        group=_GroupGradients(
            key=_add_at(gradients.group.key, key, block.first_key),
            value=_add_at(gradients.group.value, value, block.first_key),
            by_head=by_head,
        ),
    )


def _transposed(rows: jax.Array) -> jax.Array:
    """Returns [.., E, n] for [.., n, E], as a separate array.

    Without the barrier XLA makes the transposition part of the product, for which its CPU backend
    has no fast routine: 64 x 128 times 128 x 1024 takes 297 us as one product and 116 us with the
    barrier (AMD EPYC, 2 cores).
    """
    return jax.lax.optimization_barrier(rows.swapaxes(-1, -2))


def _zeros_transposed(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns zeros [.., E, n] for an array [.., n, E]."""
    *lead, n_row, width = array.shape
    return jnp.zeros((*lead, width, n_row), dtype)


def _flat(rows: jax.Array) -> jax.Array:
    """Joins the rows of a group: [G, n, x] -> [G n, x]."""
    return rows.reshape(-1, rows.shape[-1])


def _add_at(total: jax.Array, part: jax.Array, first: Any) -> jax.Array:
    """Adds `part` to the columns of the last axis from `first` on."""
    last_axis = total.ndim - 1
    columns = jax.lax.dynamic_slice_in_dim(total, first, part.shape[-1], last_axis)
    return jax.lax.dynamic_update_slice_in_dim(total, columns + part, first, last_axis)
