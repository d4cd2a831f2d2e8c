"""Plots, as PNG files. matplotlib is an extra (`plots`) and is imported only when a plot is drawn."""

import importlib.util
import io
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from txl_jax.metrics import Measure
from txl_jax.runtime.storage import AnyPath, write

UNITS = {Measure.BPC: "bits per character", Measure.PPL: "perplexity"}


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def learning_curve(
    records: Sequence[Mapping[str, Any]], path: AnyPath, *, title: str, levels: Mapping[str, float]
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
    _save(figure, path)


def context_curve(values: Mapping[int, float], path: AnyPath, *, title: str, measure: Measure) -> None:
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
    plot.set(title=title, xlabel="attention length (tokens)", ylabel=UNITS[measure])
    plot.margins(x=0.06, y=0.14)
    plot.grid(alpha=0.25)
    _save(figure, path)


def curves(
    values: Mapping[str, Mapping[int, float]],
    path: AnyPath,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    deviations: Mapping[str, Mapping[int, float]] | None = None,
    log: bool = False,
) -> None:
    """Draws one line per name.

    Args:
      values: by name, y at each x.
      deviations: by name, half the height of a band around the line at each x. Lines without a name here have no band.
      log: Draws y on a logarithmic axis.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.ticker import LogFormatter

    figure = _figure()
    plot = figure.add_subplot()
    colors = ("#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#d68910", "#16a085", "#7f8c8d", "#2c3e50")
    for i, (name, points) in enumerate(values.items()):
        style = {"color": colors[i % len(colors)], "marker": "os^Dv"[i % 5], "markersize": 4, "linewidth": 1.4}
        # With a marker at each point, a long line would be hidden.
        plot.plot(*zip(*points.items(), strict=True), label=name, markevery=max(1, len(points) // 40), **style)
        if band := (deviations or {}).get(name):
            low, high = ([y + sign * band[x] for x, y in points.items()] for sign in (-1, 1))
            plot.fill_between(list(points), low, high, color=style["color"], alpha=0.15, linewidth=0)
    plot.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
        plot.set_yscale("log")
        plot.yaxis.set_major_formatter(LogFormatter())
        plot.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    plot.grid(alpha=0.25)
    plot.legend(frameon=False)
    _save(figure, path)


def attention_average(average: np.ndarray, path: AnyPath, *, title: str) -> None:
    """Draws the mean attention [N, H, A] of every head, a row each, to the distances 0 .. A - 1.

    The color scale is the square root, or all but the nearest distances would be white.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.colors import PowerNorm

    n_layer, n_head, n_distance = average.shape
    figure = _figure(height=min(max(0.07 * n_layer * n_head, 3.5), 12))
    plot = figure.add_subplot()
    rows = average.reshape(n_layer * n_head, n_distance)[:, ::-1]
    edges = {"extent": (n_distance - 0.5, -0.5, n_layer * n_head, 0), "aspect": "auto", "interpolation": "nearest"}
    image = plot.imshow(rows, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=np.quantile(rows, 0.999)), **edges)
    for layer in range(1, n_layer):
        plot.axhline(layer * n_head, color="#c0392b", linewidth=0.5)
    plot.set_yticks([(layer + 0.5) * n_head for layer in range(n_layer)], [str(layer + 1) for layer in range(n_layer)])
    plot.set(title=title, xlabel="distance of the key (tokens)", ylabel=f"layer, {n_head} heads each")
    figure.colorbar(image, label="probability")
    _save(figure, path)


def attention_rows(
    rows: Mapping[str, np.ndarray],
    labels: Sequence[str],
    path: AnyPath,
    *,
    title: str,
    without_labels: Collection[str] = (),
) -> None:
    """Draws the attention weights of one query, a panel per row, with the tokens of the largest weights.

    Args:
      rows: probabilities [A] of the distances 0 .. A - 1, by name.
      labels: the token at each distance.
      without_labels: names of rows that do not depend on the tokens.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _figure(height=1.9 * len(rows) + 0.8)
    panels = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for panel, (name, row) in zip(panels, rows.items(), strict=True):
        panel.vlines(np.arange(len(row)), 0, row, color="#2980b9", linewidth=max(0.6, 100 / len(row)))
        for distance in [] if name in without_labels else _spaced(np.argsort(-row), len(row) / 14)[:7]:
            panel.annotate(
                labels[distance].replace("$", r"\$"),
                (distance, row[distance]),
                xytext=(0, 2),
                textcoords="offset points",
                ha="right" if distance < len(row) / 40 else "center",
                fontsize=8,
            )
        panel.set(ylim=(0, row.max() * 1.25), xlim=(len(row) - 0.5, -0.5), ylabel="probability")
        panel.set_title(name, fontsize=9, loc="left")
        panel.grid(alpha=0.2)
    panels[-1].set_xlabel("distance of the key (tokens)")
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _save(figure: Any, path: AnyPath) -> None:
    """Writes a figure in the format that the name of the file has."""
    data = io.BytesIO()
    figure.savefig(data, format=os.path.splitext(path)[1].removeprefix("."))
    write(path, data.getvalue())


def _spaced(places: Sequence[int] | np.ndarray, least: float) -> list[int]:
    """Returns the places in order, without those nearer than `least` to an earlier one."""
    kept: list[int] = []
    for place in places:
        if all(abs(place - other) >= least for other in kept):
            kept.append(int(place))
    return kept


def _figure(height: float = 4.5) -> Any:
    """Returns an empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _bpcs(records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [record["bpc"] for record in records if record["kind"] in ("train", "valid")]
