"""Sizes of the kernels' calls, the calls that they support, and their tiles. Imports no Pallas.

Query i meets key j at distance M + i - j, column p = L - 1 - i + j of the position keys. In
training queries are padded behind to whole tiles, keys too, and position keys in front by as many
rows as queries behind, which keeps this rule.
"""

import dataclasses
import functools
import importlib.metadata
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from txl_jax.ops.attention.problem import AttentionCall, Tile

# Columns of a vector register.
LANES = 128
# Bytes that the compiler may need beyond the computed number, for the kernel over a KV cache.
SPARE_VMEM = 2 * 2**20
# Bytes that this kernel may take without asking for more.
DEFAULT_VMEM = 16 * 2**20 - SPARE_VMEM

# With fewer pairs, whole scores are not larger than the other arrays that a layer reads.
_FEWEST_PAIRS = 128 * 256
# Rows of a vector register of bfloat16.
_ROWS = 16
# Place of a key that no query attends to.
_NO_KEY = 2**30
_MIB = 2**20
# Mosaic has no product of bfloat16 for older ones, and their gather differs.
_OLDEST_GENERATION = 4
_DTYPES = ("bfloat16", "float32")
# Size of a head, over a KV cache.
_WIDEST_CACHED_HEAD = 256
# Slots of a block of the ring. Fewer cost more steps, of about 400 extra instructions each. More
# reach further.
_LARGEST_BLOCK = 1024

# MiB of a core's VMEM from jax's `tpu_info`, by its names of the devices. If a path was chosen
# elsewhere, the device is unknown, which must not be a reason against the path.
_VMEM = {
    "TPU v4": 16,
    "TPU v4 lite": 16,
    "TPU v5": 64,
    "TPU v5p": 64,
    "TPU v5 lite": 128,
    "TPU v6 lite": 128,
}
_VMEM_OF_OTHERS = 64

# Mosaic of this version cannot read the kernels that jax 0.7.2, of the same time, writes
# ("Unsupported version: expected <= 7 but got 8"), and later jax rejects the version. 0.0.42.1 and
# 0.0.48.1 compile the kernels.
_TOO_OLD_LIBTPU = (0, 0, 21)

# Maximum queries and keys of a tile, best first. float32 skips the first two: its largest tiles
# take a minute to compile, and gain less, because a product in float32 costs as much as six in
# bfloat16.
_LARGEST_TILES = (Tile(512, 1536), Tile(256, 1536), Tile(256, 512), Tile(128, 256))


def refusal(problem: AttentionCall) -> str | None:
    """Returns why the kernels do not support a call, or None if they do.

    The reason includes the limit and the number found.
    """
    generation = _generation(problem.device_kind)
    if generation is not None and generation < _OLDEST_GENERATION:
        return (
            f"the kernels are for TPU v{_OLDEST_GENERATION} and later, but the device is "
            f"{problem.device_kind}"
        )
    if problem.dtype not in _DTYPES:
        return f"the kernels are for {' and '.join(_DTYPES)}, but the dtype is {problem.dtype}"
    if problem.has_position_score:
        return "the kernels do not support a score per distance (position_score)"
    pairs = problem.segment_len * problem.n_keys
    if pairs < _FEWEST_PAIRS:
        return (
            f"{problem.segment_len} queries and {problem.n_keys} keys are {pairs} pairs, below "
            f"{_FEWEST_PAIRS}, from which kernels are faster"
        )
    if problem.cached:
        reason = _cached_refusal(problem)
    else:
        reason = _training_refusal(problem)
    return reason or _libtpu_refusal()


def _training_refusal(problem: AttentionCall) -> str | None:
    need = vmem_bytes(problem, default_tile(problem))
    vmem = _vmem(problem.device_kind)
    if need > vmem:
        return (
            f"{problem.n_keys} keys of size {problem.d_head} need {need / _MIB:.0f} MiB of VMEM "
            f"in the backward kernel, but a core of {problem.device_kind} has {vmem // _MIB}"
        )
    return None


def _cached_refusal(problem: AttentionCall) -> str | None:
    stored = problem.cache_dtype or problem.dtype
    if stored not in _DTYPES:
        return f"the kernel reads a cache of {' or '.join(_DTYPES)}, but its dtype is {stored}"
    if problem.d_head > _WIDEST_CACHED_HEAD:
        return f"the head size is {problem.d_head}, above {_WIDEST_CACHED_HEAD}"
    need = CachedSizes.of(problem, default_tile(problem)).vmem_bytes
    most = _vmem(problem.device_kind) - SPARE_VMEM
    if need > most:
        return (
            f"{problem.n_positions} position keys of size {problem.d_head} need {need / _MIB:.1f} "
            f"MiB of VMEM, above {most / _MIB:.1f}"
        )
    return None


