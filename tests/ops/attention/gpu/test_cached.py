"""The kernel for NVIDIA GPUs over a KV cache (interpreted) against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import full_but
from txl_jax.ops.attention.cached import CachedVisibility, cached_attention, table_length
from txl_jax.ops.attention.gpu.cached import gpu_cached_attention
from txl_jax.ops.attention.problem import Tile


def arguments(*, L, R, E, clamp=None, keys=True, scores=False, B=2, H=3, dtype=jnp.float32, cache=None):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    n_positions = table_length(segment_len=L, capacity=R, clamp_len=clamp)
    own = draw(B, H, L, E) * 0.3, draw(B, H, L, E), draw(B, H, L, E)
    ring = tuple(x.astype(cache or dtype) for x in (draw(B, H, E, R), draw(B, H, R, E)))
    position = (
        draw(B, H, L, E) * 0.3,
        draw(H, E, n_positions) if keys else None,
        draw(H, n_positions) if scores else None,
    )
    return (*own, ring, position if keys or scores else None)


def check(given, visibility, *, tolerance=2e-5, **options):
    got = jax.jit(lambda *args: gpu_cached_attention(*args, interpret=True, **options))(*given, visibility)
    expected = cached_attention(*given, visibility)
    assert got.dtype == expected.dtype
    error = jnp.linalg.norm((got - expected).astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32))
    assert error <= tolerance


@pytest.mark.parametrize(("write_index", "clamp"), full_but([(140, 2)], [(0, 40), (7, None), (140, 2), (149, 500)]))
def test_ring_from_its_begin_and_over_its_end(write_index, clamp):
    visibility = CachedVisibility(jnp.asarray([150, 61]), jnp.int32(write_index), 19, 150)
    check(arguments(L=19, R=150, E=41, clamp=clamp), visibility, tile=Tile(16, 16))


@pytest.mark.full
@pytest.mark.parametrize(("valid", "window"), [([0, 1], 24), ([30, 140], 5), ([30, 140], 150)])
def test_window_and_part_filled_rows(valid, window):
    visibility = CachedVisibility(jnp.asarray(valid), jnp.int32(33), 19, 150, window)
    check(arguments(L=19, R=150, E=16), visibility, tile=Tile(16, 32))


@pytest.mark.full
@pytest.mark.parametrize(("keys", "scores"), [(True, True), (False, True), (False, False)])
def test_encodings(keys, scores):
    visibility = CachedVisibility(jnp.asarray([48, 9]), jnp.int32(20), 8, 48)
    check(arguments(L=8, R=48, E=16, keys=keys, scores=scores), visibility, tile=Tile(16, 16))


@pytest.mark.full
def test_without_memory():
    visibility = CachedVisibility(jnp.asarray([0, 0]), jnp.int32(0), 20, 0)
    check(arguments(L=20, R=0, E=16), visibility, tile=Tile(16, 16))


@pytest.mark.full
def test_chunks_of_rows():
    visibility = CachedVisibility(jnp.asarray([48, 9, 1]), jnp.int32(20), 8, 48)
    check(arguments(L=8, R=48, E=16, B=3), visibility, tile=Tile(16, 16), table_bytes=1)


@pytest.mark.full
def test_narrow_cache():
    visibility = CachedVisibility(jnp.asarray([48, 9]), jnp.int32(20), 8, 48)
    check(arguments(L=8, R=48, E=16, cache=jnp.bfloat16), visibility, tile=Tile(16, 16))
    given = arguments(L=8, R=48, E=16, dtype=jnp.bfloat16)
    check(given, visibility, tile=Tile(16, 16), tolerance=2e-2)


@pytest.mark.full
def test_position_scores_beyond_the_tables_type_are_its_largest():
    """A query that meets one score of 10^5 and others near 0 takes that key's value, and no NaN."""
    query, key, value, ring, _ = arguments(L=8, R=48, E=16, keys=False, dtype=jnp.bfloat16)
    score = jnp.zeros((3, 56)).at[:, 50].set(1e5)
    given = query, key, value, ring, (query, None, score)
    visibility = CachedVisibility(jnp.asarray([48, 9]), jnp.int32(20), 8, 48)
    check(given, visibility, tile=Tile(16, 16), tolerance=2e-2)
