"""Attention over [memory; segment] with gradients, by a forward and a backward kernel.

The definition is `ops.attention.reference.attention`; tests/ops/attention/test_training.py compares
the kernels with it, interpreted, and tests/ops/attention/tpu compiles them for chips that are not
there.

The forward kernel is an online softmax over the tiles of keys (Dao et al., 2022), with the term by
distance. The backward kernel computes all gradients in one pass over the tiles, from scores that
are computed once more. With p the probabilities, d their dropout (0 or 1 / (1 - rate)) and o the
output, a pair's score has the gradient

    ds = p (d (do . v) - do . o)

which goes to q + u and k through the keys, and, moved back to its distance, to q + v and r through
the position keys. The kernel leaves the factor 1 / (1 - rate) out of d, multiplies do . o by 1 -
rate instead, and the sums at the end.

The relative shift happens in vector registers. A strip of n queries (at most 128) and m keys needs
the scores of n + m - 1 distances, largest first; query x meets key y at column n - 1 - x + y of
them. So row x moves to the left by n - 1 - x: at most 127 columns, one register of 128 lanes, which
bounds what a row gathers from to a register and its right neighbour. For n = 3, m = 2, entry `xp`
of query x and column p:

    00 01 02 03        02 03
    10 11 12 13   ->   11 12
    20 21 22 23        20 21

Two ways, for float32 (Mosaic rotates no packed types: "unsupported packed type rotation"):

    rotation  one strided rotation; TPU v5 and later. It turns later rows further to the right only,
              so it cannot undo itself: a rotation with a negative stride does not compile.
    gather    a gather of lanes within each register, then a choice of one of two neighbours; TPU v4
              and later.
"""

import functools
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
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

# The score of a pair that is masked; finite, as the difference of two infinities is not a number.
HIDDEN = -1e30
# Below, what the compiler grants without being asked (16 MiB) is enough.
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

    `problem` describes the arrays. `tile` is rounded to what the registers take. `kernel` says how
    a tile is skewed: "mosaic_roll" (TPU v5 and later) or "mosaic_gather" (v4 and later). Any device
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
    biases = {name: getattr(operands, name) for name in ("content_bias", "position_bias")}
    rows = {name: None if bias is None else bias[:, None, :] for name, bias in biases.items()}
    return _attend(geometry, operands._replace(**rows), _make_scalars(visibility, dropout)).astype(
        operands.value.dtype
    )


# Here `Operands` are also gradients, and in a kernel references to their blocks. Biases are
# [H, 1, E].


class _Scalars(NamedTuple):
    """Numbers that the kernels read from scalar memory. `draws` only with dropout."""

    start: Any  # int32 [B], first key that the queries of a row may see.
    stop: Any  # int32 [B], end of these keys.
    draws: Any  # int32 [4]: seed, threshold, first row, first head.
    keep: Any  # float32 [2]: 1 - rate, 1 / (1 - rate).


