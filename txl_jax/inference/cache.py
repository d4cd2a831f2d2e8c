"""The KV cache of inference, in a ring of slots."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from txl_jax.config import MemoryStart
from txl_jax.memory import start_valid
from txl_jax.ops.matmul import Int8, quantize
from txl_jax.sharding.mesh import ambient_mesh


class KVCache(flax.struct.PyTreeNode):
    """A KV cache: the memory, projected once to keys and values, in a ring of R slots per row.

    Training keeps the layers' inputs instead (`txl_jax.memory.Memory`), since the projections
    change with every update. A segment of L tokens overwrites the oldest L slots, so nothing is
    moved. R is M rounded up to a multiple of L, so that no segment is written across the ring's
    end. Each layer has its own arrays, because one array for all layers would have to be split, and
    therefore copied, in every step. Slots are the last axis of the keys, but not of the values:
    attention's matmuls read them in this order (on a CPU, a step of one token takes 1.2 times as
    long if keys have the layout of the values).
    """

    # Keys of each layer, [B, H, E, R]. int8 has a scale per row, head and slot.
    keys: tuple[jax.Array | Int8, ...]
    # Values of each layer, [B, H, R, E]. int8 has a scale per row, head and slot.
    values: tuple[jax.Array | Int8, ...]
    # int32 [B], how many of the latest slots may be seen, at most M.
    valid: jax.Array
    # int32 [], the oldest slot, where the next segment is written, or [B] if each row has its own.
    write_index: jax.Array
    # M, the maximum number of slots that may be seen.
    mem_len: int = flax.struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """R, the number of slots of each row."""
        return self.keys[0].shape[3]


@flax.struct.dataclass
class InitialKeyValue:
    """The key and value in each slot of an empty `KVCache`: the projections of a zero state."""

    keys: tuple[jax.Array, ...]  # The key of each layer, [H, E].
    values: tuple[jax.Array, ...]  # The value of each layer, [H, E].


class _Rings(NamedTuple):
    """The rings of a `KVCache`, without its bookkeeping."""

    keys: tuple[jax.Array | Int8, ...]  # Keys of each layer, [B, H, E, R].
    values: tuple[jax.Array | Int8, ...]  # Values of each layer, [B, H, R, E].


# A TPU stores the last axis of an array in rows of this many numbers.
_TPU_LANES = 128
# The axes of the slots in `KVCache.keys` and in `KVCache.values`.
_KEY_SLOTS = 3
_VALUE_SLOTS = 2


def cache_capacity(*, mem_len: int, segment_len: int) -> int:
    """Returns R: M rounded up to a multiple of L."""
    return -(-mem_len // segment_len) * segment_len


def as_cache_dtype(states: jax.Array, dtype: jnp.dtype, *, axis: int) -> jax.Array | Int8:
    """Returns keys or values in the cache's dtype. `axis` is E's."""
    if dtype == jnp.int8:
        return quantize(states, axis=axis)
    return states.astype(dtype)


def write(
    cache: KVCache, keys: Sequence[jax.Array], values: Sequence[jax.Array], *, after: jax.Array
) -> KVCache:
    """Writes a segment's keys and values, per layer [B, H, L, E], over the oldest slots.

    `after` is the same as in `write_slots`.
    """
    n_row, _, segment_len, _ = keys[0].shape
    capacity = cache.capacity
    if capacity == 0:
        return cache

    has_index_per_row = cache.write_index.ndim > 0
    if has_index_per_row:
        # In this case a segment is one token, and each row writes it to its own slot.
        cache = write_slots(
            cache, keys, values, jnp.arange(n_row), cache.write_index, count=n_row, after=after
        )
    else:
        index = _index_after(cache.write_index, after)

        def write_segment(ring: jax.Array, new: jax.Array, slot_axis: int) -> jax.Array:
            """Writes the segment's keys or values of one layer into its ring."""
            return _update(ring, new, {slot_axis: index})

        cache = _write_rings(cache, keys, values, write_segment)

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

    Args:
      cache: The cache to write to.
      keys: Keys of each layer, [n, H, 1, E] with one token of each row, or [1, H, n, E] with a
        segment of one row.
      values: Values of each layer, in the shape of the keys.
      rows: int32 [n], the row that each token is written to.
      slots: int32 [n], the slot that each token is written to.
      count: Number of tokens to write.
      after: Any array that is computed from all reads of the cache. The slots are made to depend on
        it, since otherwise XLA may write before the last read and then keeps a copy of the whole
        cache, in every step (on a CPU 21 ms a token more for 12 layers with M = 2100;
        `lax.optimization_barrier` is removed before it decides).
    """
    slots = _index_after(slots, after)

    def write_tokens(ring: jax.Array, new: jax.Array, slot_axis: int) -> jax.Array:
        has_token_per_row = new.shape[slot_axis] == 1
        token_axis = 0 if has_token_per_row else slot_axis

        def write_token(i: jax.Array, ring: jax.Array) -> jax.Array:
            token = jax.lax.dynamic_slice_in_dim(new, i, 1, token_axis)
            return _update(ring, token, {0: rows[i], slot_axis: slots[i]})

        return jax.lax.fori_loop(0, count, write_token, ring)

    return _write_rings(cache, keys, values, write_tokens)


def keep_layout(cache: KVCache) -> KVCache:
    """Returns the cache in the layout in which a step of one token reads it on a TPU.

    Without this function, libtpu 0.0.42.1 changes the layout at both ends of a call of 16 tokens,
    and copies weights for the layout within the loop. For enwik8_24l that is 1.006 GB through the
    device's memory per token, and 0.833 GB with this function. If only the values are constrained,
    the keys are copied instead, for 1.0 GB.

    It applies to bfloat16, and to heads that fill a TPU's tile of 128 lanes, because others would
    be padded. A sharded cache is not changed: fixed layouts with the partitioner are untested.
    """
    ring = cache.keys[0]
    if isinstance(ring, Int8) or ring.dtype != jnp.bfloat16 or ambient_mesh() is not None:
        return cache
    d_head = ring.shape[2]
    if d_head % _TPU_LANES:
        return cache

    # Both have the features E along the lanes, as axes from major to minor.
    by_key_slots = Layout(major_to_minor=(0, 1, 3, 2))
    by_value_slots = Layout(major_to_minor=(0, 1, 2, 3))

    def constrain(rings: _Rings) -> _Rings:
        return _Rings(
            tuple(with_layout_constraint(ring, by_key_slots) for ring in rings.keys),
            tuple(with_layout_constraint(ring, by_value_slots) for ring in rings.values),
        )

    rings = jax.lax.platform_dependent(
        _Rings(cache.keys, cache.values), tpu=constrain, default=lambda rings: rings
    )
    return cache.replace(keys=rings.keys, values=rings.values)


def _index_after(index: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the index plus 0, which XLA cannot prove to be independent of `after`."""
    return index + jnp.minimum(jnp.abs(after.reshape(-1)[0]).astype(jnp.int32), 0)


