"""Sizes of one call of the cached attention kernel, its limits, and its tiles; imports no Pallas."""

import dataclasses

from txl_jax.ops.attention.problem import Problem, Tile

LANES = 128  # Columns of a vector register.
SPARE_VMEM = 2 * 2**20  # Bytes that the compiler may add to what is counted here.
DEFAULT_VMEM = 16 * 2**20 - SPARE_VMEM  # Bytes that a kernel may take without asking for more.
_WIDEST_HEAD = 256
_LARGEST_BLOCK = 1024  # Slots. Fewer cost more steps, of about 400 instructions beside the work; more reach further.
_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one call, in positions.

    Attributes:
      heads: heads of a step, which do the same with different numbers.
      width: E.
      capacity: R.
      query_block: queries of a tile.
      ring_block: slots of a tile.
      own_block: keys of the segment of a tile.
      n_own: tiles of the segment's keys.
      n_positions: P, at most R + L; 0: no position keys.
      clamped: whether some pair is further apart than P - 1.
      window: keys that a query sees at most; None: no limit.
    """

    heads: int
    width: int
    capacity: int
    query_block: int
    ring_block: int
    own_block: int
    n_own: int
    n_positions: int
    clamped: bool
    window: int | None

    @property
    def n_ring(self) -> int:
        """Blocks of the ring."""
        return -(-self.capacity // self.ring_block)

    @property
    def value_columns(self) -> bool:
        """Returns whether values are read as [E, R]: XLA lays out [R, E] so where E would not fill the lanes."""
        return self.width < LANES

    @property
    def strip(self) -> int:
        """Queries that are skewed at a time."""
        return min(self.query_block, LANES)

    @property
    def margin(self) -> int:
        """Columns of the table on either side of the position keys: of distances that only tiles in part have."""
        return round_up(self.query_block + max(self.ring_block, self.own_block), LANES)

    @property
    def table_columns(self) -> int:
        """Columns of the table in VMEM."""
        return self.margin + round_up(self.n_positions, LANES) + self.margin + 2 * LANES

    def vmem_bytes(self, itemsize: int, cache_itemsize: int) -> int:
        """Returns about how much VMEM a step takes: two of each block that is fetched, and scratch memory."""
        lanes, rows = round_up(self.width, LANES), round_up(self.width, 16)
        of_queries = (3 * self.query_block + 2 * self.own_block) * lanes * itemsize
        of_ring = 2 * self.ring_block * (rows if self.value_columns else lanes) * cache_itemsize
        of_positions = rows * round_up(self.n_positions, LANES) * itemsize
        running = (3 * LANES + lanes) * self.query_block * 4
        table = rows * self.table_columns * itemsize if self.n_positions else 0
        scores = 3 * self.query_block * (max(self.ring_block, self.own_block) + 2 * LANES) * 4
        return self.heads * (2 * (of_queries + of_ring + of_positions) + running + table + scores)


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def make_sizes(
    tile: Tile,
    *,
    n_head: int,
    segment_len: int,
    width: int,
    capacity: int,
    n_positions: int,
    window: int | None,
    itemsize: int,
    cache_itemsize: int,
) -> Sizes:
    """Returns the sizes of a call, with the tile rounded up to what registers have, and no larger than the scores.

    A step serves two heads where their number is even and it fits: it is bound by waits for results, which the other
    head's work fills (TPU v5e, 80 queries and 768 slots of width 64: 1480 instructions for one head, 2580 for two).
    """
    query_block = min(tile.query, segment_len)
    query_block = round_up(query_block, 16 if query_block <= LANES else LANES)
    ring_block = max(round_up(min(tile.key, capacity), LANES), LANES)
    own_block = min(round_up(segment_len, LANES), round_up(tile.key, LANES))
    sizes = Sizes(
        heads=1,
        width=width,
        capacity=capacity,
        query_block=query_block,
        ring_block=ring_block,
        own_block=own_block,
        n_own=-(-segment_len // own_block),
        n_positions=min(n_positions, capacity + segment_len),
        clamped=0 < n_positions < capacity + segment_len,
        window=window,
    )
    two = dataclasses.replace(sizes, heads=2)
    return two if n_head % 2 == 0 and two.vmem_bytes(itemsize, cache_itemsize) <= DEFAULT_VMEM else sizes


def refusal(problem: Problem, *, vmem: int) -> str | None:
    """Returns why the kernel cannot serve a call on a KV cache: the limit and the given number; None: it can.

    Args:
      problem: the call, of a type and on a TPU that there are kernels for.
      vmem: bytes of a core's VMEM.
    """
    stored = problem.cache_dtype or problem.dtype
    if stored not in _ITEMSIZES:
        return f"the kernel reads a cache of {' or '.join(_ITEMSIZES)}, and its type is {stored}"
    if problem.d_head > _WIDEST_HEAD:
        return f"the head width is {problem.d_head}, above {_WIDEST_HEAD}"
    need, most = _sizes_of(problem).vmem_bytes(*_itemsizes(problem)), vmem - SPARE_VMEM
    if need > most:
        return (
            f"{problem.n_positions} position keys of width {problem.d_head} need {need / 2**20:.1f} MiB of VMEM, above "
            f"{most / 2**20:.1f}"
        )
    return None


def default_tile(problem: Problem) -> Tile:
    """Returns the tile for a call on a KV cache: queries of a segment, and blocks that cut the ring evenly."""
    segment_len, capacity = problem.segment_len, problem.capacity or 0
    query = round_up(segment_len, 16) if segment_len <= LANES else 2 * LANES
    n_block = max(-(-capacity // _LARGEST_BLOCK), 1)
    return Tile(query, max(round_up(-(-capacity // n_block), LANES), LANES))


def _sizes_of(problem: Problem) -> Sizes:
    itemsize, cache_itemsize = _itemsizes(problem)
    return make_sizes(
        default_tile(problem),
        n_head=problem.n_head,
        segment_len=problem.segment_len,
        width=problem.d_head,
        capacity=problem.capacity or 0,
        n_positions=problem.n_positions,
        window=problem.window,
        itemsize=itemsize,
        cache_itemsize=cache_itemsize,
    )


def _itemsizes(problem: Problem) -> tuple[int, int]:
    return _ITEMSIZES[problem.dtype], _ITEMSIZES[problem.cache_dtype or problem.dtype]
