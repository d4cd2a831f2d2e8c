"""Attention over [memory; segment] with gradients, by a forward and a backward kernel.

The definition is `ops.attention.reference.attention`; tests/ops/attention/test_training.py compares
the interpreted kernels with it, and tests/ops/attention/tpu compiles them for chips without having
them.

The forward kernel is an online softmax over the tiles of keys (Dao et al., 2022), with the term by
distance. The backward kernel computes all gradients in one pass over the tiles, from scores that
are computed once more. With p the probabilities, d their dropout (0 or 1 / (1 - rate)) and o the
output, a pair's score has the gradient

    ds = p (d (do . v) - do . o)

It goes to q + u and k through the keys, and, moved back to its distance, to q + v and r through the
position keys. The kernel omits the factor 1 / (1 - rate) from d. Instead, it multiplies do . o by
1 - rate, and the sums by the factor at the end.

The relative shift happens in vector registers. A strip of n queries (at most 128) and m keys needs
the scores of n + m - 1 distances, largest first; query x meets key y at column n - 1 - x + y of
them. So row x moves to the left by n - 1 - x: at most 127 columns, one register of 128 lanes, which
bounds what a row gathers from to a register and its right neighbour. For n = 3, m = 2, entry `xp`
of query x and column p:

    00 01 02 03        02 03
    10 11 12 13   ->   11 12
    20 21 22 23        20 21

There are two ways, both for float32 (Mosaic cannot rotate packed types: "unsupported packed type
rotation"):

    rotation  one strided rotation; TPU v5 and later. It turns later rows further to the right only,
              so it cannot undo itself: a rotation with a negative stride does not compile.
    gather    a gather of lanes within each register, then a choice of one of two neighbours; TPU v4
              and later.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.dropout import ProbabilityDropout, bits
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import AttentionCall, Operands, Tile
from txl_jax.ops.attention.saved import LOG_TOTAL, OUTPUT, mark_as_saved
from txl_jax.ops.attention.tpu.geometry import LANES, Geometry, round_tile, strip_rows, vmem_bytes

# The score of a masked pair. It is finite, because the difference of two infinities is NaN.
HIDDEN = -1e30
# Below this size, the compiler's default limit (16 MiB) is enough.
_DEFAULT_VMEM = 12 * 2**20

# Contracted dimensions of a product of two matrices.
Contracted = tuple[tuple[int], tuple[int]]
NT: Contracted = ((1,), (1,))  # [n, e] x [m, e] -> [n, m]
NN: Contracted = ((1,), (0,))  # [n, m] x [m, e] -> [n, e]
TN: Contracted = ((0,), (0,))  # [n, m] x [n, e] -> [m, e]


def tpu_attention(
    problem: AttentionCall,
    operands: Operands,
    visibility: Visibility,
    dropout: ProbabilityDropout | None = None,
    *,
    tile: Tile,
    kernel: str = "mosaic_gather",
    interpret: bool = False,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E], or zeros for a query that sees no key.

    `problem` describes the arrays. `tile` is rounded to whole registers. `kernel` determines how a
    tile is skewed: "mosaic_roll" (TPU v5 and later) or "mosaic_gather" (v4 and later). Any device
    can `interpret` the kernels.
    """
    assert operands.position_score is None, "refused: a score per distance"
    geometry = Geometry(
        **vars(problem),
        tile=round_tile(tile, problem),
        rotate=kernel == "mosaic_roll",
        n_drawn_head=None if dropout is None else dropout.n_head,
        interpret=interpret,
    )
    operands = operands._replace(
        content_bias=_as_row(operands.content_bias),
        position_bias=_as_row(operands.position_bias),
    )
    out = _attend(geometry, operands, _make_scalars(visibility, dropout))
    return out.astype(operands.value.dtype)


def _as_row(bias: jax.Array | None) -> jax.Array | None:
    """Gives a bias the shape of its blocks: [H, E] -> [H, 1, E]."""
    if bias is None:
        return None
    return bias[:, None, :]


# Here `Operands` are also gradients, and in a kernel references to their blocks. Biases are
# [H, 1, E].


