"""The KV cache of inference, in a ring of slots."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import MemoryStart
from txl_jax.memory import start_valid


class KVCache(flax.struct.PyTreeNode):
    """A KV cache: the memory, projected once to keys and values, in a ring of R slots per row.

    Training keeps the layers' inputs instead (`txl_jax.memory.Memory`), since the projections change with every update.

    A segment of L tokens overwrites the oldest L slots, so nothing is moved; R is M rounded up to a multiple of L,
    so that no segment is written across the ring's end. Each layer has arrays of its own: one array of all layers
    would have to be cut apart, that is copied, in every step. Keys lie along their last axis, values do not: the
    order in which the products of attention read them (on a CPU, a step of one token takes 1.2 times as long with
    both laid out as the values).

    Attributes:
      keys: per layer [B, H, E, R].
      values: per layer [B, H, R, E].
      valid: int32 [B], how many of the newest slots may be seen; at most M.
      write_index: int32 [], the oldest slot: where the next segment goes.
      mem_len: M.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    valid: jax.Array
    write_index: jax.Array
    mem_len: int = flax.struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """R."""
        return self.keys[0].shape[3]


@flax.struct.dataclass
class InitialKeyValue:
    """Contents of each slot of an empty `KVCache`, per layer [H, E]: the projections of a zero state."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def cache_capacity(*, mem_len: int, segment_len: int) -> int:
    """Returns R: M rounded up to a multiple of L."""
    return -(-mem_len // segment_len) * segment_len


def init_cache(
    rows: InitialKeyValue, *, batch_size: int, mem_len: int, segment_len: int, dtype: jnp.dtype, start: MemoryStart
) -> KVCache:
    """Returns the cache before the first segment of `segment_len` tokens, stored as `dtype`."""
    capacity = cache_capacity(mem_len=mem_len, segment_len=segment_len)
    lead = (batch_size, *rows.keys[0].shape)

    def fill(row: jax.Array) -> jax.Array:
        return jnp.broadcast_to(row.astype(dtype)[None, :, :, None], (*lead, capacity))

    return KVCache(
        keys=tuple(fill(row) for row in rows.keys),
        values=tuple(fill(row).swapaxes(2, 3) for row in rows.values),
        valid=jnp.full((batch_size,), start_valid(mem_len, start), jnp.int32),
        write_index=jnp.zeros((), jnp.int32),
        mem_len=mem_len,
    )


def write(cache: KVCache, keys: Sequence[jax.Array], values: Sequence[jax.Array], *, after: jax.Array) -> KVCache:
    """Writes a segment's keys and values, per layer [B, H, L, E], over the oldest slots.

    Args:
      after: any value that is computed from all reads of the cache. The index is made to depend on it, since otherwise
        XLA may write before the last read and then keeps a copy of the whole cache, in every step (on a CPU 21 ms a
        token more for 12 layers with M = 2100; `lax.optimization_barrier` is removed before it decides).
    """
    segment_len, capacity = keys[0].shape[2], cache.capacity
    if not capacity:
        return cache
    zero = jnp.minimum(jnp.abs(after.reshape(-1)[0]).astype(jnp.int32), 0)  # Always 0, which XLA cannot prove.
    index = cache.write_index + zero

    def write_ring(ring: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        new = new.astype(ring.dtype)
        if ring.dtype != jnp.bfloat16:
            return jax.lax.dynamic_update_slice_in_dim(ring, new, index, axis)
        # As bits: XLA's CPU backend would turn the ring to float32 for it and back (12 layers with M = 2100, a token:
        # 11 ms instead of 16 ms, a copy still; in float32 nothing is copied).
        ring_bits, new_bits = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (ring, new))
        written = jax.lax.dynamic_update_slice_in_dim(ring_bits, new_bits, index, axis)
        return jax.lax.bitcast_convert_type(written, ring.dtype)

    return cache.replace(
        keys=tuple(write_ring(ring, new.swapaxes(2, 3), 3) for ring, new in zip(cache.keys, keys, strict=True)),
        values=tuple(write_ring(ring, new, 2) for ring, new in zip(cache.values, values, strict=True)),
        valid=jnp.minimum(cache.valid + segment_len, cache.mem_len),
        write_index=(cache.write_index + segment_len) % capacity,
    )


def reset_cache(cache: KVCache, marked: jax.Array, rows: InitialKeyValue, start: MemoryStart) -> KVCache:
    """Sets the batch rows in `marked` (bool [B]) back to the state of `init_cache`."""
    valid = jnp.where(marked, start_valid(cache.mem_len, start), cache.valid)
    if start is MemoryStart.MASKED:  # Masked slots need no clearing.
        return cache.replace(valid=valid)

    def clear(rings: tuple[jax.Array, ...], fills: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here = marked[:, None, None, None]
        return tuple(jnp.where(here, fill.astype(ring.dtype), ring) for ring, fill in zip(rings, fills, strict=True))

    def clear_both(_: int, rings: tuple[Any, Any]) -> tuple[Any, Any]:
        keys, values = rings
        return (
            clear(keys, tuple(row[None, :, :, None] for row in rows.keys)),
            clear(values, tuple(row[None, :, None, :] for row in rows.values)),
        )

    # Almost always no row is marked, and the rings are gigabytes: a loop of no iterations does not copy them.
    keys, values = jax.lax.fori_loop(0, jnp.any(marked).astype(jnp.int32), clear_both, (cache.keys, cache.values))
    return cache.replace(keys=keys, values=values, valid=valid)


def unrotate(cache: KVCache) -> KVCache:
    """Returns the cache for segments of one token: M slots, the oldest first."""
    mem_len, capacity = cache.mem_len, cache.capacity

    def turn(ring: jax.Array, axis: int) -> jax.Array:
        turned = jnp.roll(ring, -cache.write_index, axis)
        return jax.lax.slice_in_dim(turned, capacity - mem_len, capacity, axis=axis)

    return cache.replace(
        keys=tuple(turn(ring, 3) for ring in cache.keys),
        values=tuple(turn(ring, 2) for ring in cache.values),
        write_index=jnp.zeros((), jnp.int32),
    )
