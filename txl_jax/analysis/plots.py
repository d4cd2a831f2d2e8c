"""Pictures, as PNG files. matplotlib is an extra (`plots`) and is imported only when a picture is drawn."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.metrics import Measure


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def learning_curve(
    records: Sequence[Mapping[str, Any]], path: Path, *, title: str, levels: Mapping[str, float]
) -> None:
    """Draws bpc against updates.

    Args:
      records: those of metrics.jsonl; kinds "train" and "valid" are drawn.
      levels: name and bpc of horizontal lines to compare with.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _figure()
    plot = figure.add_subplot()
    styles = {
        "train": {"color": "#9aa7b8", "linewidth": 1.2},
        "valid": {"color": "#c0392b", "marker": "o", "markersize": 4},
    }
    for kind, style in styles.items():
        points = [(record["step"], record["bpc"]) for record in records if record["kind"] == kind]
        if points:
            plot.plot(*zip(*points, strict=True), label=kind, **style)
    last_step = max((record["step"] for record in records), default=1)
    for color, (name, level) in zip(("#2c3e50", "#2980b9", "#27ae60", "#8e44ad"), levels.items(), strict=False):
        plot.axhline(level, linestyle="--", linewidth=1, color=color)
        # At the left edge, where the curves are still far above.
        plot.annotate(f" {name} {level:.2f}", (0, level), ha="left", va="bottom", fontsize=9, color=color)
    plot.set(title=title, xlabel="updates", ylabel="bits per byte", xlim=(0, last_step))
    plot.set_ylim(bottom=max(0, min([*levels.values(), *_bpcs(records)]) - 0.3), top=min(max(_bpcs(records)), 5.5))
    plot.grid(alpha=0.25)
    plot.legend(frameon=False)
    figure.savefig(path)


def context_curve(values: Mapping[int, float], path: Path, *, title: str, measure: Measure) -> None:
    """Draws a measure against attention lengths, on a logarithmic axis.

    Args:
      values: the measure at each attention length, shortest first.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import NullLocator

    figure = _figure()
    plot = figure.add_subplot()
    plot.plot(*zip(*values.items(), strict=True), color="#c0392b", marker="o", markersize=5, linewidth=1.4)
    for length, value in values.items():
        plot.annotate(
            f"{value:.2f}" if measure is Measure.PPL else f"{value:.4f}",
            (length, value),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="#2c3e50",
            path_effects=[withStroke(linewidth=3, foreground="white")],  # Where the line is steep it goes behind.
        )
    plot.set_xscale("log", base=2)
    plot.set_xticks(list(values), [f"{length:,}" for length in values])
    plot.xaxis.set_minor_locator(NullLocator())
    ylabel = {Measure.BPC: "bits per character", Measure.PPL: "perplexity"}[measure]
    plot.set(title=title, xlabel="attention length (tokens)", ylabel=ylabel)
    plot.margins(x=0.06, y=0.14)
    plot.grid(alpha=0.25)
    figure.savefig(path)


def _figure() -> Any:
    """An empty picture that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _bpcs(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [record["bpc"] for record in records if record["kind"] in ("train", "valid")]
