"""Parts of the forward and the backward kernel: operands, scalars, blocks, one step of the grid, the call itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from txl_jax.ops.attention.dropout import Dropout, bits
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.tpu.geometry import Geometry
from txl_jax.ops.attention.tpu.limits import vmem_bytes
from txl_jax.ops.attention.tpu.scores import NT, dot, position_scores
from txl_jax.ops.attention.tpu.skew import LANES

_DEFAULT_VMEM = 12 * 2**20  # Below, what the compiler grants without being asked (16 MiB) is enough.


class Operands(NamedTuple):
    """Arrays of a call; in a kernel references to their blocks."""

    query: Any  # [B, H, L, E]
    key: Any  # [B, H, K, E]
    value: Any  # [B, H, K, E]
    position_key: Any = None  # [H, P, E]; None: no term by distance.
    content_bias: Any = None  # [H, 1, E], u; None: without.
    position_bias: Any = None  # [H, 1, E], v; None: without.


class Scalars(NamedTuple):
    """Numbers that the kernels read from scalar memory; `draws` with dropout only."""

    start: Any  # int32 [B], first key that the queries of a row may see.
    stop: Any  # int32 [B], end of these keys.
    draws: Any  # int32 [4]: seed, threshold, first row, first head.
    keep: Any  # float32 [2]: 1 - rate, 1 / (1 - rate).


def make_scalars(visibility: Visibility, dropout: Dropout | None) -> Scalars:
    """Returns the scalars of a call."""
    start, stop = visibility.key_range()
    if dropout is None:
        return Scalars(start, stop, jnp.zeros(4, jnp.int32), jnp.ones(2, jnp.float32))
    words = (jnp.asarray(dropout.seed).astype(jnp.uint32), dropout.threshold())
    seed, threshold = (lax.bitcast_convert_type(word, jnp.int32) for word in words)
    first_row, first_head = (jnp.asarray(first, jnp.int32) for first in (dropout.first_row, dropout.first_head))
    keep = 1 - jnp.asarray(dropout.rate, jnp.float32)
    return Scalars(start, stop, jnp.stack([seed, threshold, first_row, first_head]), jnp.stack([keep, 1 / keep]))


class Step(NamedTuple):
    """One step of the grid."""

    scalars: Scalars
    head: jax.Array
    row: jax.Array
    query_tile: jax.Array
    key_tile: jax.Array

    @classmethod
    def current(cls, scalars: Scalars) -> "Step":
        """Returns the step that the kernel is at."""
        return cls(scalars, *(pl.program_id(axis) for axis in range(4)))

    @property
    def key_range(self) -> tuple[jax.Array, jax.Array]:
        """First key that the row's queries may see, and the end of these."""
        return self.scalars.start[self.row], self.scalars.stop[self.row]

    def is_needed(self, geometry: Geometry) -> jax.Array:
        """Returns whether any query of the tile sees any key of it."""
        first, last = geometry.key_tiles(self.query_tile, *self.key_range)
        return (first <= self.key_tile) & (self.key_tile <= last)

    def visible(self, geometry: Geometry) -> jax.Array:
        """Returns the visible pairs: bool [n, m] or [1, m]."""
        return geometry.visible(self.query_tile, self.key_tile, *self.key_range)

    def kept(self, geometry: Geometry) -> jax.Array:
        """Returns which probabilities dropout keeps: bool [n, m]."""
        assert geometry.n_drawn_head is not None  # For mypy.
        seed, threshold, first_row, first_head = (self.scalars.draws[at] for at in range(4))
        row_head = (first_row + self.row) * geometry.n_drawn_head + first_head + self.head
        n_query, n_key = geometry.tile
        query = self.query_tile * n_query + lax.broadcasted_iota(jnp.int32, (n_query, 1), 0)
        key = self.key_tile * n_key + lax.broadcasted_iota(jnp.int32, (1, n_key), 1)
        return bits(seed, row_head, query, key) >= threshold.astype(jnp.uint32)


