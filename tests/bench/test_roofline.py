"""Tests the least time of some work."""

import pytest

from txl_jax.bench.roofline import CHIPS, Work, bounds


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_its_figures(name):
    chip = CHIPS[name]
    assert 4e13 < chip.peak < 2e15 and 1e10 <= chip.memory < 2e11
    assert 1e10 < chip.links < chip.bandwidth < 1e13


def test_each_resource_has_its_time_and_the_slowest_bounds_the_whole():
    chip = CHIPS["v5e"]
    found = bounds(Work(flops=chip.peak, memory_bytes=3 * chip.bandwidth, sent_bytes=2 * chip.links), chip)
    assert found == pytest.approx((1, 3, 2))
    assert (found.overlapped, found.in_turn) == pytest.approx((3, 6))
