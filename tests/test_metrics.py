"""Tests of the units that are reported, of their totals over all tokens, and of the plot of a run."""

import math

import pytest

from txl_jax import plots
from txl_jax.metrics import Measure, Totals


def test_units_and_sums():
    total = Totals(nats=6 * math.log(2), tokens=2)
    assert (total.nll, total.bpc, total.perplexity) == pytest.approx((3 * math.log(2), 3, 8))
    # A short part weighs by its tokens: the mean of the two means would be 2.5.
    assert (Totals(nats=3.0, tokens=3) + Totals(nats=4.0, tokens=1)).nll == pytest.approx(7 / 4)
    text = Totals(nats=6 * math.log(2), tokens=2, bytes=12)
    assert text.bits_per_byte == pytest.approx(0.5) and math.isnan(total.bits_per_byte)
    assert "bpc" in text.per_token(Measure.BPC) and "bpc" not in text.per_token(Measure.PPL)
    assert text.per_token(Measure.PPL)["bits_per_token"] == pytest.approx(3)
    nothing = Totals()
    assert all(map(math.isnan, (nothing.nll, nothing.bpc, nothing.perplexity)))
    assert Totals(nats=1e6, tokens=1).perplexity == math.inf


@pytest.mark.full
def test_a_learning_curve(tmp_path):
    records = [{"kind": kind, "step": step, "bpc": 8 / step} for step in range(1, 9) for kind in ("train", "valid")]
    plots.learning_curve(records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6})
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
