"""Attention over a KV cache as a Pallas kernel for inference.

The ring is read in place, and no scores are written.

The definition is `ops.attention.reference.cached_attention`; tests/ops/attention/test_cached.py
compares with it, interpreted.

A key's place is its rank by age: 0 is the ring's oldest slot, R the segment's first key; query i
meets place j at the distance R + i - j. Softmax does not ask for an order, so the ring's blocks are
read as they lie. The slots before `write_index` are the newer ones. Places rise by one from slot to
slot, but fall by R at the write index. The block that has both kinds of slots is added once for
each. For R = 12 in blocks of 4, write index 6:

    slot    0  1  2  3 | 4  5  6  7 | 8  9 10 11
    place   6  7  8  9 |10 11  0  1 | 2  3  4  5

    added   block 0: places from 6; block 1: from 10, where slots 4 and 5 count; block 1 again: from
            -2, where 6 and 7 count; block 2: from 2

R need not be a multiple of the block: what lies behind the last slot is masked.

Within a block of n queries and m keys, query x and key y meet at a distance that falls by one with
each key, so the scores of a block are n + m - 1 columns of the product with the position keys, each
row moved by one (`kernels.skew`). Those columns start anywhere, since the write index does;
position keys lie along the lanes of registers, of which only aligned groups of 128 can be read. So
a row moves by up to 254 columns and not by 127, which takes one more gather.

With a clamp, a block whose distances all exceed it needs no product with position keys: one number
per query, computed once. At M = 3800 in blocks of 1024 with a clamp of 1000 at least half of the
blocks are such.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.masks import CachedVisibility
from txl_jax.ops.attention.problem import AttentionCall, CachedOperands, Tile
from txl_jax.ops.attention.tpu.geometry import (
    DEFAULT_VMEM,
    LANES,
    SPARE_VMEM,
    CachedSizes,
    round_up,
)
from txl_jax.ops.attention.tpu.kernels import (
    HIDDEN,
    NN,
    NT,
    Contracted,
    dot,
    pad_rows,
    skew_from,
    widen,
)


def tpu_cached_attention(
    problem: AttentionCall,
    operands: CachedOperands,
    visibility: CachedVisibility,
    *,
    tile: Tile,
    interpret: bool = False,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    `problem` describes the arrays. A tile has a multiple of 16 queries up to 128 or a multiple of
    128, and a multiple of 128 slots.
    """
    query, key, value, ring, position = operands
    position_query, table, scores = position or (None, None, None)
    assert position is None or (table is not None and scores is None), (
        "refused: position scores, or no keys"
    )
    sizes, segment_len = CachedSizes.of(problem, tile), problem.segment_len
    queries_behind = round_up(segment_len, sizes.query_block) - segment_len
    keys_behind = sizes.n_own * sizes.own_block - segment_len
    arrays = {
        "query": pad_rows(query, 0, queries_behind),
        "key": pad_rows(key, 0, keys_behind),
        "value": pad_rows(value, 0, keys_behind),
    }
    if table is not None and position_query is not None:
        arrays["position_query"] = pad_rows(position_query, 0, queries_behind)
        arrays["position_key"] = table[..., -sizes.n_positions :]
    if sizes.capacity:
        arrays |= {
            "ring_key": ring[0],
            "ring_value": ring[1].swapaxes(2, 3) if sizes.value_columns else ring[1],
        }
    return _call(arrays, visibility, sizes, interpret=interpret)[:, :, :segment_len]


