"""Tests of attention over a KV cache: tiles and the TPU kernel against the reference.

The reference is compared with training attention, through the model, in
tests/inference/test_forward.py, and with a score per distance in tests/modules/test_positions.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import nightly_but
from txl_jax.ops.attention import CachedVisibility, Implementation, Tile, cached_attention
from txl_jax.ops.attention.distances import table_length
from txl_jax.ops.attention.problem import REFERENCE

_attention = jax.jit(cached_attention, static_argnames="implementation")


def tiled(query, key):
    return Implementation("tiled", tile=Tile(query, key))


def tpu(query=128, key=128):
    return Implementation("fused", "mosaic_gather", Tile(query, key), interpret=True)


def draw(sizes, *, clamp_len=None, dtype=jnp.float32, ring_dtype=None, keys=True, scores=False):
    """Returns queries, keys, values, ring, position queries, keys and scores."""
    batch, n_head, n_query, capacity, width = sizes
    rng = np.random.default_rng(0)
    n_position = table_length(segment_len=n_query, capacity=capacity, clamp_len=clamp_len)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    query, key, value, position_query = (normal(batch, n_head, n_query, width) for _ in range(4))
    ring = normal(batch, n_head, width, capacity), normal(batch, n_head, capacity, width)
    ring = tuple(part.astype(ring_dtype or dtype) for part in ring)
    position_key, score = normal(n_head, width, n_position) * 0.3, normal(n_head, n_position)
    position = position_query, position_key if keys else None, score if scores else None
    return query * width**-0.5, key, value, ring, position if keys or scores else None


def check(given, by, *, window=None, filled=None, tolerance=None):
    """Compares with the reference, for several places where the ring begins and numbers of filled
    slots.
    """
    batch, _, n_query, _ = given[0].shape
    r = given[3][0].shape[3]
    some = [([r, r], 0), ([r, r // 6], r // 2), ([r - r // 8, 0], 3 * r // 4), ([0, 0], r // 8)]
    # Full over the end of the ring. More slots than there are mean all.
    some += [([r, r], 7 * r // 8), ([0, r], max(r - 1, 0)), ([r + 30, r + 1], r // 2)]
    for valid, write_index in some if filled is None else filled:
        valid = jnp.asarray((valid * batch)[:batch], jnp.int32)
        visibility = CachedVisibility(
            valid, jnp.asarray(write_index, jnp.int32), n_query, r, window
        )
        expected = _attention(*given, visibility, implementation=REFERENCE)
        found = _attention(*given, visibility, implementation=by)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        atol = tolerance or (5e-6 if by.path == "tiled" else 2e-5)
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=0, atol=atol
        )


SIZES = {  # B, H, L, R, E.
    "40 slots": (2, 4, 6, 40, 5),
    "no ring": (2, 4, 6, 0, 5),
    "no multiples": (2, 3, 41, 123, 41),
    "ring below a block": (1, 3, 6, 7, 5),
    "rows in groups": (4, 2, 3, 21, 5),
    "segment above a block": (2, 4, 50, 50, 5),
    "384 slots": (2, 2, 32, 384, 16),
    "few": (2, 2, 2, 10, 8),
    "second block of queries not whole": (2, 1, 150, 300, 16),
    "no ring, two strips": (2, 1, 300, 0, 16),
    "values of the ring by rows": (2, 2, 128, 400, 128),
    "wide": (2, 1, 16, 128, 256),
}
TILE = tiled(6, 16)  # One head; R is two and a half blocks.
TILED = [
    *((TILE, "40 slots", clamp_len, None) for clamp_len in (None, 0, 3, 20, 43)),
    *((TILE, "40 slots", 20, window) for window in (40, 34, 4)),
    *((tile, "40 slots", 20, 34) for tile in (tiled(1000, 16), tiled(12, 64))),
    # Blocks that are smaller than a register become 16 keys, which may be more than there are below
    # the clamp.
    *((tiled(12, 1), "40 slots", 8, None), (tiled(12, 4), "40 slots", 13, None)),
    *((tiled(12, 16), name, 9, None) for name in ("no ring", "rows in groups", "no multiples")),
    *(
        (tiled(12, 16), "segment above a block", None, None),
        (tiled(1000, 20), "40 slots", None, None),
    ),
]
TPU = [
    *(
        (tpu(), "384 slots", clamp_len, window)
        for clamp_len, window in ((None, 290), (0, None), (130, None))
    ),
    *((tpu(), "no multiples", 90, None), (tpu(), "second block of queries not whole", 90, None)),
    *(
        (tpu(), "no ring, two strips", 90, None),
        (tpu(128, 384), "values of the ring by rows", 90, None),
    ),
]
MORE = [
    *itertools.product([tiled(12, 16)], list(SIZES)[1:6], [None, 9], [None]),
    *itertools.product([tpu(), tpu(256, 256)], list(SIZES)[7:], [None, 90], [None]),
]


@pytest.mark.parametrize(
    ("by", "name", "clamp_len", "window"),
    nightly_but([*TILED, *TPU], dict.fromkeys([*TILED, *TPU, *MORE])),
    ids=str,
)
def test_values_equal_the_references_wherever_the_ring_begins(by, name, clamp_len, window):
    check(draw(SIZES[name], clamp_len=clamp_len, scores=by.path == "tiled"), by, window=window)


@pytest.mark.parametrize(
    ("by", "name", "keys", "scores", "window"),
    [
        *(
            (TILE, "40 slots", keys, scores, 38)
            for keys, scores in ((True, False), (False, True), (False, False))
        ),
        (tpu(), "384 slots", False, False, 100),
    ],
    ids=str,
)
def test_position_terms_may_be_missing(by, name, keys, scores, window):
    check(draw(SIZES[name], clamp_len=20, keys=keys, scores=scores), by, window=window)


@pytest.mark.parametrize("by", [TILE, tpu()], ids=str)
@pytest.mark.parametrize("dtype", nightly_but(["float32"], ["float32", "bfloat16"]))
def test_a_ring_in_bfloat16_is_read_as_it_is(by, dtype):
    given = draw(SIZES["40 slots"], clamp_len=20, dtype=dtype, ring_dtype="bfloat16")
    check(given, by, tolerance=2e-2 if dtype == "bfloat16" else None)


def test_position_keys_of_longer_distances_than_there_are_change_nothing():
    query, key, value, ring, (position_query, position_key, _) = draw(SIZES["384 slots"])
    more = jnp.concatenate([jnp.full((2, 16, 70), 3.0), position_key], axis=2)
    check(
        (query, key, value, ring, (position_query, more, None)), tpu(), filled=[([384, 100], 160)]
    )


def test_tiles_never_hold_the_scores():
    batch, n_head, n_query, capacity, _ = sizes = (2, 4, 32, 2048, 5)
    visibility = CachedVisibility(jnp.full(2, capacity), jnp.asarray(0), n_query, capacity, None)
    program = _attention.lower(*draw(sizes), visibility, implementation=tiled(32, 256)).compile()
    assert (
        program.memory_analysis().temp_size_in_bytes < batch * n_head * n_query * capacity * 4 / 2
    )
