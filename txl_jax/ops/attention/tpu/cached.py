"""Attention over a KV cache as a Pallas kernel for inference.

The ring is read in place, and no scores are written.

The definition is `ops.attention.reference.cached_attention`; tests/ops/attention/test_cached.py
compares with it, interpreted.

A key's place is its rank by age: 0 is the ring's oldest slot, and R the segment's first key. Query
i meets place j at the distance R + i - j. Softmax does not depend on the order of the keys, so the
ring's blocks are read in the order of the slots. The slots before `write_index` are the newer ones.
Places rise by one from slot to slot, but fall by R at the write index. The block that contains both
newer and older slots is added twice, once for each kind. For R = 12 in blocks of 4, write index 6:

    slot    0  1  2  3 | 4  5  6  7 | 8  9 10 11
    place   6  7  8  9 |10 11  0  1 | 2  3  4  5

    added   block 0: places from 6; block 1: from 10, where slots 4 and 5 count; block 1 again: from
            -2, where 6 and 7 count; block 2: from 2

R need not be a multiple of the block: anything after the last slot is masked.

Within a block of n queries and m keys, query x and key y meet at a distance that falls by one with
each key, so the scores of a block are n + m - 1 columns of the product with the position keys, each
row moved by one (`kernels.skew`). These columns can start anywhere, because the write index can.
Position keys are along the lanes of registers, which can only be read in aligned groups of 128. So
a row moves by up to 254 columns instead of 127, which takes one more gather.

A block whose distances all exceed the clamp does not need a product with position keys: its
position scores are one number per query, computed once. At M = 3800 in blocks of 1024, with a clamp
of 1000, this applies to at least half of the blocks.
"""

import functools
from collections.abc import Callable
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
    position_query, position_key, position_score = operands.position or (None, None, None)
    assert position_score is None, "refused: position scores"
    assert operands.position is None or position_key is not None, "refused: no position keys"
    sizes = CachedSizes.of(problem, tile)
    segment_len = problem.segment_len

    # Queries and keys fill whole blocks.
    queries_behind = round_up(segment_len, sizes.query_block) - segment_len
    keys_behind = sizes.n_segment_blocks * sizes.segment_block - segment_len
    arrays = {
        "query": pad_rows(operands.query, 0, queries_behind),
        "key": pad_rows(operands.key, 0, keys_behind),
        "value": pad_rows(operands.value, 0, keys_behind),
    }
    if position_key is not None and position_query is not None:
        arrays["position_query"] = pad_rows(position_query, 0, queries_behind)
        arrays["position_key"] = position_key[..., -sizes.n_positions :]
    if sizes.capacity:
        ring_key, ring_value = operands.ring
        arrays["ring_key"] = ring_key
        arrays["ring_value"] = ring_value.swapaxes(2, 3) if sizes.value_columns else ring_value
    out = _call(arrays, visibility, sizes, interpret=interpret)
    return out[:, :, :segment_len]


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
    # Memory that is kept over the steps of a block of queries. `_Refs` describes its contents.
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
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(
            n_head // sizes.heads,
            batch,
            padded // sizes.query_block,
            max(sizes.n_ring, sizes.n_segment_blocks),
        ),
        in_specs=[specs[name] for name in operands],
        out_specs=specs["query"],
        scratch_shapes=list(scratch.values()),
    )
    vmem_limit = None
    if sizes.vmem_bytes > DEFAULT_VMEM:
        vmem_limit = sizes.vmem_bytes + SPARE_VMEM
    call = pl.pallas_call(
        functools.partial(_kernel, names=names, sizes=sizes),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(operands["query"].shape, operands["value"].dtype),
        # Rows may not be split among cores: the first row of a head makes its table.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=_cost(operands, sizes),
        interpret=interpret,
        name="cached_attention",
    )
    return call(visibility.valid, visibility.write_index[None], *operands.values())


