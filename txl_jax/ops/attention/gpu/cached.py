"""Attention over a KV cache on NVIDIA GPUs, for inference.

As in `attention.py`, rows are taken in chunks, of each of which cuBLAS computes the position scores by distance. The
ring is read where it lies: a slot's age, and with it the distance, is computed in the kernel. One row has few tiles of
queries; the ring is then split among further programs, whose sums are added at the end.
"""

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.cached import CachedVisibility, Position
from txl_jax.ops.attention.gpu import cudnn
from txl_jax.ops.attention.gpu.chunks import over_chunks, rows_per_chunk
from txl_jax.ops.attention.gpu.padding import ALIGNMENT, pad, round_up, widen
from txl_jax.ops.attention.gpu.position_table import precision, table_dtype
from txl_jax.ops.attention.gpu.triton.cached import CachedCall, CachedInputs, cached_forward
from txl_jax.ops.attention.gpu.triton.tiles import LOG2_E
from txl_jax.ops.attention.problem import Tile

_PROGRAMS = 256  # Two for each of an H200's 132 multiprocessors.
_TILES_PER_SPLIT = 4  # At least.


def gpu_cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    position: Position,
    visibility: CachedVisibility,
    *,
    tile: Tile,
    kernel: str | None = "triton",
    interpret: bool = False,
    table_bytes: int | None = None,
) -> jax.Array:
    """Computes weighted sums of the values: [B, H, L, E].

    Args:
      query: [B, H, L, E], with u added and divided by sqrt(E).
      key: [B, H, L, E], of the segment.
      value: [B, H, L, E].
      ring: stored keys [B, H, E, R] and values [B, H, R, E], of any type.
      position: as of `ops.attention.cached.cached_attention`.
      visibility: which keys a query sees.
      tile: queries and keys of a tile, powers of two of at least 16.
      kernel: "triton" or "cudnn" (`limits.kernel_of`).
      interpret: whether to interpret the kernel, on any device and slowly; of cuDNN: to use XLA in its place.
      table_bytes: largest table of position scores, of a chunk of rows; None: as `chunks` has it.
    """
    if kernel == "cudnn":
        return cudnn.cached_attention(
            query, key, value, ring, position, visibility, interpret=interpret, table_bytes=table_bytes
        )
    batch, n_head, segment_len, width = query.shape
    keys = None if position is None else _position_keys(position, query.dtype)
    pitch = 0 if keys is None else keys.shape[2]
    size = rows_per_chunk(batch, n_head * segment_len * pitch * table_dtype(query.dtype).itemsize, table_bytes)
    call = CachedCall(
        n_head=n_head,
        segment_len=segment_len,
        capacity=visibility.capacity,
        width=width,
        n_positions=0 if position is None else _n_positions(position),
        pitch=pitch,
        window=visibility.window,
        splits=_splits(-(-segment_len // tile.query) * size * n_head, -(-visibility.capacity // tile.key)),
        tile=tile,
        interpret=interpret,
    )
    inputs = _inputs(query, key, value, ring, visibility)

    def of_chunk(carry: None, first: jax.Array, size: int) -> tuple[None, jax.Array]:
        table = None if position is None or keys is None else _table(position, keys, first, size)
        mine = inputs._replace(table=table, first_row=jnp.asarray(first, jnp.int32).reshape(1))
        return carry, cached_forward(call, mine, size)

    _, output = over_chunks(of_chunk, None, batch, size)
    result: jax.Array = output[..., :width]
    return result


def _inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    visibility: CachedVisibility,
) -> CachedInputs:
    """Returns what all chunks of rows have in common."""
    batch, n_head, segment_len, _ = query.shape
    own_query, own_key, own_value = (widen(x).reshape(batch * n_head, segment_len, -1) for x in (query, key, value))
    ring_key, ring_value = (x.reshape(batch * n_head, -1) if visibility.capacity else None for x in ring)
    return CachedInputs(
        own_query,
        own_key,
        own_value,
        ring_key,
        ring_value,
        table=None,
        first_row=None,
        valid=visibility.valid,
        write_index=visibility.write_index.reshape(1),
    )


def _splits(programs: int, tiles: int) -> int:
    """Returns into how many parts the tiles of the ring are split, so that there are enough programs for a GPU."""
    return max(1, min(_PROGRAMS // programs, tiles // _TILES_PER_SPLIT))


def _n_positions(position: tuple[jax.Array, jax.Array | None, jax.Array | None]) -> int:
    """Returns P, the last axis of position keys [H, E, P] and scores [H, P]."""
    return next(x.shape[-1] for x in position[1:] if x is not None)


def _position_keys(position: tuple[jax.Array, jax.Array | None, jax.Array | None], dtype: jnp.dtype) -> jax.Array:
    """Returns the right sides of the products, with scores as a further row: [H, E + 1, rounded up, pitch]."""
    _, keys, scores = position
    pitch = round_up(_n_positions(position), ALIGNMENT)
    parts = [x for x in (keys, None if scores is None else scores[:, None, :]) if x is not None]
    rows = jnp.concatenate([x.astype(table_dtype(dtype)) for x in parts], axis=1)
    rows = pad(rows, 1, 0, round_up(rows.shape[1], ALIGNMENT) - rows.shape[1])
    return pad(rows, 2, 0, pitch - rows.shape[2])


def _table(
    position: tuple[jax.Array, jax.Array | None, jax.Array | None], keys: jax.Array, first: jax.Array, size: int
) -> jax.Array:
    """Returns the position scores by distance of a chunk, times log2(e): [H, b * L * pitch]."""
    queries = jax.lax.dynamic_slice_in_dim(position[0], first, size).astype(jnp.float32)
    batch, n_head, segment_len, _ = queries.shape
    if position[1] is None:
        queries = queries[..., :0]
    if position[2] is not None:
        queries = jnp.concatenate([queries, jnp.ones((batch, n_head, segment_len, 1))], axis=-1)
    queries = pad(queries, 3, 0, keys.shape[1] - queries.shape[3])
    queries = (queries * LOG2_E).astype(keys.dtype).transpose(1, 0, 2, 3).reshape(n_head, batch * segment_len, -1)
    table = jnp.einsum(
        "hne,hep->hnp", queries, keys, precision=precision(keys.dtype), preferred_element_type=keys.dtype
    )
    return table.reshape(n_head, -1)