class _Scalars(NamedTuple):
    """Numbers that the kernels read from scalar memory."""

    # int32 [B], first key that the queries of a row may see.
    start: Any
    # int32 [B], end of these keys.
    stop: Any
    # int32 [4]: seed, threshold, first row and first head of dropout, or zeros without it.
    draws: Any
    # float32 [2]: 1 - rate and 1 / (1 - rate).
    fractions: Any

    @property
    def kept_fraction(self) -> Any:
        """1 - rate."""
        return self.fractions[0]

    @property
    def inverse_fraction(self) -> Any:
        """1 / (1 - rate)."""
        return self.fractions[1]


def _make_scalars(visibility: Visibility, dropout: ProbabilityDropout | None) -> _Scalars:
    start, stop = visibility.key_range()
    if dropout is None:
        return _Scalars(
            start, stop, draws=jnp.zeros(4, jnp.int32), fractions=jnp.ones(2, jnp.float32)
        )
    seed = jnp.asarray(dropout.seed).astype(jnp.uint32)
    threshold = dropout.threshold()
    draws = [
        # The unsigned words keep their bits.
        lax.bitcast_convert_type(seed, jnp.int32),
        lax.bitcast_convert_type(threshold, jnp.int32),
        jnp.asarray(dropout.first_row, jnp.int32),
        jnp.asarray(dropout.first_head, jnp.int32),
    ]
    kept_fraction = 1 - jnp.asarray(dropout.rate, jnp.float32)
    return _Scalars(
        start,
        stop,
        draws=jnp.stack(draws),
        fractions=jnp.stack([kept_fraction, 1 / kept_fraction]),
    )


class _Saved(NamedTuple):
    """Arrays that the forward pass saves for the backward pass."""

    operands: Operands
    scalars: _Scalars
    out: jax.Array  # [B, H, L, E]
    # float32 [B, H, tiles of queries, 1, n], the logarithm of each query's sum. For a query that
    # sees no key it is so large that its probabilities come out as 0.
    log_sum: jax.Array


class _ForwardScratch(NamedTuple):
    """Memory of the forward kernel that lasts over the tiles of keys. n is the tile's queries."""

    # [n, E], queries with u, divided by sqrt(E).
    content_query: Any
    # [n, E], queries with v, divided by sqrt(E). None without position keys.
    position_query: Any
    # float32 [n, 128], the largest score so far, in every lane.
    top: Any
    # float32 [n, 128], sums of exp(score - top), each lane its own part.
    total: Any
    # float32 [n, E], sum of exp(score - top) * value.
    weighted: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(geometry: Geometry, operands: Operands, scalars: _Scalars) -> jax.Array:
    return _forward(geometry, operands, scalars)[0]


def _forward(geometry: Geometry, operands: Operands, scalars: _Scalars) -> tuple[jax.Array, _Saved]:
    """Returns the attention [B, H, L, E], with zeros for a query that sees no key."""
    n_query = geometry.tile.query
    width = geometry.d_head
    dtype = operands.query.dtype
    scratch = _ForwardScratch(
        content_query=pltpu.VMEM((n_query, width), dtype),
        position_query=pltpu.VMEM((n_query, width), dtype) if geometry.n_positions else None,
        top=pltpu.VMEM((n_query, LANES), jnp.float32),
        total=pltpu.VMEM((n_query, LANES), jnp.float32),
        weighted=pltpu.VMEM((n_query, width), jnp.float32),
    )
    blocks = _make_blocks(geometry)
    padded = _pad_operands(geometry, operands)
    # A tile of any size is a row.
    log_sum_shape = (geometry.batch, geometry.n_head, geometry.n_query_tile, 1, n_query)
    out, log_sum = _run(
        functools.partial(_forward_kernel, geometry),
        geometry,
        scalars,
        (padded,),
        in_specs=(_present(blocks.operands, operands),),
        out_specs=(blocks.operands.query, blocks.log_sum),
        out_shape=(
            jax.ShapeDtypeStruct(padded.query.shape, dtype),
            jax.ShapeDtypeStruct(log_sum_shape, jnp.float32),
        ),
        scratch=scratch,
        backward=False,
    )
    out = mark_as_saved(out[:, :, : geometry.segment_len], OUTPUT)
    log_sum = mark_as_saved(log_sum, LOG_TOTAL)
    return out, _Saved(operands, scalars, out, log_sum)


