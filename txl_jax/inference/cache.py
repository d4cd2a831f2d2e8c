"""The KV cache of inference, in a ring of slots."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import MemoryStart
from txl_jax.memory import start_valid
from txl_jax.ops.matmul import Int8, quantize


class KVCache(flax.struct.PyTreeNode):
    """A KV cache: the memory, projected once to keys and values, in a ring of R slots per row.

    Training keeps the layers' inputs instead (`txl_jax.memory.Memory`), since the projections
    change with every update. A segment of L tokens overwrites the oldest L slots, so nothing is
    moved. R is M rounded up to a multiple of L, so that no segment is written across the ring's
    end. Each layer has its own arrays: one array for all layers would have to be cut apart, that is
    copied, in every step. Keys are along their last axis, values are not: the order in which the
    products of attention read them (on a CPU, a step of one token takes 1.2 times as long with both
    laid out as the values).
    """

    # Per layer [B, H, E, R]; int8 has a scale per row, head and slot.
    keys: tuple[jax.Array | Int8, ...]
    # Per layer [B, H, R, E]; the same.
    values: tuple[jax.Array | Int8, ...]
    # int32 [B], how many of the latest slots may be seen, at most M.
    valid: jax.Array
    # int32 [], the oldest slot, where the next segment goes; [B] if each row has its own.
    write_index: jax.Array
    # M
    mem_len: int = flax.struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """R."""
        return self.keys[0].shape[3]


@flax.struct.dataclass
class InitialKeyValue:
    """The contents of each slot of an empty `KVCache`, per layer [H, E].

    They are the projections of a zero state.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def cache_capacity(*, mem_len: int, segment_len: int) -> int:
    """Returns R: M rounded up to a multiple of L."""
    return -(-mem_len // segment_len) * segment_len


def as_cache_dtype(states: jax.Array, dtype: jnp.dtype, *, axis: int) -> jax.Array | Int8:
    """Returns keys or values in the cache's dtype. `axis` is E's."""
    return quantize(states, axis=axis) if dtype == jnp.int8 else states.astype(dtype)


def write(
    cache: KVCache, keys: Sequence[jax.Array], values: Sequence[jax.Array], *, after: jax.Array
) -> KVCache:
    """Writes a segment's keys and values, per layer [B, H, L, E], over the oldest slots.

    `after` is the same as in `write_slots`.
    """
    n_row, segment_len, capacity = keys[0].shape[0], keys[0].shape[2], cache.capacity
    if not capacity:
        return cache
    if cache.write_index.ndim:  # Each row has its own, and L is 1.
        cache = write_slots(
            cache, keys, values, jnp.arange(n_row), cache.write_index, count=n_row, after=after
        )
    else:
        index = _index_after(cache.write_index, after)
        cache = _write_rings(
            cache, keys, values, lambda ring, new, axis: _update(ring, new, {axis: index})
        )
    return cache.replace(
        valid=jnp.minimum(cache.valid + segment_len, cache.mem_len),
        write_index=(cache.write_index + segment_len) % capacity,
    )


def write_slots(
    cache: KVCache,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    rows: jax.Array,
    slots: jax.Array,
    *,
    count: jax.Array | int,
    after: jax.Array,
) -> KVCache:
    """Writes the first `count` of n tokens to any slots of the rings.

    `valid` and `write_index` do not change.

    Keys and values are, per layer, [n, H, 1, E] with one token of each row, or [1, H, n, E] with a
    segment of one row. `rows` and `slots`, int32 [n], are the places of the tokens. `after` is any
    array that is computed from all reads of the cache. The slots are made to depend on it, since
    otherwise XLA may write before the last read and then keeps a copy of the whole cache, in every
    step (on a CPU 21 ms a token more for 12 layers with M = 2100; `lax.optimization_barrier` is
    removed before it decides).
    """
    slots = _index_after(slots, after)

    def write_tokens(ring: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        token_axis = 0 if new.shape[axis] == 1 else axis

        def write_token(i: jax.Array, ring: jax.Array) -> jax.Array:
            token = jax.lax.dynamic_slice_in_dim(new, i, 1, token_axis)
            return _update(ring, token, {0: rows[i], axis: slots[i]})

        return jax.lax.fori_loop(0, count, write_token, ring)

    return _write_rings(cache, keys, values, write_tokens)


def _index_after(index: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the index plus 0, which XLA cannot prove to be independent of `after`."""
    return index + jnp.minimum(jnp.abs(after.reshape(-1)[0]).astype(jnp.int32), 0)


def _update(ring: jax.Array, new: jax.Array, start: dict[int, jax.Array]) -> jax.Array:
    """Writes `new` into a ring, from the indices `start` by axis, or 0.

    bfloat16 is written as bits: XLA's CPU backend would turn the ring to float32 for it and back
    (12 layers with M = 2100, a token: 11 ms instead of 16 ms, a copy still; in float32 nothing is
    copied).
    """
    indices = [jnp.asarray(start.get(axis, 0), jnp.int32) for axis in range(ring.ndim)]
    if ring.dtype != jnp.bfloat16:
        return jax.lax.dynamic_update_slice(ring, new, indices)
    ring_bits, new_bits = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (ring, new))
    written = jax.lax.dynamic_update_slice(ring_bits, new_bits, indices)
    return jax.lax.bitcast_convert_type(written, ring.dtype)


def _write_rings(
    cache: KVCache,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    write_array: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> KVCache:
    """Applies `write_array` to each array of the cache.

    `write_array` takes a ring, new states in the ring's layout, and the axis of the ring's slots.
    """

    def write_ring(ring: jax.Array | Int8, new: jax.Array, axis: int) -> jax.Array | Int8:
        stored = as_cache_dtype(new, ring.dtype, axis=5 - axis)
        return jax.tree.map(lambda ring, new: write_array(ring, new, axis), ring, stored)

    return cache.replace(
        keys=tuple(
            write_ring(ring, new.swapaxes(2, 3), 3)
            for ring, new in zip(cache.keys, keys, strict=True)
        ),
        values=tuple(
            write_ring(ring, new, 2) for ring, new in zip(cache.values, values, strict=True)
        ),
    )


def reset_cache(
    cache: KVCache, marked: jax.Array, rows: InitialKeyValue, start: MemoryStart
) -> KVCache:
    """Sets the batch rows in `marked` (bool [B]) back to the state of `init_cache`."""
    valid = jnp.where(marked, start_valid(cache.mem_len, start), cache.valid)
    if start is MemoryStart.MASKED:  # Masked slots need no clearing.
        return cache.replace(valid=valid)

    def clear(_: int, rings: Any) -> Any:
        dtype, here = cache.keys[0].dtype, marked[:, None, None, None]
        keys = tuple(as_cache_dtype(row[None, :, :, None], dtype, axis=2) for row in rows.keys)
        values = tuple(as_cache_dtype(row[None, :, None, :], dtype, axis=3) for row in rows.values)
        return jax.tree.map(lambda ring, fill: jnp.where(here, fill, ring), rings, (keys, values))

    # Almost always no row is marked, and the rings are gigabytes: a loop of no iterations does not
    # copy them.
    keys, values = jax.lax.fori_loop(
        0, jnp.any(marked).astype(jnp.int32), clear, (cache.keys, cache.values)
    )
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


def take_unrotated(ready: KVCache, cache: KVCache, rows: jax.Array) -> KVCache:
    """Returns `ready` with the `rows` (bool [B]) taken from `cache`.

    `ready` is for segments of one token, and `cache` is a ring of segments.
    """

    def take(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new, old) if old.ndim else old

    return jax.tree.map(take, ready, unrotate(cache))


def repeat_rows(cache: KVCache, count: int) -> KVCache:
    """Returns the cache of `count` rows for each row of a cache whose rows share one index."""
    return jax.tree.map(
        lambda array: jnp.repeat(array, count, axis=0) if array.ndim else array, cache
    )
