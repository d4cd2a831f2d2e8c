"""Tests the axes of all parameters. Their paths, shapes and initial values are compared in tests/anchors."""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from support import tiny
from txl_jax.config import CompatConfig, Encoding, NormPlace, ShawTerms
from txl_jax.sharding import axes

P = 17
ADAPTIVE = {"cutoffs": (4, 9), "d_embed": 8, "div_val": 2, "tie_projs": (False, True, True)}
CASES = {
    "tied": {},
    "not tied": {"tie_weight": False},
    "adaptive": ADAPTIVE,
    "adaptive, not tied": ADAPTIVE | {"tie_weight": False, "tie_projs": ()},
    "pre, u and v per layer": {"layer_norm": NormPlace.PRE, "untie_r": True},
    "vaswani": {"encoding": Encoding.VASWANI, "untie_r": True},
    "al_rfou": {"encoding": Encoding.AL_RFOU},
    "shaw": {"encoding": Encoding.SHAW},
    "shaw, as the original": {"encoding": Encoding.SHAW, "compat": CompatConfig(shaw_terms=ShawTerms.ORIGINAL)},
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


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_axes_of_parameters_have_names_and_their_sizes(changes):
    is_learned = changes.get("encoding", Encoding.RELATIVE).is_learned
    model = tiny.make(**changes, num_positions=P if is_learned else None)
    tokens, memory = jnp.zeros((1, 2), jnp.int32), model.init_memory(batch_size=1, mem_len=1)
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)["params"]
    sizes = SIZES | {axes.CLUSTER_EMBED: {8, 4, 2} if "cutoffs" in changes else {tiny.D}}
    for path, leaf in flax.traverse_util.flatten_dict(boxed, sep="/").items():
        assert isinstance(leaf, nn.LogicallyPartitioned) and len(leaf.names) == leaf.value.ndim, path
        for name, size in zip(leaf.names, leaf.value.shape, strict=True):
            assert size in sizes[name], f"{path}: {name} of size {size}"