def _forward_kernel(
    geometry: Geometry,
    scalars: _Scalars,
    operands: Operands,
    out_ref: Any,
    log_sum_ref: Any,
    scratch: _ForwardScratch,
) -> None:
    step = _current_step(geometry, scalars)

    @pl.when(step.key_tile == 0)
    def _begin() -> None:
        _bias_queries(step.geometry.scale, operands, scratch.content_query, scratch.position_query)
        scratch.top[...] = jnp.full_like(scratch.top, HIDDEN)
        _clear(scratch.total, scratch.weighted)

    @pl.when(step.is_needed())
    def _add() -> None:
        scores = _tile_scores(step, operands, scratch.content_query, scratch.position_query)
        scores = jnp.where(step.visible(), scores, HIDDEN)
        value = operands.value[0, 0]

        # If the top has grown, the sums so far are scaled down. The 1s that a row has summed before
        # its first visible key become 0.
        old_top = scratch.top[...]
        top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
        numerators = jnp.exp(scores - widen(top, geometry.tile.key))
        fade = jnp.exp(old_top - top)
        scratch.top[...] = top
        scratch.total[...] = fade * scratch.total[...] + _lane_sums(numerators)

        # Dropout does not change the total.
        if geometry.n_drawn_head is not None:
            numerators = jnp.where(step.kept(), numerators, 0)
        added = dot(numerators.astype(value.dtype), value, NN)
        scratch.weighted[...] = widen(fade, geometry.d_head) * scratch.weighted[...] + added

    @pl.when(step.key_tile == geometry.n_key_tile - 1)
    def _end() -> None:
        top = scratch.top[...]
        total = jnp.broadcast_to(jnp.sum(scratch.total[...], axis=1, keepdims=True), top.shape)
        sees_any = top > HIDDEN
        inverse = jnp.where(sees_any, step.scalars.inverse_fraction / total, 0)
        out = scratch.weighted[...] * widen(inverse, geometry.d_head)
        out_ref[0, 0] = out.astype(out_ref.dtype)
        log_sum = jnp.where(sees_any, top + jnp.log(total), -HIDDEN)
        # One number per row: 128 equal ones were most of the temporary memory.
        log_sum_ref[0, 0, 0] = log_sum.T[:1]


class _AttentionResiduals(NamedTuple):
    """Arrays that the backward pass reads, in addition to the operands."""

    out: Any  # [B, H, L, E]
    out_gradient: Any  # [B, H, L, E]
    log_sum: Any  # float32 [B, H, tiles of queries, 1, n]


class _BackwardScratch(NamedTuple):
    """Memory of the backward kernel. n is the number of queries of a tile.

    It is kept over the tiles of keys. The gradients of keys and values are kept over all tiles of a
    row and head.
    """

    # float32 [n, E], gradient of the queries through the keys.
    content_gradient: Any
    # [n, E], queries with u, divided by sqrt(E).
    content_query: Any
    # float32 [padded keys, E].
    key_gradient: Any
    # float32 [n, 128], the logarithm of each query's sum, in every lane.
    log_sum: Any
    # float32 [n, 128], (1 - rate) do . o, in every lane.
    out_product: Any
    # float32 [n, E], gradient of the queries through the position keys, or None without them.
    position_gradient: Any
    # [n, E], queries with v, divided by sqrt(E), or None without position keys.
    position_query: Any
    # float32 [padded keys, E].
    value_gradient: Any


