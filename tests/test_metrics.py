"""Tests of the units that are reported, and that totals add up to the mean over all tokens."""

import math

import pytest

from txl_jax.metrics import Totals


def test_units():
    total = Totals(nats=6 * math.log(2), tokens=2)
    assert total.nll == pytest.approx(3 * math.log(2))
    assert total.bpc == pytest.approx(3)
    assert total.perplexity == pytest.approx(8)


def test_a_short_part_weighs_by_its_tokens():
    """The sum decides, not the mean of the two means, 2.5."""
    assert (Totals(nats=3.0, tokens=3) + Totals(nats=4.0, tokens=1)).nll == pytest.approx(7 / 4)


def test_what_has_no_mean_or_no_float():
    total = Totals()
    assert math.isnan(total.nll) and math.isnan(total.bpc) and math.isnan(total.perplexity)
    assert Totals(nats=1e6, tokens=1).perplexity == math.inf
