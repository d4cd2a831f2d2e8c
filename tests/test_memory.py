"""Tests of the memory: filled slots, order of rows, resets, the one stop_gradient; and of the scan
over segments.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny_run
from txl_jax import memory as memory_lib
from txl_jax import recurrence
from txl_jax.config import MemoryStart
from txl_jax.errors import UserError
from txl_jax.recurrence import Segments

S, B, L, M, N, D = 6, 3, 2, 5, 4, 7


def start(how: MemoryStart = MemoryStart.MASKED, mem_len: int = M) -> memory_lib.Memory:
    return memory_lib.init(
        n_layer=N, batch_size=B, mem_len=mem_len, d_model=D, dtype=jnp.float32, start=how
    )


def layer_inputs(segment_len: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(N, B, segment_len, D)), jnp.float32)


def test_a_memory_of_other_rows_widths_or_layers_is_refused():
    memory = start()
    memory.check(np.zeros((B, 2), int), N)
    memory.check(np.zeros((B, 2, D)), N)
    for shape, n_layer in (((B,), N), ((B, 2, D + 1), N), ((B + 1, 2), N), ((B, 2), N + 1)):
        with pytest.raises(UserError):
            memory.check(np.zeros(shape, float if len(shape) == 3 else int), n_layer)


@pytest.mark.parametrize("mem_len", [0, 1, 4, 6, 11])
@pytest.mark.parametrize("segment_lens", [(4, 4, 4, 4), (1, 6, 2, 9), (12, 1)])
def test_update_keeps_the_last_rows_in_order(mem_len, segment_lens):
    memory, text = start(mem_len=mem_len), np.zeros((N, B, 0, D), np.float32)
    for k, segment_len in enumerate(segment_lens):
        new = layer_inputs(segment_len, seed=k)
        memory, text = memory_lib.update(memory, new), np.concatenate([text, new], axis=2)
        filled = min(text.shape[2], mem_len)
        assert memory.hidden.shape == (N, B, mem_len, D) and memory.valid.tolist() == [filled] * B
        np.testing.assert_array_equal(
            memory.hidden[:, :, mem_len - filled :], text[:, :, text.shape[2] - filled :]
        )


@pytest.mark.parametrize("segment_len", [2, M, 7])
def test_update_stops_the_gradient_of_what_enters(segment_len):
    def kept(new):
        return jnp.sum(memory_lib.update(start(), new).hidden)

    new = layer_inputs(segment_len)
    assert kept(new) != 0
    np.testing.assert_array_equal(jax.grad(kept)(new), np.zeros_like(new))


@pytest.mark.parametrize("how", MemoryStart)
def test_reset_touches_only_the_marked_rows(how):
    memory = memory_lib.update(start(how), layer_inputs(4))
    found, fresh = memory_lib.reset(memory, jnp.asarray([False, True, False]), how), start(how)
    assert found.valid.tolist() == [memory.valid[0], fresh.valid[1], memory.valid[2]]
    for b in (0, 2):
        np.testing.assert_array_equal(found.hidden[:, b], memory.hidden[:, b])
    if how is MemoryStart.ZEROS:  # Masked slots may hold anything.
        assert not found.hidden[:, 1].any()
    else:  # And the rows fill on their own.
        assert memory_lib.update(found, layer_inputs(1)).valid.tolist() == [M, 1, M]


def body(state, memory, segment):
    """Counts, collects all that it saw, and appends the tokens to the memory."""
    saw = (state, memory, segment)
    rows = jnp.broadcast_to(segment.inputs[None, :, :, None], (N, B, L, D)).astype(jnp.float32)
    return state + segment.targets.sum(), memory_lib.update(memory, rows), saw


@pytest.mark.parametrize("how", MemoryStart)
@pytest.mark.parametrize(
    "resets", [[], [(0, 0), (0, 1), (0, 2)], [(2, 1), (4, 0), (4, 2)]], ids=str
)
def test_the_scan_is_a_loop(how, resets):
    """With random tokens; `resets` are the (segment, row) whose bit is set."""
    inputs, targets = np.random.default_rng(0).integers(1, 11, (2, S, B, L), dtype=np.int32)
    segments = Segments(inputs, targets, np.ones((S, B, L), np.float32), np.zeros((S, B), bool))
    for place in resets:
        segments.reset[place] = True
    reset = functools.partial(memory_lib.reset, start=how)
    scan = jax.jit(lambda *args: recurrence.scan_segments(body, *args, reset=reset))
    found = jax.device_get(scan(jnp.int32(3), start(how), segments))
    state, memory, expected = jnp.int32(3), start(how), []
    for s in range(S):
        segment = Segments(*(jnp.asarray(array[s]) for array in segments))
        state, memory, saw = body(state, reset(memory, segment.reset), segment)
        expected.append(saw)
    tiny_run.assert_equal(
        found, (state, memory, jax.tree.map(lambda *leaves: np.stack(leaves), *expected))
    )


def test_weighted_sums_are_of_scored_positions():
    """Only a scored position shows that it is not finite."""
    for nll, weights, expected in (
        (
            [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]],
            [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]],
            (1 + 2 + 16 + 32, 3.5),
        ),
        ([[math.nan, 3.0]], [[0.0, 1.0]], (3, 1)),
        ([[math.nan, 3.0]], [[1.0, 1.0]], (math.nan, 2)),
        ([[1.0, 1.0]], [[0.0, 0.0]], (0, 0)),
    ):
        np.testing.assert_array_equal(
            recurrence.weighted_sum(jnp.asarray(nll), jnp.asarray(weights)), expected
        )