def _backward(geometry: Geometry, saved: _Saved, gradient: jax.Array) -> tuple[Operands, None]:
    """Returns the gradients of the operands.

    The kernel adds up those with [H, ...] in float32 over all rows.
    """
    operands = saved.operands
    n_query = geometry.tile.query
    width = geometry.d_head
    dtype = operands.query.dtype
    has_position = geometry.n_positions > 0
    scratch = _BackwardScratch(
        content_gradient=pltpu.VMEM((n_query, width), jnp.float32),
        content_query=pltpu.VMEM((n_query, width), dtype),
        key_gradient=pltpu.VMEM((geometry.padded_keys, width), jnp.float32),
        log_sum=pltpu.VMEM((n_query, LANES), jnp.float32),
        out_product=pltpu.VMEM((n_query, LANES), jnp.float32),
        position_gradient=pltpu.VMEM((n_query, width), jnp.float32) if has_position else None,
        position_query=pltpu.VMEM((n_query, width), dtype) if has_position else None,
        value_gradient=pltpu.VMEM((geometry.padded_keys, width), jnp.float32),
    )

    blocks = _make_blocks(geometry)
    operand_blocks = _present(blocks.operands, operands)
    padded = _pad_operands(geometry, operands)
    # Gradients that all rows add to are summed in float32.
    dtypes = Operands(
        query=dtype,
        key=dtype,
        value=dtype,
        position_key=jnp.float32,
        content_bias=jnp.float32,
        position_bias=jnp.float32,
    )
    shapes = jax.tree.map(
        lambda array, kind: jax.ShapeDtypeStruct(array.shape, kind),
        padded,
        _present(dtypes, operands),
    )
    residuals = _AttentionResiduals(
        out=_pad_queries(geometry, saved.out),
        out_gradient=_pad_queries(geometry, gradient),
        log_sum=saved.log_sum,
    )
    residual_blocks = _AttentionResiduals(
        out=blocks.operands.query, out_gradient=blocks.operands.query, log_sum=blocks.log_sum
    )
    gradients = _run(
        functools.partial(_backward_kernel, geometry),
        geometry,
        saved.scalars,
        (padded, residuals),
        in_specs=(operand_blocks, residual_blocks),
        out_specs=operand_blocks._replace(key=blocks.all_keys, value=blocks.all_keys),
        out_shape=shapes,
        scratch=scratch,
        backward=True,
    )

    inverse_fraction = saved.scalars.inverse_fraction

    def finish(gradient: jax.Array | None, array: jax.Array | None) -> jax.Array | None:
        if gradient is None or array is None:
            return None
        return (gradient * inverse_fraction).astype(array.dtype)

    position_key = gradients.position_key
    if position_key is not None:
        before, _ = geometry.position_padding
        position_key = position_key[:, before : before + geometry.n_positions]
    unpadded = Operands(
        query=gradients.query[:, :, : geometry.segment_len],
        key=gradients.key[:, :, : geometry.n_keys],
        value=gradients.value[:, :, : geometry.n_keys],
        position_key=finish(position_key, operands.position_key),
        content_bias=finish(gradients.content_bias, operands.content_bias),
        position_bias=finish(gradients.position_bias, operands.position_bias),
    )
    return unpadded, None


_attend.defvjp(_forward, _backward)


def _backward_kernel(
    geometry: Geometry,
    scalars: _Scalars,
    operands: Operands,
    residuals: _AttentionResiduals,
    *rest: Any,
) -> None:
    *outputs, scratch = rest
    gradients = Operands(*outputs)
    step = _current_step(geometry, scalars)
    _begin_backward(step, operands, residuals, gradients, scratch)

    @pl.when(step.is_needed())
    def _add() -> None:
        score_gradient = _score_gradient(step, operands, residuals, scratch)
        keys = step.keys()
        narrow = score_gradient.astype(operands.key.dtype)
        scratch.key_gradient[keys, :] += dot(narrow, scratch.content_query[...], TN)
        scratch.content_gradient[...] += dot(narrow, operands.key[0, 0], NN)
        if not geometry.n_positions:
            return

        # Moved back to their distances, the scores' gradients go to position keys.
        for rows, column in strips(geometry.tile.query):
            positions = step.positions(column, geometry.tile.key + LANES)
            by_distance = unskew(score_gradient[rows]).astype(operands.query.dtype)
            scratch.position_gradient[rows, :] += dot(
                by_distance, operands.position_key[0, positions, :], NN
            )
            gradients.position_key[0, positions, :] += dot(
                by_distance, scratch.position_query[rows, :], TN
            )

    _end_backward(step, gradients, scratch)


def _begin_backward(
    step: "_Step",
    operands: Operands,
    residuals: _AttentionResiduals,
    gradients: Operands,
    scratch: _BackwardScratch,
) -> None:
    """Sets sums to 0 where they begin, and prepares a tile of queries."""
    first_keys = step.key_tile == 0
    first_queries = first_keys & (step.query_tile == 0)

    @pl.when(first_queries & (step.row == 0))
    def _() -> None:
        _clear(gradients.position_key, gradients.content_bias, gradients.position_bias)

    @pl.when(first_queries)
    def _() -> None:
        _clear(scratch.key_gradient, scratch.value_gradient)

    @pl.when(first_keys)
    def _() -> None:
        _bias_queries(step.geometry.scale, operands, scratch.content_query, scratch.position_query)
        _clear(scratch.content_gradient, scratch.position_gradient)
        row = residuals.log_sum[0, 0, 0]
        scratch.log_sum[...] = jnp.broadcast_to(row, (LANES, row.shape[1])).T
        out = residuals.out[0, 0].astype(jnp.float32)
        product = out * residuals.out_gradient[0, 0].astype(jnp.float32)
        sums = jnp.sum(product, axis=1, keepdims=True) * step.scalars.kept_fraction
        scratch.out_product[...] = jnp.broadcast_to(sums, scratch.out_product.shape)