def _libtpu_refusal() -> str | None:
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers and numbers <= _TOO_OLD_LIBTPU:
        return f"libtpu is {version}, which cannot compile kernels of jax {jax.__version__}"
    return None


def default_tile(problem: AttentionCall) -> Tile:
    """Returns the tile for a call.

    In training this is the largest tile that fits into VMEM, in equal parts of L and K.

    Larger tiles take less time per pair. This outweighs what smaller tiles gain by skipping masked
    pairs. Instructions of the compiler's static schedule for a row and head of enwik8_24l, forward
    and backward, with bfloat16:

        tile       v4      v5e     v5p     v6e
        256x512    49 960  32 640  35 928  27 752
        384x768    48 816  31 204  33 192  23 556
        256x1536   45 858  28 818          21 129
        384x1536   43 584  28 322  29 356  19 846

    The parts are equal, because a tile that is only partly filled costs as much as a full one.
    Over a KV cache a tile has the queries of a segment, and blocks that cut the ring evenly.
    """
    if problem.cached:
        query = 2 * LANES
        if problem.segment_len <= LANES:
            query = round_up(problem.segment_len, _ROWS)
        return Tile(query, max(_part(problem.capacity or 0, _LARGEST_BLOCK, LANES), LANES))

    largest_tiles = _LARGEST_TILES if problem.dtype == "bfloat16" else _LARGEST_TILES[2:]
    for largest in largest_tiles:
        tile = Tile(
            query=_part(problem.segment_len, largest.query, _ROWS),
            key=_part(problem.n_keys, largest.key, LANES),
        )
        if vmem_bytes(problem, tile) <= _vmem(problem.device_kind):
            return tile
    # None fits. Then the smallest says in `refusal` how much is missing.
    return tile


