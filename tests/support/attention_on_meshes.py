"""Computes attention on meshes of eight fake CPU devices. tests/sharding/test_mesh.py runs it as a
program.

Its words name meshes and implementations. It prints JSON: for each pair the largest difference from
the reference on one device, of the values, of each gradient, and of inference with a KV cache.
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
B = 8  # Batch size.
H = 8  # Heads.
L = 6  # Length of a segment.
M = 10  # Slots of the memory.
E = 6  # Size of a head.
R = 12  # Slots of the KV cache.


def training(implementation):
    """The function of arrays to values and gradients, with dropout.

    5 rows have less memory than M.
    """
    dropout = ProbabilityDropout(0.3, jnp.uint32(7), n_head=H)
    options = {"visibility": VISIBILITY, "dropout": dropout, "implementation": implementation}

    def loss(arrays):
        out = attention(**arrays, **options)
        return jnp.sum(normal((B, H, L, E)) * out), out

    return lambda arrays: jax.tree.leaves(jax.grad(loss, has_aux=True)(arrays))


def inference(implementation):
    """The function of arrays to the values of a segment after a KV cache that has wrapped round."""
    visibility = CachedVisibility(VISIBILITY.valid, jnp.asarray(6), L, R, None)

    def values(arrays):
        query, key, value, keys, stored_values, position_query, position_key = arrays
        cache = (keys, stored_values)
        position = (position_query, position_key, None)
        out = cached_attention(
            query, key, value, cache, position, visibility, implementation=implementation
        )
        return [out]

    return values


def normal(shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


VISIBILITY = Visibility(jnp.asarray([M, 0, 3, M, 7, 1, M, 2]), L, M, 12)
# Shapes of the arrays of inference.
OF_CACHE = (
    (B, H, L, E),  # Queries.
    (B, H, L, E),  # Keys.
    (B, H, L, E),  # Values.
    (B, H, E, R),  # Stored keys.
    (B, H, R, E),  # Stored values.
    (B, H, L, E),  # Queries of positions.
    (H, E, R + L),  # Keys of positions.
)
CALLS = {
    "training": (training, draw(VISIBILITY, H, E, names=NAMES[:6])),
    "inference": (inference, [*map(normal, OF_CACHE)]),
}


def differences(call, mesh_name, implementation_name, expected):
    """The largest difference of each result on a mesh from the expected results."""
    make, arrays = CALLS[call]
    compute = jax.jit(make(IMPLEMENTATIONS[implementation_name]))
    with use_mesh(make_mesh(MESHES[mesh_name])):
        results = jax.device_get(compute(arrays))
    return [float(np.abs(a - b).max()) for a, b in zip(expected, results, strict=True)]


def main(*words):
    by_case = {}
    for call, (make, arrays) in CALLS.items():
        expected = jax.device_get(jax.jit(make(IMPLEMENTATIONS["reference"]))(arrays))
        for mesh_name in filter(MESHES.get, words):
            for name in filter(IMPLEMENTATIONS.get, words):
                case = f"{call} {mesh_name} {name}"
                by_case[case] = differences(call, mesh_name, name, expected)
    print(json.dumps(by_case))


if __name__ == "__main__":
    main(*sys.argv[1:])