def _score_gradient(
    step: "_Step", operands: Operands, residuals: _AttentionResiduals, scratch: _BackwardScratch
) -> jax.Array:
    """Returns the scores' gradient times 1 - rate, [n, m] in float32.

    The function also adds to the gradient of the values.
    """
    n_key = step.geometry.tile.key
    scores = _tile_scores(step, operands, scratch.content_query, scratch.position_query)
    probabilities = jnp.exp(scores - widen(scratch.log_sum[...], n_key))
    probabilities = jnp.where(step.visible(), probabilities, 0)
    out_gradient = residuals.out_gradient[0, 0]

    # Gradients of the probabilities, and what multiplies the values, after dropout.
    kept_gradient = dot(out_gradient, operands.value[0, 0], NT)
    kept_probabilities = probabilities
    if step.geometry.n_drawn_head is not None:
        kept = step.kept()
        kept_gradient = jnp.where(kept, kept_gradient, 0)
        kept_probabilities = jnp.where(kept, probabilities, 0)
    scratch.value_gradient[step.keys(), :] += dot(
        kept_probabilities.astype(out_gradient.dtype), out_gradient, TN
    )
    return probabilities * (kept_gradient - widen(scratch.out_product[...], n_key))


def _end_backward(step: "_Step", gradients: Operands, scratch: _BackwardScratch) -> None:
    """Writes the sums of a tile of queries, and after the last one the sums of keys and values."""
    geometry = step.geometry
    last_keys = step.key_tile == geometry.n_key_tile - 1
    inverse_fraction = step.scalars.inverse_fraction

    @pl.when(last_keys)
    def _() -> None:
        scale = geometry.scale
        content = scratch.content_gradient[...]
        both = content
        if gradients.content_bias is not None:
            gradients.content_bias[0] += jnp.sum(content, axis=0, keepdims=True) * scale
        if scratch.position_gradient is not None:
            position = scratch.position_gradient[...]
            both = content + position
            if gradients.position_bias is not None:
                gradients.position_bias[0] += jnp.sum(position, axis=0, keepdims=True) * scale
        gradients.query[0, 0] = (both * (inverse_fraction * scale)).astype(gradients.query.dtype)

    @pl.when(last_keys & (step.query_tile == geometry.n_query_tile - 1))
    def _() -> None:
        key_gradient = scratch.key_gradient[...] * inverse_fraction
        gradients.key[0, 0] = key_gradient.astype(gradients.key.dtype)
        value_gradient = scratch.value_gradient[...] * inverse_fraction
        gradients.value[0, 0] = value_gradient.astype(gradients.value.dtype)


def _clear(*references: Any) -> None:
    for reference in references:
        if reference is not None:
            reference[...] = jnp.zeros_like(reference)


class _Step(NamedTuple):
    """One step of the grid."""

    geometry: Geometry
    scalars: _Scalars
    head: jax.Array
    row: jax.Array
    query_tile: jax.Array
    key_tile: jax.Array

    @property
    def key_range(self) -> tuple[jax.Array, jax.Array]:
        """First key that the row's queries may see, and the end of these."""
        return self.scalars.start[self.row], self.scalars.stop[self.row]

    def is_needed(self) -> jax.Array:
        """Returns whether any query of the tile sees any key of it."""
        first, last = self.geometry.key_tiles(self.query_tile, *self.key_range)
        return (first <= self.key_tile) & (self.key_tile <= last)

    def visible(self) -> jax.Array:
        """Returns the visible pairs: bool [n, m] or [1, m]."""
        return self.geometry.visible(self.query_tile, self.key_tile, *self.key_range)

    def kept(self) -> jax.Array:
        """Returns which probabilities dropout keeps: bool [n, m]."""
        assert self.geometry.n_drawn_head is not None  # For mypy.
        seed, threshold, first_row, first_head = (self.scalars.draws[place] for place in range(4))
        row_head = (first_row + self.row) * self.geometry.n_drawn_head + first_head + self.head
        n_query, n_key = self.geometry.tile
        query = self.query_tile * n_query + lax.broadcasted_iota(jnp.int32, (n_query, 1), 0)
        key = self.key_tile * n_key + lax.broadcasted_iota(jnp.int32, (1, n_key), 1)
        return bits(seed, row_head, query, key) >= threshold.astype(jnp.uint32)

    def keys(self) -> Any:
        """Returns the tile's rows of the gradients of all keys."""
        size = self.geometry.tile.key
        return pl.ds(pl.multiple_of(self.key_tile * size, size), size)

    def positions(self, column: int, size: int) -> Any:
        """Returns `size` rows of the position keys or their gradient.

        The rows begin `column` rows behind the tile's first one.
        """
        n_query, n_key = self.geometry.tile
        # The row of the tile's last query and first key.
        first = (
            self.geometry.padded_queries - (self.query_tile + 1) * n_query + self.key_tile * n_key
        )
        # It divides every row at which a strip begins.
        divisor = math.gcd(strip_rows(n_query), n_key)
        return pl.ds(pl.multiple_of(first + column, divisor), size)


