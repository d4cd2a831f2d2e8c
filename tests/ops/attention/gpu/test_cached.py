"""The kernel for NVIDIA GPUs over a KV cache (interpreted) against the reference."""

import jax
import jax.numpy as jnp
import pytest

from ops.attention.test_cached import draw
from support.cases import full_but
from txl_jax.ops.attention.cached import CachedVisibility, cached_attention
from txl_jax.ops.attention.gpu.cached import gpu_cached_attention
from txl_jax.ops.attention.problem import Tile


def arguments(*, L, R, E, B=2, H=3, clamp=None, cache=None, **options):
    return draw((B, H, L, R, E), clamp_len=clamp, ring_dtype=cache, **options)


def check(given, visibility, *, tolerance=2e-5, **options):
    got = jax.jit(lambda *args: gpu_cached_attention(*args, interpret=True, **options))(*given, visibility)
    expected = cached_attention(*given, visibility)
    assert got.dtype == expected.dtype
    error = jnp.linalg.norm((got - expected).astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32))
    assert error <= tolerance


RING, SMALL = {"L": 19, "R": 150, "E": 41}, {"L": 8, "R": 48, "E": 16}
FEW = [48, 9], 20
CASES = {  # Sizes; filled slots, the slot that is written next, and the window; options of the kernel.
    "from its begin": (RING | {"clamp": 40}, ([150, 61], 0), {}),
    "without a clamp": (RING, ([150, 61], 7), {}),
    "over its end": (RING | {"clamp": 2}, ([150, 61], 140), {}),
    "over its end, clamp above all": (RING | {"clamp": 500}, ([150, 61], 149), {}),
    "part-filled, window": (RING | {"E": 16}, ([0, 1], 33, 24), {"tile": Tile(16, 32)}),
    "narrow window": (RING | {"E": 16}, ([30, 140], 33, 5), {"tile": Tile(16, 32)}),
    "wide window": (RING | {"E": 16}, ([30, 140], 33, 150), {"tile": Tile(16, 32)}),
    "keys and scores": (SMALL | {"scores": True}, FEW, {}),
    "scores": (SMALL | {"keys": False, "scores": True}, FEW, {}),
    "no positions": (SMALL | {"keys": False}, FEW, {}),
    "no memory": ({"L": 20, "R": 0, "E": 16}, ([0, 0], 0), {}),
    "chunks of rows": (SMALL | {"B": 3}, ([48, 9, 1], 20), {"table_bytes": 1}),
    "narrow cache": (SMALL | {"cache": jnp.bfloat16}, FEW, {}),
    "bfloat16": (SMALL | {"dtype": jnp.bfloat16}, FEW, {"tolerance": 2e-2}),
}


@pytest.mark.parametrize("name", full_but(["over its end"], CASES))
def test_values_are_those_of_the_reference(name):
    sizes, (valid, write_index, *window), options = CASES[name]
    visibility = CachedVisibility(jnp.asarray(valid), jnp.int32(write_index), sizes["L"], sizes["R"], *window)
    check(arguments(**sizes), visibility, **{"tile": Tile(16, 16)} | options)


@pytest.mark.full
def test_position_scores_beyond_the_tables_type_are_its_largest():
    """A query that meets one score of 10^5 and others near 0 takes that key's value, and no NaN."""
    query, key, value, ring, _ = arguments(L=8, R=48, E=16, keys=False, dtype=jnp.bfloat16)
    score = jnp.zeros((3, 56)).at[:, 50].set(1e5)
    given = query, key, value, ring, (query, None, score)
    visibility = CachedVisibility(jnp.asarray([48, 9]), jnp.int32(20), 8, 48)
    check(given, visibility, tile=Tile(16, 16), tolerance=2e-2)
