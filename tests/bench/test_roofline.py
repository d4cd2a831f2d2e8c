"""Tests of the roofline model."""

import pytest

from txl_jax.bench.roofline import CHIPS, Work, lower_bounds


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_its_figures(name):
    chip = CHIPS[name]
    assert 4e13 < chip.peak_flops < 2e15 and 1e10 <= chip.hbm_bytes < 2e11
    assert 1e10 < chip.link_bandwidth < chip.hbm_bandwidth < 1e13


def test_each_resource_has_its_time_and_the_slowest_bounds_the_whole():
    chip = CHIPS["v5e"]
    work = Work(flops=chip.peak_flops, hbm_bytes=3 * chip.hbm_bandwidth, sent_bytes=2 * chip.link_bandwidth)
    found = lower_bounds(work, chip)
    assert found == pytest.approx((1, 3, 2))
    assert (found.overlapped, found.serial) == pytest.approx((3, 6))