def _current_step(geometry: Geometry, scalars: _Scalars) -> _Step:
    """Returns the step of the grid that a kernel is in."""
    return _Step(
        geometry,
        scalars,
        head=pl.program_id(0),
        row=pl.program_id(1),
        query_tile=pl.program_id(2),
        key_tile=pl.program_id(3),
    )


class _Blocks(NamedTuple):
    """The parts of the arrays that are in VMEM at a step."""

    operands: Operands
    all_keys: pl.BlockSpec  # All keys or values of a row and head.
    log_sum: pl.BlockSpec


def _make_blocks(geometry: Geometry) -> _Blocks:
    n_query, n_key = geometry.tile
    width = geometry.d_head

    # A step that is skipped names the keys of its nearest needed one, which fetches nothing.
    def key_block(
        head: Any, row: Any, query_tile: Any, key_tile: Any, start: Any, stop: Any, *_: Any
    ) -> Any:
        first, last = geometry.key_tiles(query_tile, start[row], stop[row])
        return row, head, jnp.maximum(jnp.clip(key_tile, first, last), 0), 0

    query = pl.BlockSpec(
        (1, 1, n_query, width), lambda head, row, query_tile, *_: (row, head, query_tile, 0)
    )
    key = pl.BlockSpec((1, 1, n_key, width), key_block)
    positions = pl.BlockSpec((1, geometry.n_position_rows, width), lambda head, *_: (head, 0, 0))
    bias = pl.BlockSpec((1, 1, width), lambda head, *_: (head, 0, 0))
    all_keys = pl.BlockSpec(
        (1, 1, geometry.padded_keys, width), lambda head, row, *_: (row, head, 0, 0)
    )
    log_sum = pl.BlockSpec(
        (1, 1, 1, 1, n_query), lambda head, row, query_tile, *_: (row, head, query_tile, 0, 0)
    )
    operands = Operands(
        query=query,
        key=key,
        value=key,
        position_key=positions,
        content_bias=bias,
        position_bias=bias,
    )
    return _Blocks(operands, all_keys, log_sum)


def _present(parts: Operands, operands: Operands) -> Operands:
    """Returns the parts that belong to operands, and None where an operand is None."""
    absent = {
        name: None for name, array in zip(Operands._fields, operands, strict=True) if array is None
    }
    return parts._replace(**absent)


def _pad_operands(geometry: Geometry, operands: Operands) -> Operands:
    query = _pad_queries(geometry, operands.query)
    position_key = operands.position_key
    if position_key is not None:
        position_key = pad_rows(position_key, *geometry.position_padding)
    behind = geometry.padded_keys - geometry.n_keys
    return operands._replace(
        query=query,
        key=pad_rows(operands.key, 0, behind),
        value=pad_rows(operands.value, 0, behind),
        position_key=position_key,
    )


def _pad_queries(geometry: Geometry, array: jax.Array) -> jax.Array:
    """Pads [B, H, L, E] to whole tiles of queries."""
    return pad_rows(array, 0, geometry.padded_queries - geometry.segment_len)


def pad_rows(array: jax.Array, before: int, behind: int) -> jax.Array:
    """Adds rows of zeros: [.., n, E] -> [.., before + n + behind, E]."""
    if not before and not behind:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, behind), (0, 0)])


