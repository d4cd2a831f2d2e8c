"""Tests of the memory (filled slots, their order, resets, the one stop_gradient), and of the scan
over segments.
"""

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

update = jax.jit(memory_lib.update)


def start(how: MemoryStart = MemoryStart.MASKED, mem_len: int = M) -> memory_lib.Memory:
    return memory_lib.init(
        n_layer=N, batch_size=B, mem_len=mem_len, d_model=D, dtype=jnp.float32, start=how
    )


def layer_inputs(segment_len: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, B, segment_len, D)).astype(np.float32)


def test_a_memory_for_the_same_rows_sizes_and_layers_is_accepted():
    memory = start()
    memory.check(np.zeros((B, 2), int), n_layer=N, d_model=D)
    memory.check(np.zeros((B, 2, D)), n_layer=N, d_model=D)


@pytest.mark.parametrize(
    ("inputs", "n_layer", "d_model"),
    [
        pytest.param(np.zeros((B,), int), N, D, id="inputs without rows"),
        pytest.param(np.zeros((B, 2, D + 1)), N, D, id="embeddings of another size"),
        pytest.param(np.zeros((B + 1, 2), int), N, D, id="another batch size"),
        pytest.param(np.zeros((B, 2), int), N + 1, D, id="another n_layer"),
        pytest.param(np.zeros((B, 2), int), N, D + 1, id="another d_model"),
    ],
)
def test_a_memory_of_other_rows_sizes_or_layers_is_an_error(inputs, n_layer, d_model):
    with pytest.raises(UserError):
        start().check(inputs, n_layer=n_layer, d_model=d_model)


@pytest.mark.parametrize("mem_len", [0, 1, 4, 6, 11])
@pytest.mark.parametrize("segment_lens", [(4, 4, 4, 4), (1, 6, 2, 9), (12, 1)], ids=str)
def test_update_keeps_the_last_rows_in_order(mem_len, segment_lens):
    memory = start(mem_len=mem_len)
    text = np.zeros((N, B, 0, D), np.float32)
    for k, segment_len in enumerate(segment_lens):
        segment = layer_inputs(segment_len, seed=k)
        memory = update(memory, segment)
        text = np.concatenate([text, segment], axis=2)

        n_filled = min(text.shape[2], mem_len)
        filled = np.asarray(memory.hidden)[:, :, mem_len - n_filled :]
        last = text[:, :, text.shape[2] - n_filled :]
        assert memory.hidden.shape == (N, B, mem_len, D)
        assert memory.valid.tolist() == [n_filled] * B, f"segment {k}"
        np.testing.assert_array_equal(filled, last, err_msg=f"segment {k}")


@pytest.mark.parametrize("segment_len", [2, M, 7])
def test_update_stops_the_gradient_of_what_enters(segment_len):
    def sum_of_memory(segment):
        return jnp.sum(memory_lib.update(start(), segment).hidden)

    segment = layer_inputs(segment_len)
    value, gradient = jax.jit(jax.value_and_grad(sum_of_memory))(segment)
    assert value != 0
    np.testing.assert_array_equal(gradient, np.zeros_like(segment))


@pytest.mark.parametrize("how", MemoryStart)
def test_reset_touches_only_the_marked_rows(how):
    fresh = start(how)
    memory = update(fresh, layer_inputs(4))
    reset = memory_lib.reset(memory, jnp.asarray([False, True, False]))

    assert reset.valid.tolist() == [memory.valid[0], fresh.valid[1], memory.valid[2]]
    before = np.asarray(memory.hidden)
    after = np.asarray(reset.hidden)
    np.testing.assert_array_equal(after[:, [0, 2]], before[:, [0, 2]])
    if how is MemoryStart.ZEROS:  # Masked slots may have any content.
        assert not after[:, 1].any()
    else:  # And the rows fill independently.
        # Rows that had four filled slots have five, which is M.
        assert update(reset, layer_inputs(1)).valid.tolist() == [M, 1, M]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(1, id="a row's number"),
        pytest.param(np.asarray([0, 2, 2]), id="numbers of rows, as many as rows"),
        pytest.param(np.asarray([True]), id="one bool for all rows"),
        pytest.param(np.zeros((B, L), bool), id="one bool for each position"),
        pytest.param([0, 1, 0], id="a list of integers"),
    ],
)
@pytest.mark.parametrize("how", MemoryStart)
def test_reset_of_rows_that_are_not_one_bool_each_is_an_error(rows, how):
    with pytest.raises(UserError, match=rf"rows must be bool \[{B}\]"):
        memory_lib.reset(start(how), rows)


def test_reset_takes_a_list_of_bools():
    memory = update(start(), layer_inputs(4))
    assert memory_lib.reset(memory, [False, True, False]).valid.tolist() == [4, 0, 4]