class Blocks(NamedTuple):
    """The part of an array that is in VMEM at a step."""

    query: pl.BlockSpec
    key: pl.BlockSpec
    all_keys: pl.BlockSpec
    positions: pl.BlockSpec
    bias: pl.BlockSpec
    log_sum: pl.BlockSpec


def make_blocks(geometry: Geometry) -> Blocks:
    """Returns the blocks; a step that is skipped names the keys of its nearest needed one, which fetches nothing."""
    n_query, n_key = geometry.tile

    def key_block(head: Any, row: Any, query_tile: Any, key_tile: Any, start: Any, stop: Any, *_: Any) -> Any:
        first, last = geometry.key_tiles(query_tile, start[row], stop[row])
        return row, head, jnp.maximum(jnp.clip(key_tile, first, last), 0), 0

    return Blocks(
        query=pl.BlockSpec(
            (1, 1, n_query, geometry.width), lambda head, row, query_tile, *_: (row, head, query_tile, 0)
        ),
        key=pl.BlockSpec((1, 1, n_key, geometry.width), key_block),
        all_keys=pl.BlockSpec((1, 1, geometry.padded_keys, geometry.width), lambda head, row, *_: (row, head, 0, 0)),
        positions=pl.BlockSpec((1, geometry.n_position_rows, geometry.width), lambda head, *_: (head, 0, 0)),
        bias=pl.BlockSpec((1, 1, geometry.width), lambda head, *_: (head, 0, 0)),
        log_sum=pl.BlockSpec((1, 1, 1, 1, n_query), lambda head, row, query_tile, *_: (row, head, query_tile, 0, 0)),
    )


def operand_blocks(blocks: Blocks, operands: Operands) -> Operands:
    """Returns the blocks of the operands that there are."""
    of_all = Operands(blocks.query, blocks.key, blocks.key, blocks.positions, blocks.bias, blocks.bias)
    return Operands(*(None if array is None else block for array, block in zip(operands, of_all, strict=True)))


def pad_operands(geometry: Geometry, operands: Operands) -> Operands:
    """Returns the operands in whole tiles."""
    keys = geometry.padded_keys - geometry.n_keys
    return operands._replace(
        query=pad_queries(geometry, operands.query),
        key=_pad(operands.key, 0, keys),
        value=_pad(operands.value, 0, keys),
        position_key=None if operands.position_key is None else _pad(operands.position_key, *geometry.position_padding),
    )


def pad_queries(geometry: Geometry, array: jax.Array) -> jax.Array:
    """Pads [B, H, L, E] to whole tiles of queries."""
    return _pad(array, 0, geometry.padded_queries - geometry.segment_len)


