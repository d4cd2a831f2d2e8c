"""Tests of the recurrent baselines: against loops, across segments, and after a reset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit as sigmoid

from support import tiny, tiny_run
from txl_jax import memory as memory_lib
from txl_jax.config import DType, MemoryStart, Network
from txl_jax.modules.recurrent import QRNNLayer, RecurrentModel

L = 4


def make(network: Network, **changes) -> RecurrentModel:
    return RecurrentModel(tiny.model_config(network=network, **changes), tiny.V)


def lstm_loop(params: dict, inputs: np.ndarray) -> np.ndarray:
    """One LSTM layer from zeros, token by token: [B, L, D] -> [B, L, D]."""
    cell = np.zeros_like(inputs[:, 0])
    output = np.zeros_like(inputs[:, 0])
    outputs = []
    for i in range(inputs.shape[1]):
        gates = {}
        for name in "ifgo":
            from_input = params["cell"][f"i{name}"]
            from_output = params["cell"][f"h{name}"]
            gates[name] = (
                inputs[:, i] @ from_input["kernel"]
                + output @ from_output["kernel"]
                + from_output["bias"]
            )
        cell = sigmoid(gates["f"]) * cell + sigmoid(gates["i"]) * np.tanh(gates["g"])
        output = sigmoid(gates["o"]) * np.tanh(cell)
        outputs.append(output)
    return np.stack(outputs, axis=1)


def qrnn_loop(params: dict, inputs: np.ndarray) -> np.ndarray:
    """One QRNN layer from zeros, token by token: [B, L, D] -> [B, L, D].

    The window is the kernel's height.
    """
    kernel = params["gates"]["kernel"]
    bias = params["gates"]["bias"]
    before = np.zeros_like(inputs[:, 0])
    cell = np.zeros_like(inputs[:, 0])
    outputs = []
    for i in range(inputs.shape[1]):
        seen = np.concatenate([before, inputs[:, i]], axis=-1)[:, -len(kernel) :]
        z, f, o = np.split(seen @ kernel + bias, 3, axis=-1)
        cell = sigmoid(f) * cell + (1 - sigmoid(f)) * np.tanh(z)
        outputs.append(sigmoid(o) * cell)
        before = inputs[:, i]
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize(
    ("network", "loop"),
    [
        pytest.param(Network.LSTM, lstm_loop, id="lstm"),
        pytest.param(Network.QRNN, qrnn_loop, id="qrnn"),
    ],
)
def test_segments_that_follow_each_other_match_a_loop_over_tokens(network, loop, x64):
    model = make(network, dtype=DType.FLOAT64)
    params = jax.tree.map(np.float64, tiny_run.params(model))
    memory = model.init_memory(batch_size=tiny.B, mem_len=0)
    text = tiny.text(9)

    states = tiny.stream(tiny.encoder(model), {"params": params}, text, [4, 1, 4], memory)

    expected = params["embedding"]["table_0"][text] * tiny.D**0.5
    for i in range(tiny.N):
        expected = loop(params[f"layers_{i}"], expected)
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-12)


def test_cells_of_a_qrnn_in_bfloat16_are_pooled_in_float32():
    """1,000 steps that keep 99.9 % of a cell, which goes from 0 toward 1.

    In bfloat16 the gate would be 1, and the cell would never change.
    """
    layer = QRNNLayer(features=1, window=1, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    bias = np.asarray([10.0, 6.9, 10.0], np.float32)  # z = 1, f = .999, o = 1.
    params = {"gates": {"kernel": np.zeros((1, 3), np.float32), "bias": bias}}
    inputs = np.zeros((1, 1000, 1), jnp.bfloat16)
    zeros = np.zeros((1, 1), jnp.bfloat16)

    (cell, _), _ = jax.jit(layer.apply)({"params": params}, inputs, (zeros, zeros))

    # The bias is rounded to bfloat16 before it becomes a gate.
    kept = sigmoid(float(jnp.bfloat16(6.9)))
    assert float(cell[0, 0]) == pytest.approx(1 - kept**1000, rel=2**-8)


@pytest.mark.parametrize(
    ("network", "how"),
    [(Network.LSTM, MemoryStart.MASKED), (Network.QRNN, MemoryStart.ZEROS)],
    ids=str,
)
def test_a_row_that_is_reset_starts_again(network, how):
    """Whether its states are set to zeros, or only marked as empty.

    The same text is read twice, so a row without a reset has other states the second time.
    """
    model = make(network, **{"compat.memory_start": how})
    variables = {"params": tiny_run.params(model)}
    encode = tiny.encoder(model)
    start = model.init_memory(batch_size=tiny.B, mem_len=0)
    first_states, memory = encode(variables, tiny.text(L), start)
    first_states = np.asarray(first_states)

    memory = memory_lib.reset(memory, np.asarray([False, True, False]))

    states = np.asarray(encode(variables, tiny.text(L), memory)[0])
    np.testing.assert_array_equal(states[1], first_states[1])
    assert np.abs(states[0] - first_states[0]).max() > 1e-3