def _make_scalars(visibility: Visibility, dropout: ProbabilityDropout | None) -> _Scalars:
    start, stop = visibility.key_range()
    if dropout is None:
        return _Scalars(start, stop, jnp.zeros(4, jnp.int32), jnp.ones(2, jnp.float32))
    words = (jnp.asarray(dropout.seed).astype(jnp.uint32), dropout.threshold())
    seed, threshold = (lax.bitcast_convert_type(word, jnp.int32) for word in words)
    first_row, first_head = (
        jnp.asarray(first, jnp.int32) for first in (dropout.first_row, dropout.first_head)
    )
    keep = 1 - jnp.asarray(dropout.rate, jnp.float32)
    return _Scalars(
        start,
        stop,
        jnp.stack([seed, threshold, first_row, first_head]),
        jnp.stack([keep, 1 / keep]),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(geometry: Geometry, operands: Operands, scalars: _Scalars) -> jax.Array:
    return _forward(geometry, operands, scalars)[0]


def _forward(
    geometry: Geometry, operands: Operands, scalars: _Scalars
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the attention [B, H, L, E], and the residuals.

    The last residual is the logarithm of each query's sum, [B, H, tiles of queries, 1, n] in
    float32. A query that sees no key gets zeros, and a logarithm so large that its probabilities
    come out as 0.
    """
    rows, width = geometry.tile.query, geometry.d_head
    blocks, _, log_sum_block = _make_blocks(geometry)
    padded = _pad_operands(geometry, operands)
    dtype, wide = operands.query.dtype, jnp.float32
    scratch = {  # Over the tiles of keys.
        # With u.
        "content_query": pltpu.VMEM((rows, width), dtype),
        # With v.
        "position_query": pltpu.VMEM((rows, width), dtype) if geometry.n_positions else None,
        # The largest score so far, in every lane.
        "top": pltpu.VMEM((rows, LANES), wide),
        # Sums of exp(score - top), each lane its own part.
        "total": pltpu.VMEM((rows, LANES), wide),
        # Sum of exp(score - top) * value.
        "weighted": pltpu.VMEM((rows, width), wide),
    }
    # A tile of any size is a row.
    log_sum_shape = (geometry.batch, geometry.n_head, geometry.n_query_tile, 1, rows)
    out, log_sum = _run(
        functools.partial(_forward_kernel, geometry),
        geometry,
        scalars,
        (padded,),
        in_specs=(_present(blocks, operands),),
        out_specs=(blocks.query, log_sum_block),
        out_shape=(
            jax.ShapeDtypeStruct(padded.query.shape, dtype),
            jax.ShapeDtypeStruct(log_sum_shape, wide),
        ),
        scratch=scratch,
        backward=False,
    )
    out = mark_as_saved(out[:, :, : geometry.segment_len], OUTPUT)
    log_sum = mark_as_saved(log_sum, LOG_TOTAL)
    return out, (operands, scalars, out, log_sum)


def _forward_kernel(
    geometry: Geometry,
    scalars: _Scalars,
    operands: Operands,
    out_ref: Any,
    log_sum_ref: Any,
    scratch: SimpleNamespace,
) -> None:
    step = _Step(geometry, scalars, *map(pl.program_id, range(4)))

    @pl.when(step.key_tile == 0)
    def _begin() -> None:
        _bias_queries(step.geometry.scale, operands, scratch.content_query, scratch.position_query)
        scratch.top[...] = jnp.full_like(scratch.top, HIDDEN)
        _clear(scratch.total, scratch.weighted)

    @pl.when(step.is_needed())
    def _add() -> None:
        # 1s that a row sums before its first visible key fade to 0 then.
        scores = _tile_scores(step, operands, scratch.content_query, scratch.position_query)
        scores = jnp.where(step.visible(), scores, HIDDEN)
        value, old_top = operands.value[0, 0], scratch.top[...]
        top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - widen(top, geometry.tile.key))
        fade = jnp.exp(old_top - top)
        scratch.top[...] = top
        scratch.total[...] = fade * scratch.total[...] + _lane_sums(weights)
        if geometry.n_drawn_head is not None:
            weights = jnp.where(step.kept(), weights, 0)
        added = dot(weights.astype(value.dtype), value, NN)
        scratch.weighted[...] = widen(fade, geometry.d_head) * scratch.weighted[...] + added

    @pl.when(step.key_tile == geometry.n_key_tile - 1)
    def _end() -> None:
        top = scratch.top[...]
        total = jnp.broadcast_to(jnp.sum(scratch.total[...], axis=1, keepdims=True), top.shape)
        sees = top > HIDDEN
        inverse = jnp.where(sees, step.scalars.keep[1] / total, 0)
        out_ref[0, 0] = (scratch.weighted[...] * widen(inverse, geometry.d_head)).astype(
            out_ref.dtype
        )
        log_sum = jnp.where(sees, top + jnp.log(total), -HIDDEN)
        # One number per row: 128 equal ones were most of the temporary memory.
        log_sum_ref[0, 0, 0] = log_sum.T[:1]


class _Residuals(NamedTuple):
    """Arrays that the backward pass reads besides the operands."""

    out: Any  # [B, H, L, E]
    out_gradient: Any  # [B, H, L, E]
    log_sum: Any  # float32 [B, H, tiles of queries, 1, n]


def _backward(
    geometry: Geometry,
    saved: tuple[Any, ...],
    gradient: jax.Array,
) -> tuple[Operands, None]:
    """Returns the gradients of the operands.

    The kernel adds up those with [H, ...] in float32 over all rows.
    """
    operands, scalars, out, log_sum = saved
    rows, width = geometry.tile.query, geometry.d_head
    blocks, all_keys, log_sum_block = _make_blocks(geometry)
    padded = _pad_operands(geometry, operands)
    dtype, wide = operands.query.dtype, jnp.float32
    has_position = geometry.n_positions > 0
    scratch = {  # Over the tiles of keys, and the last two over all tiles of a row and head.
        # With u.
        "content_query": pltpu.VMEM((rows, width), dtype),
        # With v.
        "position_query": pltpu.VMEM((rows, width), dtype) if has_position else None,
        # In every lane.
        "log_sum": pltpu.VMEM((rows, LANES), wide),
        # (1 - rate) do . o in every lane.
        "out_product": pltpu.VMEM((rows, LANES), wide),
        # Of the queries through the keys.
        "content_gradient": pltpu.VMEM((rows, width), wide),
        # Through position keys.
        "position_gradient": pltpu.VMEM((rows, width), wide) if has_position else None,
        "key_gradient": pltpu.VMEM((geometry.padded_keys, width), wide),
        "value_gradient": pltpu.VMEM((geometry.padded_keys, width), wide),
    }
    present = _present(Operands(dtype, dtype, dtype, wide, wide, wide), operands)
    shapes = jax.tree.map(
        lambda array, kind: jax.ShapeDtypeStruct(array.shape, kind), padded, present
    )
    given = _present(blocks, operands)
    residuals = _Residuals(_pad_queries(geometry, out), _pad_queries(geometry, gradient), log_sum)
    gradients = _run(
        functools.partial(_backward_kernel, geometry),
        geometry,
        scalars,
        (padded, residuals),
        in_specs=(given, _Residuals(blocks.query, blocks.query, log_sum_block)),
        out_specs=given._replace(key=all_keys, value=all_keys),
        out_shape=shapes,
        scratch=scratch,
        backward=True,
    )

    inverse_keep = scalars.keep[1]

    def finish(gradient: jax.Array | None, array: jax.Array | None) -> jax.Array | None:
        return (
            None
            if gradient is None or array is None
            else (gradient * inverse_keep).astype(array.dtype)
        )

    position_key = gradients.position_key
    if position_key is not None:
        before, _ = geometry.position_padding
        position_key = position_key[:, before : before + geometry.n_positions]
    of_operands = Operands(
        query=gradients.query[:, :, : geometry.segment_len],
        key=gradients.key[:, :, : geometry.n_keys],
        value=gradients.value[:, :, : geometry.n_keys],
        position_key=finish(position_key, operands.position_key),
        content_bias=finish(gradients.content_bias, operands.content_bias),
        position_bias=finish(gradients.position_bias, operands.position_bias),
    )
    return of_operands, None


_attend.defvjp(_forward, _backward)


def _backward_kernel(
    geometry: Geometry, scalars: _Scalars, operands: Operands, residuals: _Residuals, *rest: Any
) -> None:
    *outputs, scratch = rest
    gradients = Operands(*outputs)
    step = _Step(geometry, scalars, *map(pl.program_id, range(4)))
    _begin_backward(step, operands, residuals, gradients, scratch)

    @pl.when(step.is_needed())
    def _add() -> None:
        score_gradient = _score_gradient(step, operands, residuals, scratch)
        keys, narrow = step.keys(), score_gradient.astype(operands.key.dtype)
        scratch.key_gradient[keys, :] += dot(narrow, scratch.content_query[...], TN)
        scratch.content_gradient[...] += dot(narrow, operands.key[0, 0], NN)
        if not geometry.n_positions:
            return
        for rows, at in strips(geometry.tile.query):
            positions = step.positions(at, geometry.tile.key + LANES)
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
    residuals: _Residuals,
    gradients: Operands,
    scratch: SimpleNamespace,
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
        product = residuals.out[0, 0].astype(jnp.float32) * residuals.out_gradient[0, 0].astype(
            jnp.float32
        )
        sums = jnp.sum(product, axis=1, keepdims=True) * step.scalars.keep[0]
        scratch.out_product[...] = jnp.broadcast_to(sums, scratch.out_product.shape)


def _score_gradient(
    step: "_Step", operands: Operands, residuals: _Residuals, scratch: SimpleNamespace
) -> jax.Array:
    """Returns the scores' gradient times 1 - rate, [n, m] in float32.

    The function also adds to the gradient of the values.
    """
    n_key = step.geometry.tile.key
    scores = _tile_scores(step, operands, scratch.content_query, scratch.position_query)
    probabilities = jnp.exp(scores - widen(scratch.log_sum[...], n_key))
    probabilities = jnp.where(step.visible(), probabilities, 0)
    out_gradient = residuals.out_gradient[0, 0]
    kept_gradient, kept_probabilities = dot(out_gradient, operands.value[0, 0], NT), probabilities
    if step.geometry.n_drawn_head is not None:
        kept = step.kept()
        kept_gradient = jnp.where(kept, kept_gradient, 0)
        kept_probabilities = jnp.where(kept, probabilities, 0)
    scratch.value_gradient[step.keys(), :] += dot(
        kept_probabilities.astype(out_gradient.dtype), out_gradient, TN
    )
    return probabilities * (kept_gradient - widen(scratch.out_product[...], n_key))


def _end_backward(step: "_Step", gradients: Operands, scratch: SimpleNamespace) -> None:
    """Writes the sums of a tile of queries, and after the last one the sums of keys and values."""
    geometry = step.geometry
    last_keys = step.key_tile == geometry.n_key_tile - 1
    inverse_keep = step.scalars.keep[1]

    @pl.when(last_keys)
    def _() -> None:
        content, scale = scratch.content_gradient[...], geometry.scale
        both = content
        if gradients.content_bias is not None:
            gradients.content_bias[0] += jnp.sum(content, axis=0, keepdims=True) * scale
        if scratch.position_gradient is not None:
            position = scratch.position_gradient[...]
            both = content + position
            if gradients.position_bias is not None:
                gradients.position_bias[0] += jnp.sum(position, axis=0, keepdims=True) * scale
        gradients.query[0, 0] = (both * (inverse_keep * scale)).astype(gradients.query.dtype)

    @pl.when(last_keys & (step.query_tile == geometry.n_query_tile - 1))
    def _() -> None:
        gradients.key[0, 0] = (scratch.key_gradient[...] * inverse_keep).astype(gradients.key.dtype)
        gradients.value[0, 0] = (scratch.value_gradient[...] * inverse_keep).astype(
            gradients.value.dtype
        )


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
        seed, threshold, first_row, first_head = (self.scalars.draws[at] for at in range(4))
        row_head = (first_row + self.row) * self.geometry.n_drawn_head + first_head + self.head
        n_query, n_key = self.geometry.tile
        query = self.query_tile * n_query + lax.broadcasted_iota(jnp.int32, (n_query, 1), 0)
        key = self.key_tile * n_key + lax.broadcasted_iota(jnp.int32, (1, n_key), 1)
        return bits(seed, row_head, query, key) >= threshold.astype(jnp.uint32)

    def keys(self) -> Any:
        """Returns the tile's rows of the gradients of all keys."""
        size = self.geometry.tile.key
        return pl.ds(pl.multiple_of(self.key_tile * size, size), size)

    def positions(self, at: int, size: int) -> Any:
        """Returns `size` rows of the position keys or their gradient.

        The rows begin `at` rows behind the tile's first one.
        """
        n_query, n_key = self.geometry.tile
        # The row of the tile's last query and first key.
        first = (
            self.geometry.padded_queries - (self.query_tile + 1) * n_query + self.key_tile * n_key
        )
        divisor = math.gcd(strip_rows(n_query), n_key)  # Of every row at which a strip begins.
        return pl.ds(pl.multiple_of(first + at, divisor), size)


def _make_blocks(geometry: Geometry) -> tuple[Operands, pl.BlockSpec, pl.BlockSpec]:
    """Returns the parts of the arrays that are in VMEM at a step.

    These are the parts of the operands, of the gradients of all keys, and of the log sums.
    """
    (n_query, n_key), width = geometry.tile, geometry.d_head

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
    return Operands(query, key, key, positions, bias, bias), all_keys, log_sum


def _present(of_all: Operands, operands: Operands) -> Operands:
    """Returns what belongs to the operands that are not None."""
    return Operands(
        *(None if array is None else part for array, part in zip(operands, of_all, strict=True))
    )


def _pad_operands(geometry: Geometry, operands: Operands) -> Operands:
    query, key, value, position_key, *biases = operands
    query, behind = _pad_queries(geometry, query), geometry.padded_keys - geometry.n_keys
    if position_key is not None:
        position_key = pad_rows(position_key, *geometry.position_padding)
    return Operands(
        query, pad_rows(key, 0, behind), pad_rows(value, 0, behind), position_key, *biases
    )


def _pad_queries(geometry: Geometry, array: jax.Array) -> jax.Array:
    """Pads [B, H, L, E] to whole tiles of queries."""
    return pad_rows(array, 0, geometry.padded_queries - geometry.segment_len)


def pad_rows(array: jax.Array, before: int, behind: int) -> jax.Array:
    """Adds rows of zeros: [.., n, E] -> [.., before + n + behind, E]."""
    return (
        jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, behind), (0, 0)])
        if before or behind
        else array
    )


