"""Tests that plots are PNG files, on a disk and in a bucket."""

import pytest

from txl_jax import plots


@pytest.mark.full
def test_a_learning_curve(tmp_path):
    records = [{"kind": kind, "step": step, "bpc": 8 / step} for step in range(1, 9) for kind in ("train", "valid")]
    plots.learning_curve(records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6})
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.full
def test_a_plot_in_a_bucket(bucket):
    plots.curves({"a": {1: 2.0, 2: 1.0}}, bucket / "curves.png", title="a title", xlabel="x", ylabel="y")
    assert (bucket / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_caller_learns_that_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()