def queries_shape(geometry: Geometry, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Returns the shape of padded queries."""
    shape = (geometry.batch, geometry.n_head, geometry.padded_queries, geometry.width)
    return jax.ShapeDtypeStruct(shape, dtype)


def log_sum_shape(geometry: Geometry) -> jax.ShapeDtypeStruct:
    """Returns the shape of one number per query, laid out so that a tile of any size is a whole row."""
    shape = (geometry.batch, geometry.n_head, geometry.n_query_tile, 1, geometry.tile.query)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _pad(array: jax.Array, before: int, behind: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, behind), (0, 0)]) if before or behind else array


def bias_queries(geometry: Geometry, operands: Operands, content_query: Any, position_query: Any) -> None:
    """Writes the queries of a tile with u and with v, both divided by sqrt(E), so that no score has to be."""
    query = operands.query[0, 0]
    pairs = ((content_query, operands.content_bias), (position_query, operands.position_bias))
    for target, bias in pairs:
        if target is not None:
            wide = query.astype(jnp.float32)
            wide = wide if bias is None else wide + bias[0].astype(jnp.float32)
            target[...] = (wide * geometry.scale).astype(target.dtype)


def position_slice(geometry: Geometry, step: Step, at: int, size: int) -> Any:
    """Returns the rows of the position keys, or of their gradient, `at` behind the tile's first one."""
    first = geometry.first_position(step.query_tile, step.key_tile) + at
    return pl.ds(pl.multiple_of(first, geometry.position_step), size)


def tile_scores(
    geometry: Geometry, step: Step, operands: Operands, content_query: Any, position_query: Any
) -> jax.Array:
    """Computes the scores of a tile, [n, m] in float32, before any mask."""
    scores = dot(content_query[...], operands.key[0, 0], NT)
    if position_query is None:
        return scores

    def position_key(at: int, size: int) -> jax.Array:
        keys: jax.Array = operands.position_key[0, position_slice(geometry, step, at, size), :]
        return keys

    return scores + position_scores(position_query[...], position_key, n_key=geometry.tile.key, way=geometry.way)


class Kernel(NamedTuple):
    """A kernel and what it takes and gives.

    Attributes:
      function: called with `Scalars`, the inputs, the outputs and the scratch memory.
      in_specs: blocks of the inputs.
      out_specs: blocks of the outputs.
      out_shape: shapes of the outputs.
      scratch: scratch memory.
      backward: whether it computes gradients.
      n_product: products of a tile's content, of 2 n m E operations each.
      n_position_product: products by distance.
      name: its name in profiles.
    """

    function: Callable[..., None]
    in_specs: Any
    out_specs: Any
    out_shape: Any
    scratch: Any
    backward: bool
    n_product: int
    n_position_product: int
    name: str


def run(kernel: Kernel, geometry: Geometry, scalars: Scalars, *inputs: Any) -> Any:
    """Runs a kernel over the grid and returns its outputs."""

    def function(*refs: Any) -> None:
        kernel.function(Scalars(*refs[: len(scalars)]), *refs[len(scalars) :])

    itemsize = jax.tree.leaves(inputs)[0].dtype.itemsize
    return pl.pallas_call(
        function,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=geometry.grid,
            in_specs=kernel.in_specs,
            out_specs=kernel.out_specs,
            scratch_shapes=kernel.scratch,
        ),
        out_shape=kernel.out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(kernel, geometry, itemsize),
        ),
        cost_estimate=_cost(kernel, geometry, inputs),
        interpret=geometry.interpret,
        name=kernel.name,
    )(*scalars, *inputs)


def _vmem_limit(kernel: Kernel, geometry: Geometry, itemsize: int) -> int | None:
    need = vmem_bytes(
        geometry.tile,
        segment_len=geometry.segment_len,
        n_keys=geometry.n_keys,
        width=geometry.width,
        has_positions=geometry.n_positions > 0,
        itemsize=itemsize,
        backward=kernel.backward,
    )
    return None if need < _DEFAULT_VMEM else need + need // 2


def _cost(kernel: Kernel, geometry: Geometry, inputs: Any) -> pl.CostEstimate:
    """Returns what the compiler is to count for a kernel, which it cannot look into, with full memory.

    Each input and output counts once, and keys and values again for each further tile of queries that reads them. The
    compiler adds its own copies of inputs from HBM to VMEM, so that its sum is too large rather than too small.
    """
    rows, n_query, n_key = geometry.batch * geometry.n_head, *geometry.tile
    pairs = rows * geometry.n_tile * n_query * n_key
    by_distance = kernel.n_position_product * (1 + LANES / n_key) if geometry.n_positions else 0
    arrays = jax.tree.leaves((inputs, kernel.out_shape))
    once = sum(array.size * array.dtype.itemsize for array in arrays)
    again = max(geometry.n_tile - geometry.n_key_tile, 0) if geometry.n_key_tile > 1 else 0
    return pl.CostEstimate(
        flops=int(2 * pairs * geometry.width * (kernel.n_product + by_distance)),
        transcendentals=pairs,
        bytes_accessed=once + 2 * rows * again * n_key * geometry.width * arrays[0].dtype.itemsize,
    )