def _run(
    kernel: Callable[..., None],
    geometry: Geometry,
    scalars: _Scalars,
    inputs: tuple[Any, ...],
    *,
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    scratch: dict[str, Any],
    backward: bool,
) -> Any:
    """Runs a kernel, called with scalars, inputs, outputs and scratch memory, over the grid.

    Returns its outputs.

    Heads come first, so that position keys are fetched once per head and their gradient adds up
    over all rows.
    """

    def function(*refs: Any) -> None:
        *arrays, of_scratch = refs[len(scalars) :]
        kernel(_Scalars(*refs[: len(scalars)]), *arrays, SimpleNamespace(**of_scratch))

    arrays = jax.tree.leaves((inputs, out_shape))
    need = vmem_bytes(geometry, geometry.tile, backward=backward)
    return pl.pallas_call(
        function,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(geometry.n_head, geometry.batch, geometry.n_query_tile, geometry.n_key_tile),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=(scratch,),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=None if need < _DEFAULT_VMEM else need + need // 2,
        ),
        cost_estimate=_cost(geometry, arrays, backward=backward),
        interpret=geometry.interpret,
        name=f"relative_attention_{'backward' if backward else 'forward'}",
    )(*scalars, *inputs)


def _cost(geometry: Geometry, arrays: list[Any], *, backward: bool) -> pl.CostEstimate:
    """Returns the cost that the compiler is to count for a kernel, with full memory.

    The compiler cannot look into the kernel.

    Each input and output counts once, and keys and values again for each further tile of queries
    that reads them. The compiler adds its own copies of inputs from HBM to VMEM, so that its sum is
    too large rather than too small.
    """
    rows, n_query, n_key = geometry.batch * geometry.n_head, *geometry.tile
    pairs = rows * geometry.n_tile * n_query * n_key
    # Of 2 n m E operations for each tile.
    n_product, n_position_product = (5, 3) if backward else (2, 1)
    by_distance = n_position_product * (1 + LANES / n_key) if geometry.n_positions else 0
    once = sum(array.size * array.dtype.itemsize for array in arrays)
    again = max(geometry.n_tile - geometry.n_key_tile, 0) if geometry.n_key_tile > 1 else 0
    return pl.CostEstimate(
        flops=int(2 * pairs * geometry.d_head * (n_product + by_distance)),
        transcendentals=pairs,
        bytes_accessed=once + 2 * rows * again * n_key * geometry.d_head * arrays[0].dtype.itemsize,
    )