def _part(size: int, largest: int, step: int) -> int:
    """Returns the size of equal parts, none above `largest`, in multiples of `step`."""
    parts = max(-(-size // largest), 1)
    return round_up(-(-size // parts), step)


def kernel_of(problem: AttentionCall) -> str:
    """Returns the name of the kernel that serves a call.

    Kernels differ in how they skew a tile: by a rotation or by a gather of lanes.

    The rotation needs TPU v5, where it saves an eighth of the forward kernel. The gather compiles
    on every generation.
    """
    # Over a KV cache columns begin anywhere, which takes two rotations (TPU v5e: 2600 instructions,
    # not 2410).
    if problem.cached:
        return "mosaic_gather"
    generation = _generation(problem.device_kind)
    if generation is not None and generation >= 5:
        return "mosaic_roll"
    return "mosaic_gather"


def _generation(device_kind: str) -> int | None:
    """Returns the generation of a TPU, or None for another device."""
    name = re.match(r"TPU ?v?(\d+)", device_kind)
    return int(name[1]) if name else None


def _vmem(device_kind: str) -> int:
    return _VMEM.get(device_kind, _VMEM_OF_OTHERS) * _MIB


def vmem_bytes(problem: AttentionCall, tile: Tile, *, backward: bool = True) -> int:
    """Returns about how much VMEM a training kernel takes.

    Of the backward kernel on v4, for E 128, the compiler reports 17.9 MiB with tiles of 256 x 512
    at K 4096 and 31.9 at K 8192 in bfloat16, 28.6 with 384 x 1536 at K 1536 in float32, where this
    gives 18.4, 32.4 and 29.5.
    """
    # Numbers of a row of E, filled up to whole registers.
    row = round_up(problem.d_head, LANES)
    itemsize = jnp.dtype(problem.dtype).itemsize
    n_query, n_key = tile
    n_keys = round_up(problem.n_keys, n_key)
    n_positions = 0
    if problem.n_positions:
        n_positions = round_up(problem.segment_len, n_query) + n_keys + LANES

    # Blocks of inputs and outputs, two of each. Forward: queries and the output, keys and values.
    # Backward: gradients of queries and output too.
    n_query_blocks = 4 if backward else 2
    rows_of_blocks = n_query * n_query_blocks + 2 * n_key + n_positions
    blocks = 2 * itemsize * row * rows_of_blocks
    scratch = n_query * row * (2 * itemsize + 8) + 2 * n_query * LANES * 4
    # Whole tiles of scores that the compiler keeps.
    n_scores = 3 if backward else 2
    scores = n_query * (n_key + LANES) * 4 * n_scores * (itemsize // 2)
    if not backward:
        return blocks + scratch + scores

    # Gradients of keys and values, as blocks and in scratch memory, and of position keys.
    sums = row * (n_keys * 2 * (2 * itemsize + 4) + n_positions * 2 * 4)
    return blocks + scratch + scores + sums


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def strip_rows(n_query: int) -> int:
    """Returns how many queries of a tile are skewed at a time.

    This is the largest divisor of the tile's queries that is a multiple of 8 and at most 128.

    Each strip of n queries needs its own m + 128 columns by distance, so strips keep the extra
    products at 128 / m.
    """
    return max(rows for rows in range(8, LANES + 1, 8) if n_query % rows == 0)


def round_tile(tile: Tile, problem: AttentionCall) -> Tile:
    """Returns the tile of a training kernel, rounded to whole registers.

    Apart from the rounding, it is not larger than the scores.
    """
    return Tile(
        round_up(min(tile.query, problem.segment_len), _ROWS),
        round_up(min(tile.key, problem.n_keys), LANES),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry(AttentionCall):
    """Sizes of one call of the training kernels, all static."""

    # Multiples of 16 queries and 128 keys.
    tile: Tile
    # Whether a tile is skewed by a rotation, or else by a gather.
    rotate: bool
    # Heads of all devices, by which dropout counts, or None without dropout.
    n_drawn_head: int | None
    interpret: bool

    @property
    def scale(self) -> float:
        """1 / sqrt(E)."""
        return float(self.d_head**-0.5)

    @property
    def mem_len(self) -> int:
        """M."""
        return self.n_keys - self.segment_len

    @property
    def n_query_tile(self) -> int:
        """Tiles of queries."""
        return -(-self.segment_len // self.tile.query)

    @property
    def n_key_tile(self) -> int:
        """Tiles of keys."""
        return -(-self.n_keys // self.tile.key)

    @property
    def padded_queries(self) -> int:
        """Rows of the padded queries."""
        return self.n_query_tile * self.tile.query

    @property
    def padded_keys(self) -> int:
        """Rows of the padded keys."""
        return self.n_key_tile * self.tile.key

    @property
    def position_padding(self) -> tuple[int, int]:
        """Rows in front of the position keys and behind."""
        before = self.padded_queries - self.segment_len
        return before, self.n_position_rows - before - self.n_positions

    @property
    def n_position_rows(self) -> int:
        """Rows of the padded position keys. The last strip reads up to 128 more than there are."""
        return self.padded_queries + self.padded_keys + LANES

    def key_tiles(
        self, query_tile: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last tile of keys that some query of a tile attends to.

        A tile of keys counts if a query attends to one of its keys from `start` to `stop`.

        The range is empty if none does.
        """
        start, stop = self._key_range(query_tile, start, stop, jnp)
        size = jnp.int32(self.tile.key)
        return lax.div(start, size), jnp.where(stop > start, lax.div(stop - 1, size), -1)

    def _key_range(self, query_tile: Any, start: Any, stop: Any, numpy: Any) -> tuple[Any, Any]:
        """Returns the first key that some query of a tile attends to, and the end.

        The range is computed with `numpy`, which is `jax.numpy` if the arguments are traced.
        """
        # The keys at distance 0 from the first and the last query.
        first = self.mem_len + query_tile * self.tile.query
        query_end = numpy.minimum((query_tile + 1) * self.tile.query, self.segment_len)
        last = self.mem_len + query_end - 1
        if self.window is not None:
            start = numpy.maximum(start, first - self.window + 1)
            if not self.causal:
                stop = numpy.minimum(stop, last + self.window)
        if self.causal:
            stop = numpy.minimum(stop, last + 1)
        return start, stop

    def visible(
        self, query_tile: jax.Array, key_tile: jax.Array, start: jax.Array, stop: jax.Array
    ) -> jax.Array:
        """Returns the visible pairs of a tile, bool [n, m].

        The shape is [1, m] if all queries of the tile attend to the same keys.
        """
        key = key_tile * self.tile.key + lax.broadcasted_iota(jnp.int32, (1, self.tile.key), 1)
        # So that a pair costs one comparison.
        key = jnp.where((key >= start) & (key < stop), key, _NO_KEY)
        rows = lax.broadcasted_iota(jnp.int32, (self.tile.query, 1), 0)
        # The key at distance 0 from each query.
        same_place = self.mem_len + query_tile * self.tile.query + rows
        if self.causal:
            pairs = key <= same_place
        elif self.window is not None:
            pairs = key < same_place + self.window
        else:
            return key < _NO_KEY
        if self.window is None:
            return pairs
        return pairs & (key > same_place - self.window)

    @functools.cached_property
    def n_tile(self) -> int:
        """Tiles of a row and head with visible pairs, if its memory is full.

        Not by jax, which would compute on the ambient mesh, whose devices may not be attached.
        """
        size = self.tile.key
        count = 0
        for query_tile in range(self.n_query_tile):
            start, stop = self._key_range(query_tile, 0, self.n_keys, np)
            if stop > start:
                count += (stop - 1) // size - start // size + 1
        return int(count)


@dataclasses.dataclass(frozen=True)
class CachedSizes:
    """Sizes of one call of the kernel over a KV cache, all static, in positions."""

    # Heads of a step, which do the same with different numbers.
    heads: int
    # E
    width: int
    # R
    capacity: int
    # Queries of a tile.
    query_block: int
    # Slots of a tile.
    ring_block: int
    # Keys of the segment in a tile.
    segment_block: int
    # Tiles of the segment's keys.
    n_segment_blocks: int
    # P, at most R + L, or 0 without position keys.
    n_positions: int
    # Whether some pair is further apart than P - 1.
    clamped: bool
    # Maximum keys of a query, or None for no limit.
    window: int | None
    # Bytes of a number of the segment.
    itemsize: int
    # Bytes of a number of the ring.
    cache_itemsize: int

    @classmethod
    def of(cls, problem: AttentionCall, tile: Tile) -> "CachedSizes":
        """Returns the sizes of a call.

        The tile is not larger than the scores, and is rounded up to whole registers.

        A step computes two heads if the number of heads is even and both fit. A single head often
        waits for results, and the other head's work fills these waits (TPU v5e, 80 queries and 768
        slots of width 64: 1480 instructions for one head, 2580 for two).
        """
        segment_len = problem.segment_len
        capacity = problem.capacity or 0
        # Small blocks of queries are whole registers, larger ones whole strips.
        query_block = min(tile.query, segment_len)
        query_block = round_up(query_block, _ROWS if query_block <= LANES else LANES)
        segment_block = round_up(min(segment_len, tile.key), LANES)
        sizes = cls(
            heads=1,
            width=problem.d_head,
            capacity=capacity,
            query_block=query_block,
            ring_block=max(round_up(min(tile.key, capacity), LANES), LANES),
            segment_block=segment_block,
            n_segment_blocks=-(-segment_len // segment_block),
            n_positions=min(problem.n_positions, capacity + segment_len),
            clamped=0 < problem.n_positions < capacity + segment_len,
            window=problem.window,
            itemsize=jnp.dtype(problem.dtype).itemsize,
            cache_itemsize=jnp.dtype(problem.cache_dtype or problem.dtype).itemsize,
        )
        two_heads = dataclasses.replace(sizes, heads=2)
        if problem.n_head % 2 == 0 and two_heads.vmem_bytes <= DEFAULT_VMEM:
            return two_heads
        return sizes

    @property
    def n_ring(self) -> int:
        """Blocks of the ring."""
        return -(-self.capacity // self.ring_block)

    @property
    def value_columns(self) -> bool:
        """Returns whether values are read as [E, R].

        XLA lays out [R, E] this way if E would not fill the lanes.
        """
        return self.width < LANES

    @property
    def strip(self) -> int:
        """Queries that are skewed at a time."""
        return min(self.query_block, LANES)

    @property
    def margin(self) -> int:
        """Number of table columns on either side of the position keys.

        These columns are for distances that only a part of a tile has.
        """
        return round_up(self.query_block + max(self.ring_block, self.segment_block), LANES)

    @property
    def table_columns(self) -> int:
        """Columns of the table in VMEM."""
        return self.margin + round_up(self.n_positions, LANES) + self.margin + 2 * LANES

    @property
    def vmem_bytes(self) -> int:
        """Approximate VMEM that a step takes, in bytes.

        It includes two of each block that is fetched, and scratch memory.
        """
        # A head's size, filled up along the lanes and along the rows of registers.
        lanes = round_up(self.width, LANES)
        rows = round_up(self.width, _ROWS)
        query_bytes = (3 * self.query_block + 2 * self.segment_block) * lanes * self.itemsize
        value_size = rows if self.value_columns else lanes
        ring_bytes = 2 * self.ring_block * value_size * self.cache_itemsize
        position_bytes = rows * round_up(self.n_positions, LANES) * self.itemsize
        fetched = 2 * (query_bytes + ring_bytes + position_bytes)

        running = (3 * LANES + lanes) * self.query_block * 4
        table = 0
        if self.n_positions:
            table = rows * self.table_columns * self.itemsize
        n_columns = max(self.ring_block, self.segment_block) + 2 * LANES
        scores = 3 * self.query_block * n_columns * 4
        return self.heads * (fetched + running + table + scores)