def _update(ring: jax.Array, new: jax.Array, start: dict[int, jax.Array]) -> jax.Array:
    """Writes `new` into a ring, from the index `start[axis]` of each axis, or from 0."""
    indices = [jnp.asarray(start.get(axis, 0), jnp.int32) for axis in range(ring.ndim)]
    if ring.dtype != jnp.bfloat16:
        return jax.lax.dynamic_update_slice(ring, new, indices)
    # The program's platform decides. It may differ from this process's: programs are also compiled
    # for devices that are not attached (`experiments.bench.estimate`, `jax.export`).
    return jax.lax.platform_dependent(
        ring, new, indices, cpu=_update_bits, default=jax.lax.dynamic_update_slice
    )


def _update_bits(ring: jax.Array, new: jax.Array, indices: list[jax.Array]) -> jax.Array:
    """Writes bfloat16 as 16-bit integers, in place on a CPU.

    XLA's CPU backend would turn the ring to float32 for the update and back (12 layers with
    M = 2100, a token: 11 ms instead of 16 ms, a copy still; in float32 nothing is copied). On a TPU
    the integers would cost two copies of the ring in each layer and step (24 layers with M = 3800,
    a token: 1.59 GB through the device's memory instead of 0.96).
    """
    ring_bits = jax.lax.bitcast_convert_type(ring, jnp.uint16)
    new_bits = jax.lax.bitcast_convert_type(new, jnp.uint16)
    written = jax.lax.dynamic_update_slice(ring_bits, new_bits, indices)
    return jax.lax.bitcast_convert_type(written, ring.dtype)