def _block_specs(sizes: CachedSizes) -> dict[str, pl.BlockSpec]:
    """Returns what each step reads. A block that stays the same is not fetched again."""
    heads = sizes.heads
    width = sizes.width
    last_ring = sizes.n_ring - 1
    last_segment = sizes.n_segment_blocks - 1

    # The indices number the groups of heads, the rows, the blocks of queries and the steps.
    queries = pl.BlockSpec(
        (1, heads, sizes.query_block, width),
        lambda head, row, query_block, step, *_: (row, head, query_block, 0),
    )
    segment = pl.BlockSpec(
        (1, heads, sizes.segment_block, width),
        lambda head, row, query_block, step, *_: (row, head, jnp.minimum(step, last_segment), 0),
    )
    ring_columns = pl.BlockSpec(
        (1, heads, width, sizes.ring_block),
        lambda head, row, query_block, step, *_: (row, head, 0, jnp.minimum(step, last_ring)),
    )
    ring_rows = pl.BlockSpec(
        (1, heads, sizes.ring_block, width),
        lambda head, row, query_block, step, *_: (row, head, jnp.minimum(step, last_ring), 0),
    )
    positions = pl.BlockSpec(
        (heads, width, sizes.n_positions), lambda head, row, query_block, step, *_: (head, 0, 0)
    )
    return {
        "query": queries,
        "position_query": queries,
        "position_key": positions,
        "ring_key": ring_columns,
        "ring_value": ring_columns if sizes.value_columns else ring_rows,
        "key": segment,
        "value": segment,
    }


def _cost(operands: dict[str, jax.Array], sizes: CachedSizes) -> pl.CostEstimate:
    """Returns the work of the kernel, into which the compiler cannot look.

    Keys are read once per block of queries.
    """
    batch, n_head, padded, width = operands["query"].shape
    n_keys = sizes.capacity + sizes.n_segment_blocks * sizes.segment_block
    pairs = batch * n_head * padded * n_keys
    pairs_by_distance = batch * n_head * padded * sizes.n_positions
    num_bytes = {name: array.size * array.dtype.itemsize for name, array in operands.items()}
    # Each further block of queries reads all keys and values again.
    blocks_again = padded // sizes.query_block - 1
    key_bytes = sum(num_bytes.get(name, 0) for name in ("ring_key", "ring_value", "key", "value"))
    return pl.CostEstimate(
        flops=2 * width * (2 * pairs + pairs_by_distance),
        transcendentals=pairs,
        # The output has as many bytes as the queries.
        bytes_accessed=sum(num_bytes.values()) + num_bytes["query"] + blocks_again * key_bytes,
    )


class _Refs(NamedTuple):
    """References to scalars, to the blocks of a step, and to scratch memory.

    n are the queries of a block, m its keys or slots, and h the heads of a step.
    """

    valid: Any  # int32 [B], filled slots of each row.
    write_index: Any  # int32 [1]
    query: Any  # [1, h, n, E], with u added and divided by sqrt(E).
    key: Any  # [1, h, m, E], of the segment.
    value: Any  # [1, h, m, E], of the segment.
    output: Any  # [1, h, n, E]
    top: Any  # float32 [h, n, 128], the largest score so far, in every lane.
    total: Any  # float32 [h, n, 128], sum of exp(score - top), in every lane.
    summed: Any  # float32 [h, n, E], sum of exp(score - top) * value.
    ring_key: Any = None  # [1, h, E, m], or None without slots, as for `ring_value`.
    ring_value: Any = None  # [1, h, m, E], or [1, h, E, m] for `value_columns`.
    position_query: Any = None  # [1, h, n, E], or None without position keys, as for the next two.
    position_key: Any = None  # [h, E, P]
    table: Any = None  # [h, E, columns], a head's position keys with margins (`_make_table`).
    far: Any = (
        None  # float32 [h, n, 128], the scores at the largest distance, or None without clamp.
    )


def _kernel(*references: Any, names: tuple[str, ...], sizes: CachedSizes) -> None:
    """Runs one step of the kernel for a block of queries.

    The queries meet a block of the segment's keys and a block of the ring.
    """
    refs = _Refs(**dict(zip(names, references, strict=True)))
    row = pl.program_id(1)
    query_block = pl.program_id(2)
    step = pl.program_id(3)
    first_query = query_block * sizes.query_block

    if sizes.n_positions:
        is_first_of_head = (row == 0) & (query_block == 0) & (step == 0)
        pl.when(is_first_of_head)(lambda: _make_table(refs, sizes))

    @pl.when(step == 0)
    def _start() -> None:
        refs.top[...] = jnp.full_like(refs.top, HIDDEN)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.summed[...] = jnp.zeros_like(refs.summed)
        # The columns in front are all the same, so each lane has the number.
        if sizes.clamped:
            for head in range(sizes.heads):
                refs.far[head] = dot(refs.position_query[0, head], refs.table[head, :, :LANES], NN)

    pl.when(step < sizes.n_segment_blocks)(lambda: _add_segment(refs, sizes, first_query, step))
    if sizes.n_ring:
        pl.when(step < sizes.n_ring)(lambda: _add_ring(refs, sizes, row, first_query, step))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish() -> None:
        for head in range(sizes.heads):
            out = refs.summed[head] / widen(refs.total[head], sizes.width)
            refs.output[0, head] = out.astype(refs.output.dtype)


