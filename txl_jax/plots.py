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

# Colors of the lines of `curves`, in their order.
_COLORS = (
    "#c0392b",
    "#2980b9",
    "#27ae60",
    "#8e44ad",
    "#d68910",
    "#16a085",
    "#7f8c8d",
    "#2c3e50",
)
_MARKERS = "os^Dv"
_MOST_MARKERS = 40  # Markers per line, about. With one at each point, a long line would be hidden.

# The learning curve: its lines by kind of record, its levels, and its lines by position.
_KIND_STYLES: dict[str, dict[str, Any]] = {
    "train": {"color": "#9aa7b8", "linewidth": 1.2},
    "valid": {"color": "#c0392b", "marker": "o", "markersize": 4},
}
_LEVEL_COLORS = ("#2c3e50", "#2980b9", "#27ae60", "#8e44ad")
_POSITION_COLORS = ("#9aa7b8", "#c0392b")
_TOP_BPC = 5.5  # Where the learning curve is cut off: the first updates are above.


def can_draw() -> bool:
    """Returns whether matplotlib is installed, or prints a line that nothing is drawn."""
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if not is_installed:
        say("no figure: matplotlib is not installed (pip install '.[plots]')")
    return is_installed


def learning_curve(
    records: Sequence[Mapping[str, Any]],
    path: AnyPath,
    *,
    title: str,
    levels: Mapping[str, float],
    by_position: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Plots bpc against training steps.

    Args:
      records: Records of metrics.jsonl, of which those of the kinds "train" and "valid" are drawn.
      path: File or object to write.
      title: Title of the figure.
      levels: Names and bpc of horizontal lines to compare with.
      by_position: Names and the bpc at each position of a segment, which are drawn to the right of
        the curve, or None.
    """
    if by_position:
        drawing = figure(width=11)
        curve, positions = drawing.subplots(1, 2, sharey=True)
        panels = [curve, positions]
    else:
        drawing = figure()
        curve = drawing.subplots()
        panels = [curve]

    bpcs = _draw_kinds(curve, records)
    _draw_levels(curve, levels)
    last_step = max((record["step"] for record in records), default=1)
    curve.set(title=title, xlabel="training steps", ylabel="bits per byte", xlim=(0, last_step))

    if by_position:
        bpcs += _draw_positions(positions, by_position)

    lowest = min([*levels.values(), *bpcs])
    curve.set_ylim(bottom=max(0, lowest - 0.3), top=min(max(bpcs), _TOP_BPC))
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    save(drawing, path)


def _draw_kinds(curve: Any, records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Draws a line for each kind of record, and returns all bpc that it shows."""
    shown: list[float] = []
    for kind, style in _KIND_STYLES.items():
        of_kind = [record for record in records if record["kind"] == kind]
        steps = [record["step"] for record in of_kind]
        bpcs = [record["bpc"] for record in of_kind]
        if of_kind:
            curve.plot(steps, bpcs, label=kind, **style)
        shown += bpcs
    return shown


def _draw_levels(curve: Any, levels: Mapping[str, float]) -> None:
    """Draws a horizontal line for each level, with its name."""
    for color, (name, level) in zip(_LEVEL_COLORS, levels.items(), strict=False):
        curve.axhline(level, linestyle="--", linewidth=1, color=color)
        # At the left edge, where the curves are still far above.
        curve.annotate(
            f" {name} {level:.2f}", (0, level), ha="left", va="bottom", fontsize=9, color=color
        )


def _draw_positions(panel: Any, by_position: Mapping[str, Sequence[float]]) -> list[float]:
    """Draws the lines of `by_position`, and returns all bpc that they show."""
    shown: list[float] = []
    for color, (name, bpcs) in zip(_POSITION_COLORS, by_position.items(), strict=True):
        positions = range(1, len(bpcs) + 1)
        panel.plot(positions, bpcs, label=name, color=color, linewidth=1.6)
        panel.set(xlim=(1, len(bpcs)))
        shown += bpcs
    panel.set(title="Test split, with and without memory", xlabel="position in the segment")
    return shown


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

    Args:
      values: For each name, y by x.
      path: File or object to write.
      title: Title of the figure.
      xlabel: Label of the x axis.
      ylabel: Label of the y axis.
      deviations: For some names, half the height of a band around the line, by x.
      log: Whether y is logarithmic.
      log_x: Whether x is logarithmic, with a tick at each x.
    """
    from matplotlib.ticker import LogFormatter

    drawing = figure()
    plot = drawing.add_subplot()
    for number, (name, points) in enumerate(values.items()):
        x = list(points)
        y = list(points.values())
        color = _COLORS[number % len(_COLORS)]
        plot.plot(
            x,
            y,
            label=name,
            markevery=max(1, len(points) // _MOST_MARKERS),
            color=color,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1.4,
        )
        band = deviations.get(name) if deviations else None
        if band:
            low = [value - band[place] for place, value in points.items()]
            high = [value + band[place] for place, value in points.items()]
            plot.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)

    plot.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
        plot.set_yscale("log")
        plot.yaxis.set_major_formatter(LogFormatter())
        plot.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    if log_x:
        ticks = sorted(set().union(*values.values()))
        plot.set_xscale("log", base=2)
        plot.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
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
    _, suffix = os.path.splitext(path)
    data = io.BytesIO()
    drawing.savefig(data, format=suffix.removeprefix("."))
    write(path, data.getvalue())