def _write_rings(
    cache: KVCache,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    write_array: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> KVCache:
    """Applies `write_array` to each array of the cache.

    `write_array` takes an array of the cache, new states in its layout and dtype, and the axis of
    its slots. It returns the array with the new states in it.
    """

    def write_ring(ring: jax.Array | Int8, new: jax.Array, slot_axis: int) -> jax.Array | Int8:
        # E and the slots are the last two axes, 2 and 3, in either order.
        stored = as_cache_dtype(new, ring.dtype, axis=5 - slot_axis)
        return jax.tree.map(lambda ring, new: write_array(ring, new, slot_axis), ring, stored)

    new_keys = []
    for ring, key in zip(cache.keys, keys, strict=True):
        new_keys.append(write_ring(ring, key.swapaxes(2, 3), _KEY_SLOTS))

    new_values = []
    for ring, value in zip(cache.values, values, strict=True):
        new_values.append(write_ring(ring, value, _VALUE_SLOTS))
    return cache.replace(keys=tuple(new_keys), values=tuple(new_values))


def reset_cache(
    cache: KVCache, marked: jax.Array, initial: InitialKeyValue, start: MemoryStart
) -> KVCache:
    """Sets the batch rows in `marked` (bool [B]) back to the state of `init_cache`."""
    valid = jnp.where(marked, start_valid(cache.mem_len, start), cache.valid)
    if start is MemoryStart.MASKED:  # Masked slots need no clearing.
        return cache.replace(valid=valid)

    def clear(_: int, rings: _Rings) -> _Rings:
        dtype = rings.keys[0].dtype
        keys = tuple(as_cache_dtype(key[None, :, :, None], dtype, axis=2) for key in initial.keys)
        values = tuple(
            as_cache_dtype(value[None, :, None, :], dtype, axis=3) for value in initial.values
        )
        is_cleared = marked[:, None, None, None]
        return jax.tree.map(
            lambda ring, fill: jnp.where(is_cleared, fill, ring), rings, _Rings(keys, values)
        )

    # Almost always no row is marked, and the rings are gigabytes: a loop of no iterations does not
    # copy them.
    n_iteration = jnp.any(marked).astype(jnp.int32)
    rings = jax.lax.fori_loop(0, n_iteration, clear, _Rings(cache.keys, cache.values))
    return cache.replace(keys=rings.keys, values=rings.values, valid=valid)


def unrotate(cache: KVCache) -> KVCache:
    """Returns the cache for segments of one token: M slots, the oldest first."""

    def turn(ring: jax.Array, slot_axis: int) -> jax.Array:
        # The next write goes to the oldest slot. Queries attend only to the latest M of R slots.
        oldest_first = jnp.roll(ring, -cache.write_index, slot_axis)
        first = cache.capacity - cache.mem_len
        return jax.lax.slice_in_dim(oldest_first, first, cache.capacity, axis=slot_axis)

    return cache.replace(
        keys=jax.tree.map(functools.partial(turn, slot_axis=_KEY_SLOTS), cache.keys),
        values=jax.tree.map(functools.partial(turn, slot_axis=_VALUE_SLOTS), cache.values),
        write_index=jnp.zeros((), jnp.int32),
    )


def take_unrotated(ready: KVCache, cache: KVCache, rows: jax.Array) -> KVCache:
    """Returns `ready` with the `rows` (bool [B]) taken from `cache`.

    `ready` is for segments of one token, and `cache` is a ring of segments.
    """

    def take(old: jax.Array, new: jax.Array) -> jax.Array:
        if old.ndim == 0:  # The shared index, which is 0 in both.
            return old
        is_taken = jnp.expand_dims(rows, tuple(range(1, old.ndim)))
        return jnp.where(is_taken, new, old)

    return jax.tree.map(take, ready, unrotate(cache))


def repeat_rows(cache: KVCache, count: int) -> KVCache:
    """Returns the cache of `count` rows for each row of a cache whose rows share one index."""

    def repeat(array: jax.Array) -> jax.Array:
        if array.ndim == 0:  # The shared index.
            return array
        return jnp.repeat(array, count, axis=0)

    return jax.tree.map(repeat, cache)
