"""Tests of the units that are reported, and that totals add up to the mean over all tokens."""

import math

import pytest

from txl_jax.metrics import Totals


def test_units_and_sums():
    total = Totals(nats=6 * math.log(2), tokens=2)
    assert (total.nll, total.bpc, total.perplexity) == pytest.approx((3 * math.log(2), 3, 8))
    # A short part weighs by its tokens: the mean of the two means would be 2.5.
    assert (Totals(nats=3.0, tokens=3) + Totals(nats=4.0, tokens=1)).nll == pytest.approx(7 / 4)
    nothing = Totals()
    assert all(map(math.isnan, (nothing.nll, nothing.bpc, nothing.perplexity)))
    assert Totals(nats=1e6, tokens=1).perplexity == math.inf
