"""Tests of dropout on probabilities: the hash against plain integers, its statistics, and pieces of a mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import Dropout
from txl_jax.ops.attention.dropout import bits

RATE = 0.15
B, H, N = 2, 3, 512


def kept(seed=7, *, rate=RATE, shape=(B, H, N, N), **first):
    """The mask of whole probabilities, bool [B, H, L, K]."""
    scaled = Dropout(rate, jnp.uint32(seed), shape[1], **first).apply(jnp.ones(shape))
    np.testing.assert_allclose(np.unique(scaled), [0, 1 / (1 - rate)], rtol=1e-6)
    return np.asarray(scaled) > 0


@pytest.mark.parametrize(
    "where", [(0, 0, 0, 0), (7, 5, 3, 2), (2**32 - 1, 2**31 - 1, 4095, 65535), (0x9E3779B9, 1023, 0, 1)]
)
def test_bits_and_thresholds_are_those_of_plain_integers(where):
    found = bits(np.uint32(where[0]), *where[1:])
    assert found.dtype == jnp.uint32
    assert int(found) == oracles.random_bits(*where)
    for rate, threshold in ((0.0, 0), (0.5, 2**31), (0.75, 3 * 2**30), (1 - 2**-30, 2**32 - 2**8)):
        assert int(Dropout(rate, jnp.uint32(0), 1).threshold()) == threshold


@pytest.mark.parametrize(("seed", "rate"), [(0, RATE), (1, 0.5), (2**32 - 1, RATE)])
def test_the_share_that_is_kept_is_that_of_the_rate(seed, rate):
    """In all, and for the rows of queries and columns of keys, whose sums vary as those of independent draws."""
    mask = kept(seed, rate=rate)
    assert abs(mask.mean() - (1 - rate)) < 3 * np.sqrt(rate * (1 - rate) / mask.size)
    for axis in (2, 3):
        variance = mask.sum(axis).var() / (N * rate * (1 - rate))
        assert abs(variance - 1) < 4 * np.sqrt(2 / (B * H * N)), axis


# The next row, head, query and key, and the next query and key.
@pytest.mark.parametrize("step", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)])
def test_neighbours_and_masks_of_other_seeds_are_not_correlated(step):
    mask = kept()
    here = mask[tuple(slice(None, -n or None) for n in step)]
    there = mask[tuple(slice(n, None) for n in step)]
    for a, b in ((here, there), *((mask, kept(other)) for other in (8, 7 + 2**31))):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_a_piece_of_the_batch_and_of_the_heads_has_its_piece_of_the_mask():
    """As on a device of a mesh, whose rows and heads are some of all."""
    whole = kept(shape=(4, 6, 5, 7))
    on_one = Dropout(RATE, jnp.uint32(7), 6, first_row=jnp.int32(2), first_head=jnp.int32(3))
    np.testing.assert_array_equal(on_one.apply(jnp.ones((2, 3, 5, 7))) > 0, whole[2:, 3:])