def _call(
    operands: dict[str, jax.Array],
    visibility: CachedVisibility,
    sizes: CachedSizes,
    *,
    interpret: bool,
) -> jax.Array:
    """Runs the kernel over (head, row, block of queries, step).

    Heads come first, so that a table is read once per head.
    """
    batch, n_head, padded, width = operands["query"].shape
    specs = _block_specs(sizes)
    scratch: dict[str, Any] = {
        "top": pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32),
        "total": pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32),
        "summed": pltpu.VMEM((sizes.heads, sizes.query_block, width), jnp.float32),
    }
    if sizes.n_positions:
        scratch["table"] = pltpu.VMEM(
            (sizes.heads, width, sizes.table_columns), operands["position_key"].dtype
        )
    if sizes.clamped:
        scratch["far"] = pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32)
    names = ("valid", "write_index", *operands, "output", *scratch)
    return pl.pallas_call(
        functools.partial(_kernel, names=names, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(
                n_head // sizes.heads,
                batch,
                padded // sizes.query_block,
                max(sizes.n_ring, sizes.n_own),
            ),
            in_specs=[specs[name] for name in operands],
            out_specs=specs["query"],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct(operands["query"].shape, operands["value"].dtype),
        # Rows may not be split among cores: the first row of a head makes its table.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=None
            if sizes.vmem_bytes <= DEFAULT_VMEM
            else sizes.vmem_bytes + SPARE_VMEM,
        ),
        cost_estimate=_cost(operands, sizes),
        interpret=interpret,
        name="cached_attention",
    )(visibility.valid, visibility.write_index[None], *operands.values())


def _block_specs(sizes: CachedSizes) -> dict[str, pl.BlockSpec]:
    """Returns what each step reads. A block that stays the same is not fetched again."""
    heads, width, last_ring, last_own = sizes.heads, sizes.width, sizes.n_ring - 1, sizes.n_own - 1
    queries = pl.BlockSpec(
        (1, heads, sizes.query_block, width), lambda h, b, a, t, *_: (b, h, a, 0)
    )
    own = pl.BlockSpec(
        (1, heads, sizes.own_block, width),
        lambda h, b, a, t, *_: (b, h, jnp.minimum(t, last_own), 0),
    )
    of_columns, of_rows = (1, heads, width, sizes.ring_block), (1, heads, sizes.ring_block, width)
    columns = pl.BlockSpec(of_columns, lambda h, b, a, t, *_: (b, h, 0, jnp.minimum(t, last_ring)))
    rows = pl.BlockSpec(of_rows, lambda h, b, a, t, *_: (b, h, jnp.minimum(t, last_ring), 0))
    return {
        "query": queries,
        "position_query": queries,
        "position_key": pl.BlockSpec(
            (heads, width, sizes.n_positions), lambda h, b, a, t, *_: (h, 0, 0)
        ),
        "ring_key": columns,
        "ring_value": columns if sizes.value_columns else rows,
        "key": own,
        "value": own,
    }


def _cost(operands: dict[str, jax.Array], sizes: CachedSizes) -> pl.CostEstimate:
    """Returns the work of the kernel, into which the compiler cannot look.

    Keys are read once per block of queries.
    """
    batch, n_head, padded, width = operands["query"].shape
    pairs = batch * n_head * padded * (sizes.capacity + sizes.n_own * sizes.own_block)
    by_distance = batch * n_head * padded * sizes.n_positions
    size = {name: array.size * array.dtype.itemsize for name, array in operands.items()}
    again = padded // sizes.query_block - 1
    keys = sum(size[name] for name in ("ring_key", "ring_value", "key", "value") if name in size)
    return pl.CostEstimate(
        flops=2 * width * (2 * pairs + by_distance),
        transcendentals=pairs,
        bytes_accessed=sum(size.values()) + size["query"] + again * keys,
    )


def _kernel(*refs: Any, names: tuple[str, ...], sizes: CachedSizes) -> None:
    """Runs one step of the kernel for a block of queries.

    The queries meet a block of the segment's keys and a block of the ring.
    """
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    row, query_block, step = (pl.program_id(axis) for axis in (1, 2, 3))
    first_query = query_block * sizes.query_block

    if sizes.n_positions:
        pl.when((row == 0) & (query_block == 0) & (step == 0))(lambda: _make_table(r, sizes))

    @pl.when(step == 0)
    def _start() -> None:
        r.top[...] = jnp.full_like(r.top, HIDDEN)
        r.total[...] = jnp.zeros_like(r.total)
        r.summed[...] = jnp.zeros_like(r.summed)
        if sizes.clamped:  # The columns in front are all the same, so each lane has the number.
            for head in range(sizes.heads):
                r.far[head] = dot(r.position_query[0, head], r.table[head, :, :LANES], NN)

    pl.when(step < sizes.n_own)(lambda: _add_own(r, sizes, first_query, step))
    if sizes.n_ring:
        pl.when(step < sizes.n_ring)(lambda: _add_ring(r, sizes, row, first_query, step))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish() -> None:
        for head in range(sizes.heads):
            r.output[0, head] = (r.summed[head] / widen(r.total[head], sizes.width)).astype(
                r.output.dtype
            )


