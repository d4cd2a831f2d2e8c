"""Tests of the attention mask: drawn by hand, and against a loop over pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import masks


def drawn(*rows: str) -> list[list[bool]]:
    """A mask from text: 1 visible, . hidden, | between memory and segment."""
    return [[mark == "1" for mark in row if mark in "1."] for row in rows]


@pytest.mark.parametrize(
    ("valid", "window", "expected"),
    [
        (3, None, drawn("111|1..", "111|11.", "111|111")),
        (1, None, drawn("..1|1..", "..1|11.", "..1|111")),
        (0, None, drawn("...|1..", "...|11.", "...|111")),
        (3, 3, drawn(".11|1..", "..1|11.", "...|111")),
        (1, 3, drawn("..1|1..", "..1|11.", "...|111")),
        (3, 4, drawn("111|1..", ".11|11.", "..1|111")),
        (3, 1, drawn("...|1..", "...|.1.", "...|..1")),
    ],
)
def test_masks_drawn_by_hand(valid, window, expected):
    mask = masks.attention_mask(jnp.asarray([valid]), segment_len=3, mem_len=3, window=window)
    np.testing.assert_array_equal(mask[0], expected)


def test_no_memory_leaves_the_causal_triangle():
    mask = masks.attention_mask(jnp.asarray([0]), segment_len=3, mem_len=0)
    np.testing.assert_array_equal(mask[0], drawn("1..", "11.", "111"))


@pytest.mark.parametrize("window", [None, 1, 4, 7])
@pytest.mark.parametrize(("segment_len", "mem_len"), [(3, 5), (5, 3), (1, 4)])
def test_every_row_has_its_own_filled_slots(segment_len, mem_len, window):
    valid = [0, mem_len, mem_len - 1, 1]
    mask = masks.attention_mask(jnp.asarray(valid), segment_len=segment_len, mem_len=mem_len, window=window)
    expected = oracles.attention_mask(valid, segment_len=segment_len, mem_len=mem_len, window=window)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, expected)


def test_a_description_is_its_mask():
    described = masks.Visibility(jnp.asarray([0, 2]), 3, 4, 5).mask()
    expected = oracles.attention_mask([0, 2], segment_len=3, mem_len=4, window=5)
    np.testing.assert_array_equal(described, expected)