def _run(
    kernel: Callable[..., None],
    geometry: Geometry,
    scalars: _Scalars,
    inputs: tuple[Any, ...],
    *,
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    scratch: Any,
    backward: bool,
) -> Any:
    """Runs a kernel, called with scalars, inputs, outputs and scratch memory, over the grid.

    `scratch` has the shapes of the scratch memory by name. Returns the kernel's outputs.

    Heads come first, so that position keys are fetched once per head and their gradient adds up
    over all rows.
    """

    def function(*refs: Any) -> None:
        n_scalars = len(scalars)
        kernel(_Scalars(*refs[:n_scalars]), *refs[n_scalars:])

    arrays = jax.tree.leaves((inputs, out_shape))
    need = vmem_bytes(geometry, geometry.tile, backward=backward)
    direction = "backward" if backward else "forward"
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(geometry.n_head, geometry.batch, geometry.n_query_tile, geometry.n_key_tile),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=(scratch,),
    )
    compiler_params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=None if need < _DEFAULT_VMEM else need + need // 2,
    )
    call = pl.pallas_call(
        function,
        grid_spec=grid_spec,
        out_shape=out_shape,
        compiler_params=compiler_params,
        cost_estimate=_cost(geometry, arrays, backward=backward),
        interpret=geometry.interpret,
        name=f"relative_attention_{direction}",
    )
    return call(*scalars, *inputs)


def _cost(geometry: Geometry, arrays: list[Any], *, backward: bool) -> pl.CostEstimate:
    """Returns the cost that the compiler is to count for a kernel, with full memory.

    The compiler cannot look into the kernel.

    Each input and output counts once, and keys and values again for each further tile of queries
    that reads them. The compiler adds its own copies of inputs from HBM to VMEM, so that its sum is
    too large rather than too small.
    """
    n_query, n_key = geometry.tile
    rows = geometry.batch * geometry.n_head
    pairs = rows * geometry.n_tile * n_query * n_key

    # Products of 2 n m E operations for each tile, with the keys and with the position keys.
    n_products = 5 if backward else 2
    n_position_products = 3 if backward else 1
    products = float(n_products)
    if geometry.n_positions:
        products += n_position_products * (1 + LANES / n_key)

    # Tiles of keys and values that are read again. A single tile stays where it is.
    tiles_again = 0
    if geometry.n_key_tile > 1:
        tiles_again = max(geometry.n_tile - geometry.n_key_tile, 0)
    bytes_once = sum(array.size * array.dtype.itemsize for array in arrays)
    bytes_of_tile = n_key * geometry.d_head * arrays[0].dtype.itemsize
    return pl.CostEstimate(
        flops=int(2 * pairs * geometry.d_head * products),
        transcendentals=pairs,
        bytes_accessed=bytes_once + 2 * rows * tiles_again * bytes_of_tile,
    )


# Tiles of scores inside kernels: products, the term by distance, and rows of numbers.


def _bias_queries(
    scale: float, operands: Operands, content_query: Any, position_query: Any
) -> None:
    """Writes the queries of a tile with u and with v, both divided by sqrt(E).

    Because of this, no score has to be divided.
    """
    query = operands.query[0, 0]
    targets = (
        (content_query, operands.content_bias),
        (position_query, operands.position_bias),
    )
    for target, bias in targets:
        if target is None:
            continue
        wide = query.astype(jnp.float32)
        if bias is not None:
            wide = wide + bias[0].astype(jnp.float32)
        target[...] = (wide * scale).astype(target.dtype)


def _tile_scores(
    step: _Step, operands: Operands, content_query: Any, position_query: Any
) -> jax.Array:
    """Computes the scores of a tile, [n, m] in float32, before any mask."""
    scores = dot(content_query[...], operands.key[0, 0], NT)
    if position_query is None:
        return scores
    query = position_query[...]
    by_key = []
    for rows, column in strips(query.shape[0]):
        positions = step.positions(column, step.geometry.tile.key + LANES)
        position_key = operands.position_key[0, positions, :]
        by_distance = dot(query[rows], position_key, NT)
        by_key.append(skew(by_distance, step.geometry.rotate))
    return scores + (by_key[0] if len(by_key) == 1 else jnp.concatenate(by_key, axis=0))


def strips(n_query: int) -> list[tuple[slice, int]]:
    """Returns the rows of each strip of a tile and the column where it begins.

    Columns are by distance. The strip's first column is this column of the tile.
    """
    rows = strip_rows(n_query)
    return [
        (slice(first, first + rows), n_query - rows - first) for first in range(0, n_query, rows)
    ]


