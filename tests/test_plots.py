"""Tests the plot of a run; the plots of studies are tested with them."""

import pytest

from txl_jax import plots


@pytest.mark.full
def test_a_learning_curve(tmp_path):
    records = [{"kind": kind, "step": step, "bpc": 8 / step} for step in range(1, 9) for kind in ("train", "valid")]
    plots.learning_curve(records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6})
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
