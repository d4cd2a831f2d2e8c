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
    cell, output = np.zeros_like(inputs[:, 0]), np.zeros_like(inputs[:, 0])
    outputs = []
    for i in range(inputs.shape[1]):
        gates = {}
        for name in "ifgo":
            of_input, of_output = params["cell"][f"i{name}"], params["cell"][f"h{name}"]
            gates[name] = (
                inputs[:, i] @ of_input["kernel"] + output @ of_output["kernel"] + of_output["bias"]
            )
        cell = sigmoid(gates["f"]) * cell + sigmoid(gates["i"]) * np.tanh(gates["g"])
        output = sigmoid(gates["o"]) * np.tanh(cell)
        outputs.append(output)
    return np.stack(outputs, axis=1)


def qrnn_loop(params: dict, inputs: np.ndarray) -> np.ndarray:
    """One QRNN layer from zeros, token by token: [B, L, D] -> [B, L, D]; the kernel's height is its
    window.
    """
    before, cell = np.zeros_like(inputs[:, 0]), np.zeros_like(inputs[:, 0])
    kernel, bias = params["gates"]["kernel"], params["gates"]["bias"]
    outputs = []
    for i in range(inputs.shape[1]):
        seen = np.concatenate([before, inputs[:, i]], axis=-1)[:, -len(kernel) :]
        z, f, o = np.split(seen @ kernel + bias, 3, axis=-1)
        cell = sigmoid(f) * cell + (1 - sigmoid(f)) * np.tanh(z)
        outputs.append(sigmoid(o) * cell)
        before = inputs[:, i]
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize(
    ("network", "loop"), [(Network.LSTM, lstm_loop), (Network.QRNN, qrnn_loop)]
)
def test_segments_that_follow_each_other_match_a_loop_over_tokens(network, loop, x64):
    model = make(network, dtype=DType.FLOAT64)
    params = jax.tree.map(np.float64, tiny_run.params(model))
    memory, text = model.init_memory(batch_size=tiny.B, mem_len=0), tiny.text(9)
    found = tiny.stream(tiny.encoder(model), {"params": params}, text, [4, 1, 4], memory)
    expected = params["embedding"]["table_0"][text] * tiny.D**0.5
    for i in range(tiny.N):
        expected = loop(params[f"layers_{i}"], expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_cells_of_a_qrnn_in_bfloat16_are_pooled_in_float32():
    """1,000 steps that keep 99.9 %: in bfloat16 the gate would be 1, and the cell would never
    move.
    """
    layer = QRNNLayer(features=1, window=1, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    bias = jnp.asarray([10.0, 6.9, 10.0])  # z = 1, f = .999, o = 1.
    params = {"gates": {"kernel": jnp.zeros((1, 3)), "bias": bias}}
    state = jnp.zeros((1, 1), jnp.bfloat16), jnp.zeros((1, 1), jnp.bfloat16)
    (cell, _), _ = jax.jit(layer.apply)(
        {"params": params}, jnp.zeros((1, 1000, 1), jnp.bfloat16), state
    )
    kept = sigmoid(float(jnp.asarray(6.9, jnp.bfloat16)))
    assert float(cell[0, 0]) == pytest.approx(1 - kept**1000, rel=2**-8)


@pytest.mark.parametrize(
    ("network", "how"),
    [(Network.LSTM, MemoryStart.MASKED), (Network.QRNN, MemoryStart.ZEROS)],
    ids=str,
)
def test_a_row_that_is_reset_begins_anew(network, how):
    model = make(network)
    variables, encode = {"params": tiny_run.params(model)}, tiny.encoder(model)
    start = model.init_memory(batch_size=tiny.B, mem_len=0)
    fresh, memory = encode(variables, tiny.text(L), start)
    memory = memory_lib.reset(memory, jnp.asarray([False, True, False]), how)
    again, _ = encode(variables, tiny.text(L), memory)
    np.testing.assert_array_equal(again[1], fresh[1])
    assert np.abs(again[0] - fresh[0]).max() > 1e-3