def _make_table(refs: _Refs, sizes: CachedSizes) -> None:
    """Copies a head's position keys into the table.

    The key of the largest distance is repeated in front of them, and zeros are behind them.
    """
    end = sizes.margin + sizes.n_positions
    whole = end // LANES * LANES
    for head in range(sizes.heads):
        keys = refs.position_key[head]
        # Through float32: Mosaic broadcasts no lane of a packed type.
        largest = jnp.broadcast_to(keys[:, :1].astype(jnp.float32), (sizes.width, sizes.margin))
        refs.table[head, :, : sizes.margin] = largest.astype(keys.dtype)
        refs.table[head, :, whole:] = jnp.zeros(
            (sizes.width, sizes.table_columns - whole), keys.dtype
        )
        refs.table[head, :, sizes.margin : end] = keys


def _add_segment(refs: _Refs, sizes: CachedSizes, first_query: jax.Array, block: jax.Array) -> None:
    """Adds what the queries see of a block of the segment."""
    first_key = block * sizes.segment_block
    needed = first_key < first_query + sizes.query_block
    if sizes.window is not None:
        last_key = first_key + sizes.segment_block - 1
        needed &= first_query - last_key < sizes.window
    # Keys behind the segment's last come after every query, so causality hides them.
    keys = _Keys(
        first_query=first_query,
        first_place=sizes.capacity + first_key,
        size=sizes.segment_block,
        needed=needed,
        columns=None,
    )
    _add(
        refs,
        sizes,
        keys,
        scores=lambda head: dot(refs.query[0, head], refs.key[0, head], NT),
        values=lambda head: (refs.value[0, head], NN),
    )


def _add_ring(
    refs: _Refs, sizes: CachedSizes, row: jax.Array, first_query: jax.Array, block: jax.Array
) -> None:
    """Adds the slots of a ring block that the queries attend to.

    These are the block's newer slots, its older slots, or both in turn.
    """
    write_index = refs.write_index[0]
    size = sizes.ring_block
    first_slot = block * size
    rest = sizes.capacity % size
    if rest:
        # What a block has behind the ring's end may be no number, and 0 times that is none.
        @pl.when(block == sizes.n_ring - 1)
        def _clear() -> None:
            if sizes.value_columns:
                behind = (0, slice(None), slice(None), slice(rest, None))
            else:
                behind = (0, slice(None), slice(rest, None), slice(None))
            refs.ring_value[behind] = jnp.zeros_like(refs.ring_value[behind])

    def ring_scores(head: int) -> jax.Array:
        return dot(refs.query[0, head], refs.ring_key[0, head].astype(refs.query.dtype), NN)

    def ring_values(head: int) -> tuple[jax.Array, Contracted]:
        contracted = NT if sizes.value_columns else NN
        return refs.ring_value[0, head].astype(refs.value.dtype), contracted

    def add(is_old: jax.Array) -> None:
        first_place = first_slot - write_index + jnp.where(is_old, 0, sizes.capacity)
        start = jnp.maximum(
            jnp.where(is_old, write_index - first_slot, 0),
            sizes.capacity - refs.valid[row] - first_place,
        )
        stop = jnp.minimum(jnp.where(is_old, sizes.capacity, write_index) - first_slot, size)
        needed = start < stop
        if sizes.window is not None:
            needed &= sizes.capacity + first_query - (first_place + stop - 1) < sizes.window
        keys = _Keys(first_query, first_place, size, needed, columns=(start, stop))
        _add(refs, sizes, keys, scores=ring_scores, values=ring_values)

    # Turn 0 is for the newer slots, turn 1 for the older ones.
    has_new = first_slot < write_index
    has_old = first_slot + size > write_index
    # A loop and not two calls, which would double the program.
    lax.fori_loop(
        jnp.where(has_new, 0, 1), jnp.where(has_old, 2, 1), lambda turn, _: add(turn == 1), None
    )


