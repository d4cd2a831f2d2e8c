"""Tests of the memory: shapes, filled slots, order of rows, resets, and the one stop_gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax import memory as memory_lib
from txl_jax.config import MemoryStart
from txl_jax.errors import UserError

N, B, D = 2, 3, 5


def start(mem_len: int, how: MemoryStart = MemoryStart.MASKED, dtype=jnp.float32) -> memory_lib.Memory:
    return memory_lib.init(n_layer=N, batch_size=B, mem_len=mem_len, d_model=D, dtype=dtype, start=how)


def layer_inputs(segment_len: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, B, segment_len, D)).astype(np.float32)


def test_start():
    for how, valid in ((MemoryStart.MASKED, 0), (MemoryStart.ZEROS, 4)):
        memory = start(4, how, jnp.bfloat16)
        assert (memory.hidden.shape, memory.hidden.dtype, memory.mem_len) == ((N, B, 4, D), jnp.bfloat16, 4)
        assert (memory.valid.dtype, memory.valid.tolist()) == (jnp.int32, [valid] * B)
        assert not memory.hidden.any()
        assert memory_lib.update(memory, jnp.asarray(layer_inputs(3))).hidden.dtype == jnp.bfloat16


def test_a_memory_of_other_rows_widths_or_layers_is_refused():
    memory = start(4)
    memory.check(np.zeros((B, 2), int), N)
    memory.check(np.zeros((B, 2, D)), N)
    for shape, n_layer in (((B,), N), ((B, 2, D + 1), N), ((B + 1, 2), N), ((B, 2), N + 1)):
        with pytest.raises(UserError):
            memory.check(np.zeros(shape, float if len(shape) == 3 else int), n_layer)


@pytest.mark.parametrize("mem_len", [0, 1, 4, 6, 11])
@pytest.mark.parametrize("segment_lens", [(4, 4, 4, 4), (1, 6, 2, 9), (12, 1)])
def test_update_keeps_the_last_rows_in_order(mem_len, segment_lens):
    memory, text = start(mem_len), np.zeros((N, B, 0, D), np.float32)
    for k, segment_len in enumerate(segment_lens):
        new = layer_inputs(segment_len, seed=k)
        memory, text = memory_lib.update(memory, jnp.asarray(new)), np.concatenate([text, new], axis=2)
        filled = min(text.shape[2], mem_len)
        assert memory.hidden.shape == (N, B, mem_len, D) and memory.valid.tolist() == [filled] * B
        np.testing.assert_array_equal(memory.hidden[:, :, mem_len - filled :], text[:, :, text.shape[2] - filled :])


@pytest.mark.parametrize("segment_len", [2, 4, 7])
def test_update_stops_the_gradient_of_what_enters(segment_len):
    def kept(new):
        return jnp.sum(memory_lib.update(start(4), new).hidden)

    new = jnp.asarray(layer_inputs(segment_len))
    assert kept(new) != 0
    np.testing.assert_array_equal(jax.grad(kept)(new), np.zeros_like(new))


@pytest.mark.parametrize("how", MemoryStart)
def test_reset_touches_only_the_marked_rows(how):
    memory = memory_lib.update(start(4, how), jnp.asarray(layer_inputs(3)))
    found, fresh = memory_lib.reset(memory, jnp.asarray([False, True, False]), how), start(4, how)
    assert found.valid.tolist() == [memory.valid[0], fresh.valid[1], memory.valid[2]]
    for b in (0, 2):
        np.testing.assert_array_equal(found.hidden[:, b], memory.hidden[:, b])
    if how is MemoryStart.ZEROS:  # Masked slots may hold anything.
        assert not found.hidden[:, 1].any()
    else:  # And the rows fill on their own.
        assert memory_lib.update(found, jnp.asarray(layer_inputs(1))).valid.tolist() == [4, 1, 4]
