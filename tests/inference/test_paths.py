"""Tests that the forward pass with a KV cache gives the same numbers over tiles and through the kernel for TPUs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import full_but
from txl_jax.config import Encoding, NormPlace
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.ops.attention.problem import REFERENCE, Implementation, Implementations, Tile

FUSED = Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True)
PATHS = {"tiled": Implementation("tiled", tile=Tile(8, 16)), "fused": FUSED}
SEGMENTS = 5


def hidden_states(model, *, segment_len, mem_len, clamp_len):
    """Returns the hidden states of segments one after the other; before the fourth one row starts anew."""
    params = tiny.variables(model)["params"]
    lengths = {"segment_len": segment_len, "mem_len": mem_len}
    weights = prepare_params(params, model, window=mem_len or None, clamp_len=clamp_len, **lengths)
    cache = forward.init_cache(weights, batch_size=tiny.B, **lengths)
    read = jax.jit(forward.forward)
    hidden, text = [], tiny.text(segment_len * SEGMENTS)
    for s in range(SEGMENTS):
        if s == 3:
            cache = cache_lib.reset_cache(cache, jnp.arange(tiny.B) == 1, weights.initial, model.compat.memory_start)
        states, cache = read(weights, text[:, s * segment_len : (s + 1) * segment_len], cache)
        hidden.append(states)
    return np.concatenate(hidden, axis=1)


CASES = {
    "no clamp": ((4, 10, None), {}),
    "clamp": ((3, 11, 7), {"untie_r": True}),
    "two blocks": ((5, 150, 30), {"layer_norm": NormPlace.PRE}),
    "no memory": ((4, 0, None), {}),
    "shaw": ((3, 11, 7), {"encoding": Encoding.SHAW, "num_positions": 6}),
    "vaswani": ((3, 11, None), {"encoding": Encoding.VASWANI}),
}


QUICK = [("tiled", "clamp"), ("fused", "two blocks")]


@pytest.mark.parametrize(("path", "name"), full_but(QUICK, itertools.product(PATHS, CASES)))
def test_other_paths_give_the_hidden_states_of_the_reference(path, name):
    lengths, changes = CASES[name]
    lengths = dict(zip(("segment_len", "mem_len", "clamp_len"), lengths, strict=True))
    pair = (Implementations(REFERENCE, cached) for cached in (REFERENCE, PATHS[path]))
    expected, found = (hidden_states(tiny.make(**changes).clone(attention=each), **lengths) for each in pair)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
