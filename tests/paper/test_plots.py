"""Tests that pictures are drawn: PNGs of some size."""

import pytest

from txl_jax.metrics import Measure
from txl_jax.paper import plots


@pytest.mark.full
def test_curves_are_pngs(tmp_path):
    records = [{"kind": kind, "step": step, "bpc": 8 / step} for step in range(1, 9) for kind in ("train", "valid")]
    plots.learning_curve(records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6})
    plots.context_curve({50: 1.5, 1600: 1.23456}, tmp_path / "context.png", title="a title", measure=Measure.BPC)
    for name in ("curve", "context"):
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.full
def test_a_plot_in_a_bucket(bucket):
    plots.curves({"a": {1: 2.0, 2: 1.0}}, bucket / "curves.png", title="a title", xlabel="x", ylabel="y")
    assert (bucket / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_caller_learns_that_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()


def test_labels_keep_their_distance():
    assert plots._spaced([9, 8, 2, 5, 4, 0], 3) == [9, 2, 5]