# Tiles of scores inside kernels: products, the term by distance, and rows of numbers.


def _bias_queries(
    scale: float, operands: Operands, content_query: Any, position_query: Any
) -> None:
    """Writes the queries of a tile with u and with v, both divided by sqrt(E).

    Because of this, no score has to be divided.
    """
    query = operands.query[0, 0]
    for target, bias in (
        (content_query, operands.content_bias),
        (position_query, operands.position_bias),
    ):
        if target is not None:
            wide = query.astype(jnp.float32)
            wide = wide if bias is None else wide + bias[0].astype(jnp.float32)
            target[...] = (wide * scale).astype(target.dtype)


def _tile_scores(
    step: _Step, operands: Operands, content_query: Any, position_query: Any
) -> jax.Array:
    """Computes the scores of a tile, [n, m] in float32, before any mask."""
    scores = dot(content_query[...], operands.key[0, 0], NT)
    if position_query is None:
        return scores
    query, parts = position_query[...], []
    for rows, at in strips(query.shape[0]):
        position_key = operands.position_key[
            0, step.positions(at, step.geometry.tile.key + LANES), :
        ]
        parts.append(skew(dot(query[rows], position_key, NT), step.geometry.rotate))
    return scores + (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0))


def strips(n_query: int) -> list[tuple[slice, int]]:
    """Returns the rows of each strip of a tile and the column where it begins.

    Columns are by distance. The strip's first column is this column of the tile.
    """
    rows = strip_rows(n_query)
    return [(slice(at, at + rows), n_query - rows - at) for at in range(0, n_query, rows)]


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
    return rows if rows.shape[1] == width else rows[:, :width]


