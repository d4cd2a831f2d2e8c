"""Computes attention on meshes of eight fake CPU devices; run as a program by
tests/sharding/test_mesh.py.

Its words name meshes and implementations. It prints JSON: for each pair the largest difference from
the reference on one device, of the values, of each gradient, and of inference with a KV cache. B =
8, H = 8, L = 6, M = 10, E = 6, R = 12.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from support.attention_arrays import NAMES, draw
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import (
    CachedVisibility,
    ProbabilityDropout,
    Visibility,
    attention,
    cached_attention,
)
from txl_jax.ops.attention.problem import Implementation, Tile
from txl_jax.sharding.mesh import make_mesh, use_mesh

MESHES = {
    "data": MeshConfig(),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2),
    "tensor": MeshConfig(tensor=8),
}
IMPLEMENTATIONS = {
    "reference": Implementation("reference"),
    "tiled": Implementation("tiled", tile=Tile(4, 8)),
    "tpu": Implementation("fused", "mosaic_roll", Tile(16, 128), interpret=True),
    "stored": Implementation("stored"),
}
B, H, L, M, E, R = 8, 8, 6, 10, 6, 12


def training(implementation):
    """The function of arrays to values and gradients, with dropout; 5 rows have less memory than
    M.
    """
    dropout = ProbabilityDropout(0.3, jnp.uint32(7), n_head=H)
    options = {"visibility": VISIBILITY, "dropout": dropout, "implementation": implementation}

    def loss(given):
        out = attention(**given, **options)
        return jnp.sum(normal((B, H, L, E)) * out), out

    return lambda given: jax.tree.leaves(jax.grad(loss, has_aux=True)(given))


def inference(implementation):
    """The function of arrays to the values of a segment after a KV cache that has wrapped round."""
    visibility = CachedVisibility(VISIBILITY.valid, jnp.asarray(6), L, R, None)

    def values(given):
        query, key, value, keys, stored, position_query, position_key = given
        position, cache = (position_query, position_key, None), (keys, stored)
        return [
            cached_attention(
                query, key, value, cache, position, visibility, implementation=implementation
            )
        ]

    return values


def normal(shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


VISIBILITY = Visibility(jnp.asarray([M, 0, 3, M, 7, 1, M, 2]), L, M, 12)
OF_CACHE = (
    (B, H, L, E),
    (B, H, L, E),
    (B, H, L, E),
    (B, H, E, R),
    (B, H, R, E),
    (B, H, L, E),
    (H, E, R + L),
)
CALLS = {
    "training": (training, draw(VISIBILITY, H, E, names=NAMES[:6])),
    "inference": (inference, [*map(normal, OF_CACHE)]),
}


if __name__ == "__main__":
    found = {}
    for call, (make, given) in CALLS.items():
        expected = jax.device_get(jax.jit(make(IMPLEMENTATIONS["reference"]))(given))
        for mesh_name in filter(MESHES.get, sys.argv):
            with use_mesh(make_mesh(MESHES[mesh_name])):
                for name in filter(IMPLEMENTATIONS.get, sys.argv):
                    pairs = zip(
                        expected,
                        jax.device_get(jax.jit(make(IMPLEMENTATIONS[name]))(given)),
                        strict=True,
                    )
                    found[f"{call} {mesh_name} {name}"] = [
                        float(np.abs(a - b).max()) for a, b in pairs
                    ]
    print(json.dumps(found))