def _make_table(r: SimpleNamespace, sizes: CachedSizes) -> None:
    """Copies a head's position keys into the table.

    The key of the largest distance is repeated in front of them, and zeros are behind them.
    """
    end = sizes.margin + sizes.n_positions
    whole = end // LANES * LANES
    for head in range(sizes.heads):
        keys = r.position_key[head]
        # Through float32: Mosaic broadcasts no lane of a packed type.
        largest = jnp.broadcast_to(keys[:, :1].astype(jnp.float32), (sizes.width, sizes.margin))
        r.table[head, :, : sizes.margin] = largest.astype(keys.dtype)
        r.table[head, :, whole:] = jnp.zeros((sizes.width, sizes.table_columns - whole), keys.dtype)
        r.table[head, :, sizes.margin : end] = keys


def _add_own(
    r: SimpleNamespace, sizes: CachedSizes, first_query: jax.Array, block: jax.Array
) -> None:
    """Adds what the queries see of a block of the segment."""
    first_key, size = block * sizes.own_block, sizes.own_block
    needed = first_key < first_query + sizes.query_block
    if sizes.window is not None:
        needed &= first_query - (first_key + size - 1) < sizes.window
    # Keys behind the segment's last come after every query, so causality hides them.
    own = _Block(first_query, sizes.capacity + first_key, size, needed, columns=None)
    _add(
        r,
        sizes,
        own,
        scores=lambda h: dot(r.query[0, h], r.key[0, h], NT),
        values=lambda h: (r.value[0, h], NN),
    )


def _add_ring(
    r: SimpleNamespace, sizes: CachedSizes, row: jax.Array, first_query: jax.Array, block: jax.Array
) -> None:
    """Adds the slots of a ring block that the queries attend to.

    These are the block's newer slots, its older slots, or both in turn.
    """
    write_index, size = r.write_index[0], sizes.ring_block
    first_slot = block * size
    rest = sizes.capacity % size
    if rest:
        # What a block has behind the ring's end may be no number, and 0 times that is none.
        @pl.when(block == sizes.n_ring - 1)
        def _clear() -> None:
            columns, rows = (slice(None), slice(rest, None)), (slice(rest, None), slice(None))
            behind = (0, slice(None), *(columns if sizes.value_columns else rows))
            r.ring_value[behind] = jnp.zeros_like(r.ring_value[behind])

    def add(is_old: jax.Array) -> None:
        first_place = first_slot - write_index + jnp.where(is_old, 0, sizes.capacity)
        start = jnp.maximum(
            jnp.where(is_old, write_index - first_slot, 0),
            sizes.capacity - r.valid[row] - first_place,
        )
        stop = jnp.minimum(jnp.where(is_old, sizes.capacity, write_index) - first_slot, size)
        needed = start < stop
        if sizes.window is not None:
            needed &= sizes.capacity + first_query - (first_place + stop - 1) < sizes.window
        _add(
            r,
            sizes,
            _Block(first_query, first_place, size, needed, columns=(start, stop)),
            scores=lambda h: dot(r.query[0, h], r.ring_key[0, h].astype(r.query.dtype), NN),
            values=lambda h: (
                r.ring_value[0, h].astype(r.value.dtype),
                NT if sizes.value_columns else NN,
            ),
        )

    has_new, has_old = first_slot < write_index, first_slot + size > write_index
    # A loop and not two calls, which would double the program.
    lax.fori_loop(
        jnp.where(has_new, 0, 1), jnp.where(has_old, 2, 1), lambda part, _: add(part == 1), None
    )


class _Block(NamedTuple):
    """Keys of one visit."""

    first_query: jax.Array  # The first query that meets them.
    first_place: jax.Array  # Place of the first key.
    size: int
    needed: jax.Array  # Whether some query sees some key.
    # The keys of the ring that count, from the first up to the second. None for keys of the
    # segment, where a query sees itself and what is before it.
    columns: tuple[jax.Array, jax.Array] | None


