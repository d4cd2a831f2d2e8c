"""Tiles of tiled attention, and where `auto` takes it."""

import dataclasses

import pytest

from txl_jax.ops.attention.problem import Problem, Tile
from txl_jax.ops.attention.tiled import limits
from txl_jax.ops.attention.tiled.training import Layout

PROBLEM = Problem("cpu", "cpu", "float32", 2, 8, 512, 1024, 64)


def test_a_long_segment_has_at_most_eight_strips():
    for segment_len, tile in ((1, Tile(64, 1024)), (512, Tile(128, 1024)), (4000, Tile(500, 1024))):
        problem = dataclasses.replace(PROBLEM, segment_len=segment_len, n_keys=2 * segment_len)
        assert limits.default_tile(problem) == tile
        assert len(Layout(segment_len, segment_len, None, True, tile).strips()) <= 8


@pytest.mark.parametrize(
    ("changes", "faster"),
    [
        ({}, True),
        ({"segment_len": 32, "n_keys": 64, "batch": 600}, False),
        ({"segment_len": 150, "n_keys": 300, "batch": 4}, False),
        ({"platform": "gpu"}, False),
        ({"segment_len": 64, "n_keys": 704, "capacity": 640}, True),
        ({"segment_len": 4, "n_keys": 16, "capacity": 12}, False),
    ],
)
def test_auto_takes_it_where_it_is_faster(changes, faster):
    assert limits.is_faster(dataclasses.replace(PROBLEM, **changes)) is faster


def test_strips_of_a_causal_segment_read_what_their_last_query_sees():
    first, second = Layout(10, 6, None, True, Tile(5, 64)).strips()
    assert (first.begin, first.end, first.n_blocks, first.width) == (0, 11, 1, 12)
    assert (second.begin, second.end, second.first) == (0, 16, 5)
    first, second = Layout(10, 6, 4, True, Tile(5, 64)).strips()
    assert (first.begin, first.end, second.begin, second.end) == (3, 11, 8, 16)
    both = Layout(10, 6, None, False, Tile(10, 5)).strips()[0]
    assert (both.end, both.n_blocks, both.n_key, both.width) == (16, 4, 4, 13)