def dot(left: jax.Array, right: jax.Array, contracted: Contracted) -> jax.Array:
    """Multiplies two matrices with sums in float32.

    Float32 is multiplied as float32: by default the matrix unit rounds it to bfloat16. For bfloat16
    the precision must be given too: Mosaic refuses the highest ("Bad lhs type"), which a global
    `jax_default_matmul_precision` would set.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left, right, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def widen(rows: jax.Array, width: int) -> jax.Array:
    """Widens one number per row to `width` lanes: [n, 128] -> [n, width].

    The number is stored as 128 equal lanes.

    Reading one lane of a reference and broadcasting it instead took 30 % longer in the whole
    forward kernel.
    """
    if width > LANES:
        rows = jnp.tile(rows, (1, math.ceil(width / LANES)))
    if rows.shape[1] == width:
        return rows
    return rows[:, :width]


def _lane_sums(array: jax.Array) -> jax.Array:
    """Adds up the registers of each row, lane by lane: [n, m] -> [n, 128].

    The lanes themselves wait for the end.
    """
    total = array[:, :LANES]
    for first in range(LANES, array.shape[1], LANES):
        total = total + array[:, first : first + LANES]
    return total


def skew(by_distance: jax.Array, rotate: bool) -> jax.Array:
    """Moves the scores of a strip from "column = distance" to "column = key".

    The shapes are [n, m + 128] -> [n, m], in float32.

    Column p is of the distance that the last query and key p have. n is at most 128 and for a
    rotation (`rotate`; else a gather) a multiple of 8, m a multiple of 128.
    """
    n_query, width = by_distance.shape
    if rotate:
        # Row x turns right by W - n + 1 + x, that is left by n - 1 - x.
        turned = pltpu.roll(by_distance, width - n_query + 1, 1, stride=1, stride_axis=0)
        return turned[:, : width - LANES]

    # Within each register, and then from the register itself or its right neighbour.
    column = _lane(n_query) + _shift(n_query)
    lane = column & (LANES - 1)
    is_near = column < LANES
    blocks = [_gather(block, lane) for block in _blocks(by_distance)]
    return _join([jnp.where(is_near, near, far) for near, far in itertools.pairwise(blocks)])


def skew_from(by_distance: jax.Array, first: jax.Array) -> jax.Array:
    """Moves scores as `skew` does, from any column `first` below 128 on.

    The shapes are [n, m + 256] -> [n, m], in float32.
    """
    n_query = by_distance.shape[0]
    column = _lane(n_query) + _shift(n_query) + first
    lane = column & (LANES - 1)
    is_near = column < LANES
    is_far = column >= 2 * LANES
    blocks = [_gather(block, lane) for block in _blocks(by_distance)]
    moved = []
    for near, middle, far in zip(blocks, blocks[1:], blocks[2:], strict=False):
        moved.append(jnp.where(is_near, near, jnp.where(is_far, far, middle)))
    return _join(moved)


def unskew(scores: jax.Array) -> jax.Array:
    """Moves [n, m] to the columns of [n, m + 128] where `skew` reads them.

    All other entries are zeros. This is the transpose of `skew`.
    """
    n_query = scores.shape[0]
    column = _lane(n_query) - _shift(n_query)
    lane = column & (LANES - 1)
    is_near = column >= 0
    none = jnp.zeros((n_query, LANES), scores.dtype)
    blocks = [none, *(_gather(block, lane) for block in _blocks(scores)), none]
    return _join([jnp.where(is_near, near, far) for far, near in itertools.pairwise(blocks)])


def _lane(n_query: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (n_query, LANES), 1)


def _shift(n_query: int) -> jax.Array:
    """Returns by how much each row moves, [n, 128]."""
    return n_query - 1 - lax.broadcasted_iota(jnp.int32, (n_query, LANES), 0)


def _gather(block: jax.Array, lane: jax.Array) -> jax.Array:
    # Mosaic refuses a gather without the promise, and one over more than 128 columns: "Multiple
    # source vregs along gather dimension".
    return jnp.take_along_axis(block, lane, axis=1, mode="promise_in_bounds")


def _blocks(array: jax.Array) -> list[jax.Array]:
    return [array[:, first : first + LANES] for first in range(0, array.shape[1], LANES)]


def _join(blocks: list[jax.Array]) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
