"""Computes attention on meshes of eight fake CPU devices; run as a program by tests/sharding/test_attention.py.

Its words name meshes and implementations. It prints JSON: for each pair the largest difference from the reference on
one device, of the values, of each gradient, and of inference with a KV cache. B = 8, H = 8, L = 6, M = 10, E = 5,
R = 12.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import CachedVisibility, Dropout, Visibility, attention, cached_attention
from txl_jax.ops.attention.problem import Implementation, Tile

MESHES = {"data": MeshConfig(), "mixed": MeshConfig(data=2, fsdp=2, tensor=2), "tensor": MeshConfig(tensor=8)}
IMPLEMENTATIONS = {
    "reference": Implementation("reference"),
    "tiled": Implementation("tiled", tile=Tile(4, 8)),
    "tpu": Implementation("fused", "mosaic_roll", Tile(16, 128), interpret=True),
    "stored": Implementation("stored"),
}
B, H, L, M, E, R = 8, 8, 6, 10, 5, 12


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def training(implementation):
    """The function of arrays to values and gradients, with dropout; 5 rows have less memory than M."""
    visibility = Visibility(jnp.asarray([M, 0, 3, M, 7, 1, M, 2]), L, M, 12)
    dropout = Dropout(0.3, jnp.uint32(7), n_head=H)
    options = {"visibility": visibility, "dropout": dropout, "implementation": implementation}
    weights = arrays((B, H, L, E))[0]

    def loss(given):
        query, key, value, position_key, u, v = given
        out = attention(query, key, value, position_key, content_bias=u, position_bias=v, **options)
        return jnp.sum(weights * out), out

    def values_and_gradients(given):
        gradients, out = jax.grad(loss, has_aux=True)(given)
        return out, *gradients

    return values_and_gradients


def inference(implementation):
    """The function of arrays to the values of a segment after a KV cache that has wrapped round."""
    visibility = CachedVisibility(jnp.asarray([M, 0, 3, M, 7, 1, M, 2]), jnp.asarray(6), L, R, None)

    def values(given):
        query, key, value, keys, stored, position_query, position_key = given
        position, cache = (position_query, position_key, None), (keys, stored)
        return [cached_attention(query, key, value, cache, position, visibility, implementation=implementation)]

    return values


CALLS = {
    "training": (training, arrays((B, H, L, E), (B, H, M + L, E), (B, H, M + L, E), (H, M + L, E), (H, E), (H, E))),
    "inference": (
        inference,
        arrays((B, H, L, E), (B, H, L, E), (B, H, L, E), (B, H, E, R), (B, H, R, E), (B, H, L, E), (H, E, R + L)),
    ),
}


if __name__ == "__main__":
    found = {}
    for call, (make, given) in CALLS.items():
        expected = jax.device_get(jax.jit(make(IMPLEMENTATIONS["reference"]))(given))
        for mesh_name in filter(MESHES.get, sys.argv):
            with sharding.use_mesh(sharding.make_mesh(MESHES[mesh_name])):
                for name in filter(IMPLEMENTATIONS.get, sys.argv):
                    pairs = zip(expected, jax.device_get(jax.jit(make(IMPLEMENTATIONS[name]))(given)), strict=True)
                    found[f"{call} {mesh_name} {name}"] = [float(np.abs(a - b).max()) for a, b in pairs]
    print(json.dumps(found))
