"""Tests of attention over a KV cache: tiles and the TPU kernel against the reference.

The reference is compared with training attention, through the model, in
tests/inference/test_forward.py, and with a score per distance in tests/modules/test_positions.py.
"""

import itertools
from typing import NamedTuple

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


class Sizes(NamedTuple):
    """Sizes of a call."""

    batch: int  # B
    n_head: int  # H
    n_query: int  # L
    capacity: int  # R
    width: int  # E


# A block is the keys or the queries of a tile. Blocks of TPU kernels have at least 128.
SIZES = {}
SIZES["40 slots"] = Sizes(2, 4, 6, 40, 5)
SIZES["no ring"] = Sizes(2, 4, 6, 0, 5)
SIZES["no multiples"] = Sizes(2, 3, 41, 123, 41)
SIZES["ring below a block"] = Sizes(1, 3, 6, 7, 5)
SIZES["rows in groups"] = Sizes(4, 2, 3, 21, 5)
SIZES["segment above a block"] = Sizes(2, 4, 50, 50, 5)
SIZES["384 slots"] = Sizes(2, 2, 32, 384, 16)
SIZES["few"] = Sizes(2, 2, 2, 10, 8)
SIZES["second block of queries not whole"] = Sizes(2, 1, 150, 300, 16)
SIZES["no ring, two strips"] = Sizes(2, 1, 300, 0, 16)
# Heads of 128 fill a TPU's lanes, so the kernel reads values as [R, E]. It reads values of narrower
# heads as [E, R].
SIZES["values of the ring by rows"] = Sizes(2, 2, 128, 400, 128)
SIZES["wide"] = Sizes(2, 1, 16, 128, 256)


def draw(
    sizes: Sizes,
    *,
    clamp_len=None,
    dtype="float32",
    ring_dtype=None,
    has_keys=True,
    has_scores=False,
):
    """Returns the arrays of a call by the names of the arguments."""
    batch, n_head, n_query, capacity, width = sizes
    rng = np.random.default_rng(0)
    # The factors keep the scores of contents and of distances about equally large.
    n_position = table_length(segment_len=n_query, capacity=capacity, clamp_len=clamp_len)

    query = rng.normal(size=(batch, n_head, n_query, width)) * width**-0.5
    key = rng.normal(size=(batch, n_head, n_query, width))
    value = rng.normal(size=(batch, n_head, n_query, width))
    position_query = rng.normal(size=(batch, n_head, n_query, width))
    ring_key = rng.normal(size=(batch, n_head, width, capacity))
    ring_value = rng.normal(size=(batch, n_head, capacity, width))
    position_key = rng.normal(size=(n_head, width, n_position)) * 0.3
    position_score = rng.normal(size=(n_head, n_position))

    def array(numbers, dtype=dtype):
        return numbers.astype(jnp.dtype(dtype))

    position = None
    if has_keys or has_scores:
        position = (
            array(position_query),
            array(position_key) if has_keys else None,
            array(position_score) if has_scores else None,
        )
    return {
        "query": array(query),
        "key": array(key),
        "value": array(value),
        "ring": (
            array(ring_key, ring_dtype or dtype),
            array(ring_value, ring_dtype or dtype),
        ),
        "position": position,
    }


