"""Learning curves as PNG files, and the style of all figures.

matplotlib is an extra (`plots`), which is imported only when a figure is drawn. Without it, every
function except `can_draw` raises ModuleNotFoundError.
"""

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.metrics import Measure
from txl_jax.runtime.output import say
from txl_jax.runtime.storage import AnyPath, write

UNITS = {Measure.BPC: "bits per character", Measure.BPB: "bits per byte", Measure.PPL: "perplexity"}


def can_draw() -> bool:
    """Returns whether matplotlib is installed, or prints a line that nothing is drawn."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        say("no figure: matplotlib is not installed (pip install '.[plots]')")
    return found


def learning_curve(
    records: Sequence[Mapping[str, Any]],
    path: AnyPath,
    *,
    title: str,
    levels: Mapping[str, float],
    by_position: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Plots bpc against training steps.

    The points are the records of the kinds "train" and "valid" in metrics.jsonl.

    `levels` are names and bpc of horizontal lines to compare with. `by_position` are names and the
    bpc at each position of a segment, which are drawn to the right of the curve.
    """
    drawing = figure(width=11 if by_position else 8)
    panels = drawing.subplots(1, 2 if by_position else 1, sharey=True, squeeze=False)[0]
    plot, bpcs = panels[0], list[float]()
    train: dict[str, Any] = {"color": "#9aa7b8", "linewidth": 1.2}
    valid: dict[str, Any] = {"color": "#c0392b", "marker": "o", "markersize": 4}
    for kind, style in ("train", train), ("valid", valid):
        points = [(record["step"], record["bpc"]) for record in records if record["kind"] == kind]
        bpcs += [bpc for _, bpc in points]
        if points:
            plot.plot(*zip(*points, strict=True), label=kind, **style)
    last_step = max((record["step"] for record in records), default=1)
    for color, (name, level) in zip(
        ("#2c3e50", "#2980b9", "#27ae60", "#8e44ad"), levels.items(), strict=False
    ):
        plot.axhline(level, linestyle="--", linewidth=1, color=color)
        # At the left edge, where the curves are still far above.
        plot.annotate(
            f" {name} {level:.2f}", (0, level), ha="left", va="bottom", fontsize=9, color=color
        )
    plot.set(title=title, xlabel="training steps", ylabel="bits per byte", xlim=(0, last_step))
    if by_position:
        for color, (name, values) in zip(("#9aa7b8", "#c0392b"), by_position.items(), strict=True):
            panels[1].plot(
                range(1, len(values) + 1), values, label=name, color=color, linewidth=1.6
            )
            panels[1].set(xlim=(1, len(values)))
            bpcs += values
        panels[1].set(title="Test split, with and without memory", xlabel="position in the segment")
    plot.set_ylim(bottom=max(0, min([*levels.values(), *bpcs]) - 0.3), top=min(max(bpcs), 5.5))
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    save(drawing, path)


def curves(
    values: Mapping[str, Mapping[int, float]],
    path: AnyPath,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    deviations: Mapping[str, Mapping[int, float]] | None = None,
    log: bool = False,
    log_x: bool = False,
) -> None:
    """Draws one line per name: y at each x.

    `deviations` are half the height of a band around a name's line at each x. `log` and `log_x`
    make y and x logarithmic, the latter with a tick at each x.
    """
    from matplotlib.ticker import LogFormatter

    drawing = figure()
    plot = drawing.add_subplot()
    colors = (
        "#c0392b",
        "#2980b9",
        "#27ae60",
        "#8e44ad",
        "#d68910",
        "#16a085",
        "#7f8c8d",
        "#2c3e50",
    )
    for i, (name, points) in enumerate(values.items()):
        style = {
            "color": colors[i % len(colors)],
            "marker": "os^Dv"[i % 5],
            "markersize": 4,
            "linewidth": 1.4,
        }
        # With a marker at each point, a long line would be hidden.
        plot.plot(
            *zip(*points.items(), strict=True),
            label=name,
            markevery=max(1, len(points) // 40),
            **style,
        )
        if band := (deviations or {}).get(name):
            low, high = ([y + sign * band[x] for x, y in points.items()] for sign in (-1, 1))
            plot.fill_between(
                list(points), low, high, color=style["color"], alpha=0.15, linewidth=0
            )
    plot.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
        plot.set_yscale("log")
        plot.yaxis.set_major_formatter(LogFormatter())
        plot.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    if log_x:
        ticks = sorted({x for points in values.values() for x in points})
        plot.set_xscale("log", base=2)
        plot.set_xticks(ticks, [f"{x:,}" for x in ticks])
        plot.minorticks_off()
    plot.grid(alpha=0.25)
    plot.legend(frameon=False)
    save(drawing, path)


def figure(height: float = 4.5, *, width: float = 8) -> Any:
    """Returns an empty figure that needs no display. The sizes are inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    empty = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(empty)
    return empty


def save(drawing: Any, path: AnyPath) -> None:
    """Writes a figure to a file or an object, in the format of its suffix."""
    data = io.BytesIO()
    drawing.savefig(data, format=os.path.splitext(path)[1].removeprefix("."))
    write(path, data.getvalue())
