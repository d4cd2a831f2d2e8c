"""Tests that the learning curve is drawn: a PNG of some size, with the curves and levels it was given."""

import pytest

from txl_jax.analysis import plots


@pytest.mark.parametrize("kinds", [("train", "valid"), ("train",)])
def test_a_learning_curve_is_a_png(tmp_path, kinds):
    records = [{"kind": kind, "step": step, "bpc": 8 / step} for step in range(1, 9) for kind in kinds]
    path = tmp_path / "curve.png"
    plots.learning_curve(records, path, title="a title", levels={"zlib": 1.9, "lzma": 1.6})
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    plain = tmp_path / "plain.png"
    plots.learning_curve(records, plain, title="a title", levels={})
    assert plain.read_bytes() != picture


def test_without_matplotlib_the_caller_is_told(monkeypatch):
    assert plots.can_draw()
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()
