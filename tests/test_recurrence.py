"""Tests the scan over segments against a Python loop, with resets inside a block, and sums of losses."""

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
from txl_jax.recurrence import Segments

S, B, L, M, N, D = 6, 3, 2, 5, 4, 7


def segments(resets: list[tuple[int, int]]) -> Segments:
    """Random tokens; `resets` are the (segment, row) whose bit is set."""
    inputs, targets = np.random.default_rng(0).integers(1, 11, (2, S, B, L), dtype=np.int32)
    reset = np.zeros((S, B), bool)
    for place in resets:
        reset[place] = True
    return Segments(inputs, targets, np.ones((S, B, L), np.float32), reset)


def empty_memory(start: MemoryStart) -> memory_lib.Memory:
    return memory_lib.init(n_layer=N, batch_size=B, mem_len=M, d_model=D, dtype=jnp.float32, start=start)


def body(state, memory, segment):
    """Counts, collects all that it saw, and appends the tokens to the memory."""
    saw = (state, memory, segment)
    rows = jnp.broadcast_to(segment.inputs[None, :, :, None], (N, B, L, D)).astype(jnp.float32)
    return state + segment.targets.sum(), memory_lib.update(memory, rows), saw


@pytest.mark.parametrize("start", MemoryStart)
@pytest.mark.parametrize("resets", [[], [(0, 0), (0, 1), (0, 2)], [(2, 1), (4, 0), (4, 2)]], ids=str)
def test_the_scan_is_a_loop(start, resets):
    reset = functools.partial(memory_lib.reset, start=start)
    scan = jax.jit(lambda *args: recurrence.scan_segments(body, *args, reset=reset))
    found = jax.device_get(scan(jnp.int32(3), empty_memory(start), segments(resets)))
    expected_state, expected_memory, expected = jnp.int32(3), empty_memory(start), []
    for s in range(S):
        segment = Segments(*(jnp.asarray(array[s]) for array in segments(resets)))
        before = memory_lib.reset(expected_memory, segment.reset, start)
        expected_state, expected_memory, saw = body(expected_state, before, segment)
        expected.append(saw)
    expected = (expected_state, expected_memory, jax.tree.map(lambda *leaves: np.stack(leaves), *expected))
    tiny_run.assert_equal(found, expected)


def test_weighted_sums_are_of_scored_positions():
    """Only a scored position shows that it is not finite."""
    for nll, weights, expected in (
        ([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]], (1 + 2 + 16 + 32, 3.5)),
        ([[math.nan, 3.0]], [[0.0, 1.0]], (3, 1)),
        ([[math.inf, 3.0]], [[0.0, 1.0]], (3, 1)),
        ([[math.nan, 3.0]], [[1.0, 1.0]], (math.nan, 2)),
        ([[1.0, 1.0]], [[0.0, 0.0]], (0, 0)),
    ):
        np.testing.assert_array_equal(recurrence.weighted_sum(jnp.asarray(nll), jnp.asarray(weights)), expected)
