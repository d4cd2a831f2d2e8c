"""Tests of the sizes of a call of the TPU kernels."""

import jax.numpy as jnp
import pytest

from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tpu.geometry import Geometry


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 200, 700])
@pytest.mark.parametrize(("segment_len", "mem_len"), [(96, 300), (160, 0), (1, 500), (600, 600)])
def test_tiles_are_counted_as_the_kernels_visit_them(causal, window, segment_len, mem_len):
    geometry = Geometry(
        batch=1,
        n_head=1,
        segment_len=segment_len,
        n_keys=segment_len + mem_len,
        width=8,
        scale=8**-0.5,
        n_positions=0,
        tile=Tile(32, 128),
        causal=causal,
        window=window,
        way="roll",
        n_drawn_head=None,
        interpret=True,
    )
    start, stop = jnp.int32(0), jnp.int32(geometry.n_keys)
    ranges = [geometry.key_tiles(jnp.int32(number), start, stop) for number in range(geometry.n_query_tile)]
    assert geometry.n_tile == sum(max(int(last) - int(first) + 1, 0) for first, last in ranges) > 0
