"""Attention over a KV cache as a Pallas kernel for TPUs, for inference.

The twin of `ops.attention.cached`, which defines what is correct; `cached_kernel` is what runs in a step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.cached import CachedVisibility, Position
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.cached_kernel import kernel as cached_kernel
from txl_jax.ops.attention.tpu.cached_sizes import DEFAULT_VMEM, LANES, SPARE_VMEM, Sizes, make_sizes, round_up


def tpu_cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    position: Position,
    visibility: CachedVisibility,
    *,
    tile: Tile,
    interpret: bool = False,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E]; arguments as of `ops.attention.cached.cached_attention`.

    Args:
      tile: queries and slots per tile; queries a multiple of 16 up to 128 or a multiple of 128, slots a multiple of
        128.
      interpret: whether to interpret the kernel, on any device and slowly.
    """
    position_query, table = None, None
    if position is not None:
        position_query, table, scores = position
        assert table is not None and scores is None, "refused: position scores without, or beside, position keys"
    segment_len, capacity = query.shape[2], visibility.capacity
    sizes = make_sizes(
        tile,
        n_head=query.shape[1],
        segment_len=segment_len,
        width=query.shape[3],
        capacity=capacity,
        n_positions=0 if table is None else table.shape[2],
        window=visibility.window,
        itemsize=query.dtype.itemsize,
        cache_itemsize=ring[0].dtype.itemsize,
    )
    padded = round_up(segment_len, sizes.query_block)
    own_len = sizes.n_own * sizes.own_block
    operands: dict[str, jax.Array] = {
        "query": _pad_rows(query, padded),
        "key": _pad_rows(key, own_len),
        "value": _pad_rows(value, own_len),
    }
    if table is not None and position_query is not None:
        operands |= {
            "position_query": _pad_rows(position_query, padded),
            "position_key": table[..., -sizes.n_positions :],
        }
    if capacity:
        operands |= {"ring_key": ring[0], "ring_value": ring[1].swapaxes(2, 3) if sizes.value_columns else ring[1]}
    result = _call(operands, visibility, sizes, interpret=interpret)
    return result[:, :, :segment_len]


def _pad_rows(array: jax.Array, size: int) -> jax.Array:
    """Appends zeros to the rows: [B, H, n, E] -> [B, H, size, E]."""
    missing = size - array.shape[2]
    return jnp.pad(array, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else array


def _call(operands: dict[str, jax.Array], visibility: CachedVisibility, sizes: Sizes, *, interpret: bool) -> jax.Array:
    """Runs the kernel over (head, row, block of queries, step); heads first, so that a table is read once per head."""
    batch, n_head, padded, width = operands["query"].shape
    specs = _block_specs(sizes)
    scratch: dict[str, Any] = {
        "top": pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32),
        "total": pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32),
        "summed": pltpu.VMEM((sizes.heads, sizes.query_block, width), jnp.float32),
    }
    if sizes.n_positions:
        scratch["table"] = pltpu.VMEM((sizes.heads, width, sizes.table_columns), operands["position_key"].dtype)
    if sizes.clamped:
        scratch["far"] = pltpu.VMEM((sizes.heads, sizes.query_block, LANES), jnp.float32)
    names = ("valid", "write_index", *operands, "output", *scratch)
    out = jax.ShapeDtypeStruct(operands["query"].shape, operands["value"].dtype)
    call = pl.pallas_call(
        functools.partial(cached_kernel, names=names, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n_head // sizes.heads, batch, padded // sizes.query_block, max(sizes.n_ring, sizes.n_own)),
            in_specs=[specs[name] for name in operands],
            out_specs=specs["query"],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=out,
        # Rows may not be split among cores: the first row of a head makes its table.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(operands, sizes),
        ),
        cost_estimate=_cost(operands, sizes),
        interpret=interpret,
        name="cached_attention",
    )
    result: jax.Array = call(visibility.valid, visibility.write_index[None], *operands.values())
    return result


def _vmem_limit(operands: dict[str, jax.Array], sizes: Sizes) -> int | None:
    stored = operands.get("ring_key", operands["key"])
    need = sizes.vmem_bytes(operands["query"].dtype.itemsize, stored.dtype.itemsize)
    return None if need <= DEFAULT_VMEM else need + SPARE_VMEM


def _block_specs(sizes: Sizes) -> dict[str, pl.BlockSpec]:
    """Returns what each step reads; a block that stays the same is not fetched again."""
    width = sizes.width

    def ring_block(step: jax.Array) -> jax.Array:
        return jnp.minimum(step, sizes.n_ring - 1)

    def own_block(step: jax.Array) -> jax.Array:
        return jnp.minimum(step, sizes.n_own - 1)

    queries = pl.BlockSpec((1, sizes.heads, sizes.query_block, width), lambda h, b, a, t, *_: (b, h, a, 0))
    own = pl.BlockSpec((1, sizes.heads, sizes.own_block, width), lambda h, b, a, t, *_: (b, h, own_block(t), 0))
    columns = pl.BlockSpec((1, sizes.heads, width, sizes.ring_block), lambda h, b, a, t, *_: (b, h, 0, ring_block(t)))
    rows = pl.BlockSpec((1, sizes.heads, sizes.ring_block, width), lambda h, b, a, t, *_: (b, h, ring_block(t), 0))
    return {
        "query": queries,
        "position_query": queries,
        "position_key": pl.BlockSpec((sizes.heads, width, sizes.n_positions), lambda h, b, a, t, *_: (h, 0, 0)),
        "ring_key": columns,
        "ring_value": columns if sizes.value_columns else rows,
        "key": own,
        "value": own,
    }


def _cost(operands: dict[str, jax.Array], sizes: Sizes) -> pl.CostEstimate:
    """Returns the work of the kernel, into which the compiler cannot look; keys are read once per block of queries."""
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
