"""Compares attention in interpreted TPU kernels on a mesh of eight fake CPU devices with one device; prints JSON.

B = 8, H = 4, L = 20, M = 12, E = 8 on data 2 x fsdp 2 x tensor 2: two rows and two heads on a device.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import Visibility, attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Implementation, Tile

B, H, L, M, E = 8, 4, 20, 12, 8
KERNELS = Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True)


def main() -> None:
    """Prints the largest differences of values and gradients, each divided by the largest number."""
    rng = np.random.default_rng(0)
    of_keys = (B, H, M + L, E)
    shapes = {"query": (B, H, L, E), "key": of_keys, "value": of_keys, "position_key": (H, M + L, E)}
    shapes |= {"content_bias": (H, E), "position_bias": (H, E)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    valid = jnp.asarray(rng.integers(M + 1, size=B), jnp.int32)
    out_gradient = jnp.asarray(rng.normal(size=shapes["query"]), jnp.float32)

    def value_and_gradients(implementation: Implementation | str) -> dict[str, jax.Array]:
        def run(arrays: dict[str, jax.Array], valid: jax.Array, seed: jax.Array) -> dict[str, jax.Array]:
            def attend(arrays: Any) -> jax.Array:
                return attention(
                    **arrays,
                    visibility=Visibility(valid, L, M),
                    dropout=Dropout(rate=0.3, seed=seed, n_head=H),
                    implementation=implementation,
                )

            out, gradients_of = jax.vjp(attend, arrays)
            return {"out": out, **gradients_of(out_gradient)[0]}

        return jax.jit(run)(arrays, valid, jnp.uint32(9))

    expected = value_and_gradients("reference")
    with sharding.use_mesh(sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        found = value_and_gradients(KERNELS)
        n_device = len(found["out"].sharding.device_set)
    differences = {
        name: float(np.abs(np.asarray(found[name]) - array).max() / np.abs(array).max())
        for name, array in expected.items()
    }
    print(json.dumps({"n_device": n_device, "differences": differences}))


if __name__ == "__main__":
    main()