def test_a_start_may_be_given_by_name():
    sizes = {"n_layer": N, "batch_size": B, "mem_len": M, "d_model": D}
    assert memory_lib.init(**sizes).start is MemoryStart.MASKED
    zeros = memory_lib.init(**sizes, start="zeros")
    assert zeros.start is MemoryStart.ZEROS
    assert zeros.valid.tolist() == [M] * B
    assert memory_lib.reset(zeros, [True] * B).start is MemoryStart.ZEROS
    with pytest.raises(UserError, match=r"masked.*zeros.*'empty'"):
        memory_lib.init(**sizes, start="empty")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        pytest.param(layer_inputs(2)[0], r"\[3, 2, 7\]", id="without layers"),
        pytest.param(layer_inputs(2)[:1], r"\[1, 3, 2, 7\]", id="another n_layer"),
        pytest.param(layer_inputs(2)[:, :1], r"\[4, 1, 2, 7\]", id="another batch size"),
        pytest.param(layer_inputs(2)[..., :3], r"\[4, 3, 2, 3\]", id="another d_model"),
        pytest.param(list(layer_inputs(2)), r"list.*jnp\.stack", id="a list of layers"),
    ],
)
def test_layer_inputs_that_do_not_fit_the_memory_are_an_error(inputs, words):
    with pytest.raises(UserError, match=rf"\[{N}, {B}, L, {D}\].*{words}"):
        memory_lib.update(start(), inputs)


def test_update_clips_lengths_to_the_segment():
    memory = memory_lib.update(start(), layer_inputs(2), jnp.asarray([-1, 1, 99]))
    assert memory.valid.tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=rf"lengths.*\[{B}\].*float32"):
        memory_lib.update(start(), layer_inputs(2), jnp.ones(B))


def body(state, memory, segment):
    """Counts, collects all that it is called with, and appends the tokens to the memory."""
    arguments = (state, memory, segment)
    rows = jnp.broadcast_to(segment.inputs[None, :, :, None], (N, B, L, D)).astype(jnp.float32)
    return state + segment.targets.sum(), memory_lib.update(memory, rows), arguments


@pytest.mark.parametrize("how", MemoryStart)
@pytest.mark.parametrize(
    "resets", [[], [(0, 0), (0, 1), (0, 2)], [(2, 1), (4, 0), (4, 2)]], ids=str
)
def test_the_scan_is_a_loop(how, resets):
    """With random tokens. `resets` are the (segment, row) whose bit is set."""
    inputs, targets = np.random.default_rng(0).integers(1, 11, (2, S, B, L), dtype=np.int32)
    segments = Segments(inputs, targets, np.ones((S, B, L), np.float32), np.zeros((S, B), bool))
    for place in resets:
        segments.reset[place] = True
    reset = memory_lib.reset

    @jax.jit
    def scan(state, memory, segments):
        return recurrence.scan_segments(body, state, memory, segments, reset=reset)

    @jax.jit
    def one_turn(state, memory, segment):
        return body(state, reset(memory, segment.reset), segment)

    state = np.int32(3)
    memory = start(how)
    outputs = []
    for s in range(S):
        segment = jax.tree.map(lambda array, s=s: array[s], segments)
        state, memory, output = one_turn(state, memory, segment)
        outputs.append(output)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *outputs)

    scanned = jax.device_get(scan(np.int32(3), start(how), segments))
    tiny_run.assert_equal(scanned, (state, memory, stacked))


@pytest.mark.parametrize(
    ("nll", "weights", "expected"),
    [
        pytest.param(
            [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]],
            [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]],
            (1 + 2 + 16 + 32, 3.5),
            id="some positions",
        ),
        pytest.param([[math.nan, 3.0]], [[0.0, 1.0]], (3, 1), id="nan not scored"),
        pytest.param([[math.nan, 3.0]], [[1.0, 1.0]], (math.nan, 2), id="nan scored"),
        pytest.param([[1.0, 1.0]], [[0.0, 0.0]], (0, 0), id="no position"),
    ],
)
def test_weighted_sums_are_of_scored_positions(nll, weights, expected):
    """Only a scored position shows that it is not finite."""
    sums = recurrence.weighted_sum(jnp.asarray(nll), jnp.asarray(weights))
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (1, 2), ()], ids=str)
def test_weights_of_another_shape_than_the_losses_are_an_error(shape):
    """They would be broadcast, and their sum would be too small."""
    with pytest.raises(UserError, match=r"weights.*\[3, 2\], one per target, got"):
        recurrence.weighted_sum(jnp.ones((3, 2)), jnp.ones(shape))
