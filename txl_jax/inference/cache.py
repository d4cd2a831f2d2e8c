"""The KV cache of inference, in a ring of slots."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import MemoryStart
from txl_jax.memory import start_valid
from txl_jax.ops.matmul import Int8, quantize


class KVCache(flax.struct.PyTreeNode):
    """A KV cache: the memory, projected once to keys and values, in a ring of R slots per row.

    Training keeps the layers' inputs instead (`txl_jax.memory.Memory`), since the projections change with every update.

    A segment of L tokens overwrites the oldest L slots, so nothing is moved; R is M rounded up to a multiple of L,
    so that no segment is written across the ring's end. Each layer has arrays of its own: one array of all layers
    would have to be cut apart, that is copied, in every step. Keys lie along their last axis, values do not: the
    order in which the products of attention read them (on a CPU, a step of one token takes 1.2 times as long with
    both laid out as the values).

    Attributes:
      keys: per layer [B, H, E, R]; int8 has a scale per row, head and slot.
      values: per layer [B, H, R, E]; the same.
      valid: int32 [B], how many of the newest slots may be seen; at most M.
      write_index: int32 [], the oldest slot: where the next segment goes; [B] where rows are at places of their own.
      mem_len: M.
    """

    keys: tuple[jax.Array | Int8, ...]
    values: tuple[jax.Array | Int8, ...]
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

    def fill(row: jax.Array, axis: int) -> jax.Array | Int8:
        ring = jnp.broadcast_to(jnp.expand_dims(row[None], axis), (*lead[:axis], capacity, *lead[axis:]))
        return as_stored(ring, dtype, axis=5 - axis)

    return KVCache(
        keys=tuple(fill(row, 3) for row in rows.keys),
        values=tuple(fill(row, 2) for row in rows.values),
        valid=jnp.full((batch_size,), start_valid(mem_len, start), jnp.int32),
        write_index=jnp.zeros((), jnp.int32),
        mem_len=mem_len,
    )


def as_stored(states: jax.Array, dtype: jnp.dtype, *, axis: int) -> jax.Array | Int8:
    """Returns keys or values in the type of the cache; `axis` is that of E."""
    return quantize(states, axis=axis) if dtype == jnp.int8 else states.astype(dtype)


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

    def write_array(axis: int, ring: jax.Array, new: jax.Array) -> jax.Array:
        if ring.dtype != jnp.bfloat16:
            return jax.lax.dynamic_update_slice_in_dim(ring, new, index, axis)
        # As bits: XLA's CPU backend would turn the ring to float32 for it and back (12 layers with M = 2100, a token:
        # 11 ms instead of 16 ms, a copy still; in float32 nothing is copied).
        ring_bits, new_bits = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (ring, new))
        written = jax.lax.dynamic_update_slice_in_dim(ring_bits, new_bits, index, axis)
        return jax.lax.bitcast_convert_type(written, ring.dtype)

    def write_ring(ring: jax.Array | Int8, new: jax.Array, axis: int) -> jax.Array | Int8:
        stored = as_stored(new, ring.dtype, axis=5 - axis)
        found: jax.Array | Int8 = jax.tree.map(functools.partial(write_array, axis), ring, stored)
        return found

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

    def clear(rings: tuple[Any, ...], fills: tuple[jax.Array, ...], axis: int) -> tuple[Any, ...]:
        here = marked[:, None, None, None]
        stored = tuple(as_stored(fill, ring.dtype, axis=axis) for ring, fill in zip(rings, fills, strict=True))
        found: tuple[Any, ...] = jax.tree.map(lambda ring, fill: jnp.where(here, fill, ring), rings, stored)
        return found

    def clear_both(_: int, rings: tuple[Any, Any]) -> tuple[Any, Any]:
        keys, values = rings
        return (
            clear(keys, tuple(row[None, :, :, None] for row in rows.keys), 2),
            clear(values, tuple(row[None, :, None, :] for row in rows.values), 3),
        )

    # Almost always no row is marked, and the rings are gigabytes: a loop of no iterations does not copy them.
    keys, values = jax.lax.fori_loop(0, jnp.any(marked).astype(jnp.int32), clear_both, (cache.keys, cache.values))
    return cache.replace(keys=keys, values=values, valid=valid)


def unrotate(cache: KVCache) -> KVCache:
    """Returns the cache for segments of one token: M slots, the oldest first."""
    mem_len, capacity = cache.mem_len, cache.capacity

    def turn(axis: int, ring: jax.Array) -> jax.Array:
        turned = jnp.roll(ring, -cache.write_index, axis)
        return jax.lax.slice_in_dim(turned, capacity - mem_len, capacity, axis=axis)

    return cache.replace(
        keys=jax.tree.map(functools.partial(turn, 3), cache.keys),
        values=jax.tree.map(functools.partial(turn, 2), cache.values),
        write_index=jnp.zeros((), jnp.int32),
    )
