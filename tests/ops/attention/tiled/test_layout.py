"""Tests of how tiled attention cuts the scores of a head."""

from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.tiled.training import Layout


def test_strips_of_a_causal_segment_read_what_their_last_query_sees():
    first, second = Layout(10, 6, None, True, Tile(5, 64)).strips()
    assert (first.begin, first.end, first.n_blocks, first.width) == (0, 11, 1, 12)
    assert (second.begin, second.end, second.first) == (0, 16, 5)
    first, second = Layout(10, 6, 4, True, Tile(5, 64)).strips()
    assert (first.begin, first.end, second.begin, second.end) == (3, 11, 8, 16)
    both = Layout(10, 6, None, False, Tile(10, 5)).strips()[0]
    assert (both.end, both.n_blocks, both.n_key, both.width) == (16, 4, 4, 13)