def places_of_a_ring(capacity):
    """Where rings begin: filled slots of two rows, and the oldest slot."""
    r = capacity
    places = [([r, r], 0), ([r, r // 6], r // 2)]
    # An empty row, and an empty ring.
    places += [([r - r // 8, 0], 3 * r // 4), ([0, 0], r // 8)]
    # Full over the end of the ring.
    places += [([r, r], 7 * r // 8), ([0, r], max(r - 1, 0))]
    # More slots than there are mean all slots.
    places += [([r + 30, r + 1], r // 2)]
    return places


def check(
    arrays, implementation, *, window=None, places=None, tolerance=None, reference_arrays=None
):
    """Compares with the reference, for some places where the ring begins.

    The default is `places_of_a_ring`. The reference gets the same arrays, or `reference_arrays`.
    """
    batch, _, n_query, _ = arrays["query"].shape
    capacity = arrays["ring"][0].shape[3]
    if places is None:
        places = places_of_a_ring(capacity)
    if reference_arrays is None:
        reference_arrays = arrays
    if tolerance is None:
        tolerance = 5e-6 if implementation.path == "tiled" else 2e-5

    for n_filled, write_index in places:
        # One row has the first number, and four rows have both twice.
        valid = (n_filled * batch)[:batch]
        visibility = CachedVisibility(
            np.asarray(valid, np.int32),
            np.asarray(write_index, np.int32),
            n_query,
            capacity,
            window,
        )
        expected = _attention(**reference_arrays, visibility=visibility, implementation=REFERENCE)
        attended = _attention(**arrays, visibility=visibility, implementation=implementation)

        assert attended.shape == expected.shape
        assert attended.dtype == expected.dtype
        np.testing.assert_allclose(
            np.asarray(attended, np.float64),
            np.asarray(expected, np.float64),
            rtol=0,
            atol=tolerance,
            err_msg=f"{valid} filled slots, the oldest slot is {write_index}",
        )


TILE = tiled(6, 16)  # The 6 queries of one head. 40 slots are two and a half blocks.
# Implementation, sizes, clamp_len and window. The clamps are 0, within the segment of 6, within the
# ring of 40, and near the largest distance, 45. The windows hide 1, 7 and 37 slots from the first
# query.
TILED = [
    (TILE, "40 slots", None, None),
    (TILE, "40 slots", 0, None),
    (TILE, "40 slots", 3, None),
    (TILE, "40 slots", 20, None),
    (TILE, "40 slots", 43, None),
    (TILE, "40 slots", 20, 40),
    (TILE, "40 slots", 20, 34),
    (TILE, "40 slots", 20, 4),
]
# Blocks that are smaller than a register become 16 keys, which may be more than there are below the
# clamp.
TILED += [
    (tiled(12, 1), "40 slots", 8, None),
    (tiled(12, 4), "40 slots", 13, None),
]
# Tiles of more queries, or of more keys, than there are. With 1000 x 20, R is two whole blocks.
TILED += [
    (tiled(1000, 16), "40 slots", 20, 34),
    (tiled(12, 64), "40 slots", 20, 34),
    (tiled(1000, 20), "40 slots", None, None),
    (tiled(12, 16), "segment above a block", None, None),
]
TILED += itertools.product(
    [tiled(12, 16)], ["no ring", "rows in groups", "no multiples"], [9], [None]
)
# 384 slots are three blocks. With the clamp of 130, position keys are one block and three more.
TPU = [
    (tpu(), "384 slots", None, 290),
    (tpu(), "384 slots", 0, None),
    (tpu(), "384 slots", 130, None),
]
TPU += [
    (tpu(), "no multiples", 90, None),
    (tpu(), "second block of queries not whole", 90, None),
    (tpu(), "no ring, two strips", 90, None),
    (tpu(128, 384), "values of the ring by rows", 90, None),
]
TILED_SIZES = (
    "no ring",
    "no multiples",
    "ring below a block",
    "rows in groups",
    "segment above a block",
)
TPU_SIZES = (
    "few",
    "second block of queries not whole",
    "no ring, two strips",
    "values of the ring by rows",
    "wide",
)
MORE = [
    *itertools.product([tiled(12, 16)], TILED_SIZES, [None, 9], [None]),
    *itertools.product([tpu(), tpu(256, 256)], TPU_SIZES, [None, 90], [None]),
]


@pytest.mark.parametrize(
    ("implementation", "name", "clamp_len", "window"),
    nightly_but([*TILED, *TPU], dict.fromkeys([*TILED, *TPU, *MORE])),
    ids=str,
)
def test_values_equal_the_references_wherever_the_ring_begins(
    implementation, name, clamp_len, window
):
    # The kernel has no position scores.
    has_scores = implementation.path == "tiled"
    arrays = draw(SIZES[name], clamp_len=clamp_len, has_scores=has_scores)

    check(arrays, implementation, window=window)


@pytest.mark.parametrize(
    ("implementation", "name", "has_keys", "has_scores", "window"),
    [
        pytest.param(TILE, "40 slots", True, False, 38, id="tiled, only keys"),
        pytest.param(TILE, "40 slots", False, True, 38, id="tiled, only scores"),
        pytest.param(TILE, "40 slots", False, False, 38, id="tiled, neither"),
        pytest.param(tpu(), "384 slots", False, False, 100, id="kernel, neither"),
    ],
)
def test_position_terms_may_be_missing(implementation, name, has_keys, has_scores, window):
    """Under a window that ends inside the ring."""
    arrays = draw(SIZES[name], clamp_len=20, has_keys=has_keys, has_scores=has_scores)

    check(arrays, implementation, window=window)


@pytest.mark.parametrize("implementation", [TILE, tpu()], ids=str)
@pytest.mark.parametrize("dtype", nightly_but(["float32"], ["float32", "bfloat16"]))
def test_a_ring_in_bfloat16_is_read_as_it_is(implementation, dtype):
    """The reference reads the same ring, so a result in float32 is as close as with a wide ring."""
    arrays = draw(SIZES["40 slots"], clamp_len=20, dtype=dtype, ring_dtype="bfloat16")

    # A result in bfloat16 has 8 bits.
    tolerance = 2e-2 if dtype == "bfloat16" else None
    check(arrays, implementation, tolerance=tolerance)


def test_position_keys_of_longer_distances_than_there_are_change_nothing():
    arrays = draw(SIZES["384 slots"])
    position_query, position_key, _ = arrays["position"]
    # Keys of 70 longer distances come first. They would change a result that had read them.
    n_head, width, _ = position_key.shape
    unread = np.full((n_head, width, 70), 3.0, np.float32)
    longer_key = np.concatenate([unread, position_key], axis=2)
    longer = arrays | {"position": (position_query, longer_key, None)}

    for implementation in (REFERENCE, tpu()):
        check(longer, implementation, places=[([384, 100], 160)], reference_arrays=arrays)


def test_tiles_never_hold_the_scores():
    sizes = Sizes(batch=2, n_head=4, n_query=32, capacity=2048, width=5)
    valid = np.asarray([sizes.capacity] * 2, np.int32)
    visibility = CachedVisibility(valid, np.int32(0), sizes.n_query, sizes.capacity, None)

    # A tile has the 32 queries of one head and an eighth of the slots.
    lowered = _attention.lower(**draw(sizes), visibility=visibility, implementation=tiled(32, 256))
    scratch = lowered.compile().memory_analysis().temp_size_in_bytes

    bytes_of_scores = 4 * sizes.batch * sizes.n_head * sizes.n_query * sizes.capacity
    assert scratch < bytes_of_scores / 2
