"""Tests the paths and shapes of all parameters: names in checkpoints, from which flax derives random numbers too."""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from support import tiny
from txl_jax.config import Network
from txl_jax.modules.recurrent import RecurrentModel

LAYERS = "stack/layers"
# Of a post-norm Transformer-XL with tied tables: N = 2, D = 6, H = 4, E = 5, F = 10, V = 13.
BASE = {
    "embedding/table_0": (13, 6),
    "softmax/bias": (13,),
    "stack/biases/content": (4, 5),
    "stack/biases/position": (4, 5),
    f"{LAYERS}/attention/key": (2, 6, 4, 5),
    f"{LAYERS}/attention/output": (2, 4, 5, 6),
    f"{LAYERS}/attention/position_key": (2, 6, 4, 5),
    f"{LAYERS}/attention/query": (2, 6, 4, 5),
    f"{LAYERS}/attention/value": (2, 6, 4, 5),
    f"{LAYERS}/attention_norm/bias": (2, 6),
    f"{LAYERS}/attention_norm/scale": (2, 6),
    f"{LAYERS}/feed_forward/inner_bias": (2, 10),
    f"{LAYERS}/feed_forward/inner_kernel": (2, 6, 10),
    f"{LAYERS}/feed_forward/outer_bias": (2, 6),
    f"{LAYERS}/feed_forward/outer_kernel": (2, 10, 6),
    f"{LAYERS}/feed_forward_norm/bias": (2, 6),
    f"{LAYERS}/feed_forward_norm/scale": (2, 6),
}
ADAPTIVE = {"cutoffs": (4, 9), "d_embed": 8, "div_val": 2, "tie_projs": (False, True, True)}
OF_ADAPTIVE = {
    "embedding/table_0": (4, 8),
    "embedding/table_1": (5, 4),
    "embedding/table_2": (4, 2),
    "embedding/projection_0": (8, 6),
    "embedding/projection_1": (4, 6),
    "embedding/projection_2": (2, 6),
    "softmax/projection_0": (8, 6),
    "softmax/tail_table": (2, 8),
    "softmax/tail_bias": (2,),
}


def shapes(model) -> dict[str, tuple[int, ...]]:
    tokens, memory = jnp.zeros((1, 2), jnp.int32), model.init_memory(batch_size=1, mem_len=1)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens, memory))["params"]
    return {path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, BASE),
        ({"tie_weight": False}, BASE | {"softmax/table_0": (13, 6)}),
        (ADAPTIVE, BASE | OF_ADAPTIVE),
    ],
    ids=["tied", "not tied", "adaptive"],
)
def test_init_creates_all_parameters(changes, expected):
    assert shapes(tiny.make(**changes)) == expected


def test_init_creates_all_parameters_of_an_lstm():
    cell = {f"i{gate}/kernel": (6, 6) for gate in "ifgo"}
    cell |= {f"h{gate}/kernel": (6, 6) for gate in "ifgo"} | {f"h{gate}/bias": (6,) for gate in "ifgo"}
    cells = {f"layers_{n}/cell/{name}": shape for n in range(tiny.N) for name, shape in cell.items()}
    config = tiny.model_config(network=Network.LSTM)
    found = shapes(RecurrentModel(config, tiny.COMPAT, tiny.V))
    assert found == {"embedding/table_0": (13, 6), "softmax/bias": (13,)} | cells


def test_init_creates_all_parameters_of_a_qrnn():
    found = shapes(RecurrentModel(tiny.model_config(network=Network.QRNN), tiny.COMPAT, tiny.V))
    kernels = {"layers_0/gates/kernel": (12, 18), "layers_1/gates/kernel": (6, 18)}  # The first layer's window is 2.
    biases = {f"layers_{n}/gates/bias": (18,) for n in range(tiny.N)}
    assert found == {"embedding/table_0": (13, 6), "softmax/bias": (13,)} | kernels | biases
