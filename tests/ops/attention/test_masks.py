"""Tests of the attention mask, drawn by hand; test_reference has it against a loop over pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

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
    mask = masks.Visibility(jnp.asarray([valid]), 3, 3, window).mask()
    np.testing.assert_array_equal(mask[0], expected)


@pytest.mark.parametrize("causal", [True, False])
def test_more_slots_and_tokens_than_there_are_mean_all(causal):
    def seen(valid, lengths):
        return masks.Visibility(jnp.asarray(valid), 3, 2, causal=causal, lengths=jnp.asarray(lengths)).mask()

    np.testing.assert_array_equal(seen([9, -1], [9, -1]), seen([2, 0], [3, 0]))