def _lane_sums(array: jax.Array) -> jax.Array:
    """Adds up the registers of each row, lane by lane: [n, m] -> [n, 128].

    The lanes themselves wait for the end.
    """
    total = array[:, :LANES]
    for at in range(LANES, array.shape[1], LANES):
        total = total + array[:, at : at + LANES]
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
        return pltpu.roll(by_distance, width - n_query + 1, 1, stride=1, stride_axis=0)[
            :, : width - LANES
        ]
    column = _lane(n_query) + _shift(n_query)
    lane, is_near = column & (LANES - 1), column < LANES
    turned = [_gather(block, lane) for block in _blocks(by_distance)]
    return _join([jnp.where(is_near, near, far) for near, far in itertools.pairwise(turned)])


def skew_from(by_distance: jax.Array, first: jax.Array) -> jax.Array:
    """Moves scores as `skew` does, from any column `first` below 128 on.

    The shapes are [n, m + 256] -> [n, m], in float32.
    """
    n_query = by_distance.shape[0]
    column = _lane(n_query) + _shift(n_query) + first
    lane, is_near, is_far = column & (LANES - 1), column < LANES, column >= 2 * LANES
    turned = [_gather(block, lane) for block in _blocks(by_distance)]
    triples = zip(turned, turned[1:], turned[2:], strict=False)
    return _join(
        [jnp.where(is_near, near, jnp.where(is_far, far, middle)) for near, middle, far in triples]
    )


def unskew(scores: jax.Array) -> jax.Array:
    """Moves [n, m] to the columns of [n, m + 128] where `skew` reads them.

    All other entries are zeros. This is the transpose of `skew`.
    """
    n_query = scores.shape[0]
    column = _lane(n_query) - _shift(n_query)
    lane, is_near = column & (LANES - 1), column >= 0
    none = jnp.zeros((n_query, LANES), scores.dtype)
    turned = [none, *(_gather(block, lane) for block in _blocks(scores)), none]
    return _join([jnp.where(is_near, near, far) for far, near in itertools.pairwise(turned)])


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
    return [array[:, at : at + LANES] for at in range(0, array.shape[1], LANES)]


def _join(blocks: list[jax.Array]) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