def _add(
    r: SimpleNamespace,
    sizes: CachedSizes,
    block: _Block,
    *,
    scores: Callable[[int], jax.Array],
    values: Callable[[int], tuple[jax.Array, Contracted]],
) -> None:
    """Adds a block to the running softmax of each head, with its position scores.

    `scores` computes a head's scores of contents, [n, m]; `values` reads its [m, E] or [E, m], and
    their contraction.
    """

    def update(position_scores: Callable[[int], jax.Array] | None) -> None:
        # Heads do not depend on each other: with one after the other line by line, and not head by
        # head, the compiler fills the waits of one with the work of the next.
        heads = range(sizes.heads)
        tiles = [scores(head) for head in heads]
        if position_scores is not None:
            tiles = [tile + position_scores(head) for head, tile in zip(heads, tiles, strict=True)]
        _update(r, sizes, _mask(sizes, block), tiles, [values(head) for head in heads])

    if not sizes.n_positions:
        pl.when(block.needed)(lambda: update(None))
        return
    near = block.needed
    if sizes.clamped:
        is_far = (
            sizes.capacity + block.first_query - (block.first_place + block.size - 1)
            >= sizes.n_positions - 1
        )
        near = block.needed & ~is_far
        pl.when(block.needed & is_far)(lambda: update(lambda head: widen(r.far[head], block.size)))
    pl.when(near)(lambda: update(lambda head: _position_scores(r, sizes, block, head)))


def _position_scores(r: SimpleNamespace, sizes: CachedSizes, block: _Block, head: int) -> jax.Array:
    """Computes the position scores of a tile: [n, m]."""
    parts = []
    for at in range(0, sizes.query_block, sizes.strip):
        # Column of the distance that the strip's last query and first key have, in the table.
        furthest = sizes.capacity + block.first_query + at + sizes.strip - 1 - block.first_place
        column = sizes.margin + sizes.n_positions - 1 - furthest
        rest = column & (LANES - 1)
        table = r.table[
            head, :, pl.ds(pl.multiple_of(column - rest, LANES), block.size + 2 * LANES)
        ]
        by_distance = dot(r.position_query[0, head, at : at + sizes.strip, :], table, NN)
        parts.append(skew_from(by_distance, rest))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _update(
    r: SimpleNamespace,
    sizes: CachedSizes,
    mask: jax.Array,
    scores: list[jax.Array],
    values: list[tuple[jax.Array, Contracted]],
) -> None:
    """Adds each head's scores [n, m] and values, [m, E] or [E, m], to its running softmax.

    A query that has seen no key yet adds nonsense; its first visible key, at the latest itself,
    multiplies that by 0.
    """
    scores = [jnp.where(mask, tile, HIDDEN) for tile in scores]
    tops = [
        jnp.maximum(r.top[h], jnp.max(tile, axis=1, keepdims=True)) for h, tile in enumerate(scores)
    ]
    weights = [
        jnp.exp(tile - widen(top, tile.shape[1])) for tile, top in zip(scores, tops, strict=True)
    ]
    totals = [jnp.sum(tile, axis=1, keepdims=True) for tile in weights]
    summed = [
        dot(tile.astype(value.dtype), value, contracted)
        for tile, (value, contracted) in zip(weights, values, strict=True)
    ]
    for h, top in enumerate(tops):
        shrink = jnp.exp(r.top[h] - top)
        r.top[h] = top
        r.total[h] = shrink * r.total[h] + totals[h]
        r.summed[h] = widen(shrink, sizes.width) * r.summed[h] + summed[h]


def _mask(sizes: CachedSizes, block: _Block) -> jax.Array:
    """Returns which pairs are visible, bool [n, m]."""
    column = lax.broadcasted_iota(jnp.int32, (1, block.size), 1)
    # Distance of the block's first query and key, less the distance of a pair.
    less = column - lax.broadcasted_iota(jnp.int32, (sizes.query_block, 1), 0)
    distance = sizes.capacity + block.first_query - block.first_place
    if block.columns is None:
        visible = less <= distance
    else:
        start, stop = block.columns
        visible = jnp.broadcast_to((column >= start) & (column < stop), less.shape)
    if sizes.window is not None:
        visible &= less > distance - sizes.window
    return visible
