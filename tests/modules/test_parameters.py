"""Tests the paths, shapes and axes of all parameters: names in checkpoints, from which flax derives random numbers."""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from support import tiny
from txl_jax.config import CompatConfig, Encoding, Network, NormPlace, ShawTerms
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.sharding import axes

LAYERS, P = "stack/layers", 17
# Of a post-norm Transformer-XL with tied tables: N = 2, D = 6, H = 4, E = 5, F = 10, V = 13.
ABSOLUTE = {
    "embedding/table_0": (13, 6),
    "softmax/bias": (13,),
    f"{LAYERS}/attention/key": (2, 6, 4, 5),
    f"{LAYERS}/attention/output": (2, 4, 5, 6),
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
POSITION_KEY = {f"{LAYERS}/attention/position_key": (2, 6, 4, 5)}
RELATIVE = ABSOLUTE | POSITION_KEY | {"stack/biases/content": (4, 5), "stack/biases/position": (4, 5)}
UNTIED = {f"{LAYERS}/biases/content": (2, 4, 5), f"{LAYERS}/biases/position": (2, 4, 5)}
SHAW = ABSOLUTE | {f"{LAYERS}/attention/positions/key": (2, P, 4, 5)}
FINAL_NORM = {"final_norm/bias": (6,), "final_norm/scale": (6,)}
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
CASES = {
    "tied": ({}, RELATIVE),
    "not tied": ({"tie_weight": False}, RELATIVE | {"softmax/table_0": (13, 6)}),
    "adaptive": (ADAPTIVE, RELATIVE | OF_ADAPTIVE),
    "adaptive, not tied": (ADAPTIVE | {"tie_weight": False, "tie_projs": ()}, None),
    "pre, u and v per layer": (
        {"layer_norm": NormPlace.PRE, "untie_r": True},
        ABSOLUTE | POSITION_KEY | UNTIED | FINAL_NORM,
    ),
    "vaswani": ({"encoding": Encoding.VASWANI, "untie_r": True}, ABSOLUTE),
    "al_rfou": ({"encoding": Encoding.AL_RFOU}, ABSOLUTE | {f"{LAYERS}/positions/vector": (2, P, 6)}),
    "shaw": ({"encoding": Encoding.SHAW}, SHAW),
    "shaw, as the original": (
        {"encoding": Encoding.SHAW, "compat": CompatConfig(shaw_terms=ShawTerms.ORIGINAL)},
        SHAW | {f"{LAYERS}/attention/positions/{n}": (2, *s) for n, s in (("score", (P, 4)), ("content", (4, 5)))},
    ),
}
SIZES = {  # Of axes by name.
    axes.LAYERS: {tiny.N},
    axes.EMBED: {tiny.D},
    axes.NORM: {tiny.D},
    None: {2, 3},  # Gates side by side.
    axes.HEADS: {tiny.H},
    axes.HEAD_DIM: {tiny.E},
    axes.POSITIONS: {P},
    axes.INNER: {tiny.F},
    axes.VOCAB: {tiny.V, 4, 5},
    axes.CLUSTERS: {2},
}


def parameters(model):
    tokens, memory = jnp.zeros((1, 2), jnp.int32), model.init_memory(batch_size=1, mem_len=1)
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)["params"]
    return flax.traverse_util.flatten_dict(boxed, sep="/")


@pytest.mark.parametrize(("changes", "expected"), CASES.values(), ids=CASES)
def test_init_creates_all_parameters_and_names_their_axes(changes, expected):
    is_learned = changes.get("encoding", Encoding.RELATIVE).is_learned
    found = parameters(tiny.make(**changes, num_positions=P if is_learned else None))
    if expected is not None:
        assert {path: leaf.value.shape for path, leaf in found.items()} == expected
    sizes = SIZES | {axes.CLUSTER_EMBED: {8, 4, 2} if "cutoffs" in changes else {tiny.D}}
    for path, leaf in found.items():
        assert isinstance(leaf, nn.LogicallyPartitioned) and len(leaf.names) == leaf.value.ndim, path
        for name, size in zip(leaf.names, leaf.value.shape, strict=True):
            assert size in sizes[name], f"{path}: {name} of size {size}"


def test_init_creates_all_parameters_of_recurrent_models():
    cell = {f"i{gate}/kernel": (6, 6) for gate in "ifgo"}
    cell |= {f"h{gate}/kernel": (6, 6) for gate in "ifgo"} | {f"h{gate}/bias": (6,) for gate in "ifgo"}
    cells = {f"layers_{n}/cell/{name}": shape for n in range(tiny.N) for name, shape in cell.items()}
    kernels = {"layers_0/gates/kernel": (12, 18), "layers_1/gates/kernel": (6, 18)}  # The first layer's window is 2.
    biases = {f"layers_{n}/gates/bias": (18,) for n in range(tiny.N)}
    for network, expected in ((Network.LSTM, cells), (Network.QRNN, kernels | biases)):
        found = parameters(RecurrentModel(tiny.model_config(network=network), tiny.COMPAT, tiny.V))
        shapes = {path: nn.unbox(leaf).shape for path, leaf in found.items()}
        assert shapes == {"embedding/table_0": (13, 6), "softmax/bias": (13,)} | expected