class _Keys(NamedTuple):
    """Keys that a block of queries meets at a time."""

    # The first query that meets them.
    first_query: jax.Array
    # Place of the first key.
    first_place: jax.Array
    # Number of keys.
    size: int
    # Whether any query attends to any key.
    needed: jax.Array
    # The visible keys of the ring, from the first number up to the second. None for keys of the
    # segment, where a query attends to itself and to the keys before it.
    columns: tuple[jax.Array, jax.Array] | None


def _add(
    refs: _Refs,
    sizes: CachedSizes,
    keys: _Keys,
    *,
    scores: Callable[[int], jax.Array],
    values: Callable[[int], tuple[jax.Array, Contracted]],
) -> None:
    """Adds keys to the running softmax of each head, with its position scores.

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
        _update(refs, sizes, _mask(sizes, keys), tiles, [values(head) for head in heads])

    if not sizes.n_positions:
        pl.when(keys.needed)(lambda: update(None))
        return

    # With a clamp, all keys that are too far away have the same score by distance.
    near = keys.needed
    if sizes.clamped:
        is_far = (
            sizes.capacity + keys.first_query - (keys.first_place + keys.size - 1)
            >= sizes.n_positions - 1
        )
        near = keys.needed & ~is_far
        pl.when(keys.needed & is_far)(lambda: update(lambda head: widen(refs.far[head], keys.size)))
    pl.when(near)(lambda: update(lambda head: _position_scores(refs, sizes, keys, head)))


def _position_scores(refs: _Refs, sizes: CachedSizes, keys: _Keys, head: int) -> jax.Array:
    """Computes the position scores of a tile: [n, m]."""
    strips = []
    for first in range(0, sizes.query_block, sizes.strip):
        # Column of the distance that the strip's last query and first key have, in the table.
        furthest = sizes.capacity + keys.first_query + first + sizes.strip - 1 - keys.first_place
        column = sizes.margin + sizes.n_positions - 1 - furthest
        rest = column & (LANES - 1)
        columns = pl.ds(pl.multiple_of(column - rest, LANES), keys.size + 2 * LANES)
        table = refs.table[head, :, columns]
        position_query = refs.position_query[0, head, first : first + sizes.strip, :]
        strips.append(skew_from(dot(position_query, table, NN), rest))
    return strips[0] if len(strips) == 1 else jnp.concatenate(strips, axis=0)


def _update(
    refs: _Refs,
    sizes: CachedSizes,
    mask: jax.Array,
    scores: list[jax.Array],
    values: list[tuple[jax.Array, Contracted]],
) -> None:
    """Adds each head's scores [n, m] and values, [m, E] or [E, m], to its running softmax.

    A query that has seen no key yet adds nonsense; its first visible key, at the latest itself,
    multiplies that by 0.
    """
    # Line by line for all heads, as in `_add`.
    scores = [jnp.where(mask, tile, HIDDEN) for tile in scores]
    tops = []
    for head, tile in enumerate(scores):
        tops.append(jnp.maximum(refs.top[head], jnp.max(tile, axis=1, keepdims=True)))
    numerators = []
    for tile, top in zip(scores, tops, strict=True):
        numerators.append(jnp.exp(tile - widen(top, tile.shape[1])))
    totals = [jnp.sum(tile, axis=1, keepdims=True) for tile in numerators]
    summed = []
    for tile, (value, contracted) in zip(numerators, values, strict=True):
        summed.append(dot(tile.astype(value.dtype), value, contracted))

    for head, top in enumerate(tops):
        fade = jnp.exp(refs.top[head] - top)
        refs.top[head] = top
        refs.total[head] = fade * refs.total[head] + totals[head]
        refs.summed[head] = widen(fade, sizes.width) * refs.summed[head] + summed[head]


def _mask(sizes: CachedSizes, keys: _Keys) -> jax.Array:
    """Returns which pairs are visible, bool [n, m]."""
    column = lax.broadcasted_iota(jnp.int32, (1, keys.size), 1)
    # Distance of the block's first query and key, less the distance of a pair.
    less = column - lax.broadcasted_iota(jnp.int32, (sizes.query_block, 1), 0)
    distance = sizes.capacity + keys.first_query - keys.first_place
    if keys.columns is None:
        visible = less <= distance
    else:
        start, stop = keys.columns
        visible = jnp.broadcast_to((column >= start) & (column < stop), less.shape)
    if sizes.window is not None:
        visible &= less > distance - sizes.window
    return visible
