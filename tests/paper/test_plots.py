"""Tests that pictures are drawn: PNGs of some size, with the curves, levels and labels they were given."""

import pytest

from txl_jax.metrics import Measure
from txl_jax.paper import plots


@pytest.mark.full
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


@pytest.mark.full
def test_a_plot_in_a_bucket(bucket):
    plots.curves({"a": {1: 2.0, 2: 1.0}}, bucket / "curves.png", title="a title", xlabel="x", ylabel="y")
    assert (bucket / "curves.png").read_bytes().startswith(b"\x89PNG")


def drawn(monkeypatch, tmp_path, values, measure):
    """The axes of a context curve, and its PNG."""
    figures, make = [], plots._figure
    monkeypatch.setattr(plots, "_figure", lambda: figures.append(make()) or figures[-1])
    path = tmp_path / "curve.png"
    plots.context_curve(values, path, title="a title", measure=measure)
    return figures[0].axes[0], path.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize(
    ("measure", "axis", "labels"),
    [
        (Measure.BPC, "bits per character", ["1.5000", "1.2346"]),
        (Measure.PPL, "perplexity", ["1.50", "1.23"]),
    ],
)
def test_a_context_curve_has_its_points_where_they_belong(monkeypatch, tmp_path, measure, axis, labels):
    axes, picture = drawn(monkeypatch, tmp_path, {50: 1.5, 1600: 1.23456}, measure)
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert axes.lines[0].get_xydata().tolist() == [[50, 1.5], [1600, 1.23456]] and axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["50", "1,600"]
    assert [text.get_text() for text in axes.texts] == labels
    assert (axes.get_title(), axes.get_ylabel()) == ("a title", axis)


def test_without_matplotlib_the_caller_learns_that_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()


def test_labels_keep_their_distance():
    assert plots._spaced([9, 8, 2, 5, 4, 0], 3) == [9, 2, 5]
