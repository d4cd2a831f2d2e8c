"""Learning curves as PNG files, and the style of all figures.

matplotlib is optional (extra `plots`), and is imported only when a figure is drawn. Without it,
every function except `can_draw` raises ModuleNotFoundError.
"""

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
_MOST_MARKERS = 40  # Approximate markers per line. A marker at each point would hide a long line.

# Colors that people with any kind of color blindness can tell apart (Okabe and Ito, 2008).
_SKY_BLUE = "#56b4e9"
_BLUE = "#0072b2"
_VERMILION = "#d55e00"
_GREY = "#7f7f7f"
_DARK = "#333333"

# The learning curve: its lines by kind of record, and its levels.
_KIND_STYLES: dict[str, dict[str, Any]] = {
    "train": {"color": _SKY_BLUE, "linewidth": 1.6},
    "valid": {"color": _BLUE, "linewidth": 1.6, "marker": "o", "markersize": 4},
}
_LEVEL_COLORS = ("#2c3e50", "#2980b9", "#27ae60", "#8e44ad")
_READING_COLORS = (_GREY, _BLUE, _VERMILION)
_LEVEL_DASHES = ((0, (6, 3)), (0, (2, 2)))
_TOP_BPC = 5.5  # Upper limit of the learning curve's axis. The first training steps are above it.
# Fraction of the text at which the x axis begins. Earlier means are over few tokens.
_NOT_SHOWN = 0.02


def can_draw() -> bool:
    """Returns whether matplotlib is installed. If not, prints a line that nothing is drawn."""
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if not is_installed:
        say("no figure: matplotlib is not installed (pip install matplotlib)")
    return is_installed


def learning_curve(
    records: Sequence[Mapping[str, Any]],
    path: AnyPath,
    *,
    title: str,
    levels: Mapping[str, float],
) -> None:
    """Plots bpc against training steps.

    Args:
      records: Records of metrics.jsonl. Records of the kinds "train" and "valid" are drawn.
      path: File or object to write.
      title: Title of the figure.
      levels: Names and bpc of horizontal lines to compare with.
    """
    drawing = figure()
    curve = drawing.subplots()
    bpcs = _draw_kinds(curve, records)
    _draw_levels(curve, levels)
    last_step = max((record["step"] for record in records), default=1)
    curve.set(title=title, xlabel="training steps", ylabel="bits per byte", xlim=(0, last_step))
    lowest = min([*levels.values(), *bpcs])
    curve.set_ylim(bottom=max(0, lowest - 0.3), top=min(max(bpcs), _TOP_BPC))
    curve.grid(alpha=0.25)
    curve.legend(frameon=False)
    save(drawing, path)


def training_and_reading(
    records: Sequence[Mapping[str, Any]],
    path: AnyPath,
    *,
    title: str,
    bytes_read: np.ndarray,
    curves: Mapping[str, np.ndarray],
    levels: Mapping[str, float],
) -> None:
    """Plots bits per byte twice: against training steps, and along a text that is read.

    Args:
      records: Records of metrics.jsonl. Records of the kinds "train" and "valid" are drawn.
      path: File or object to write.
      title: Title of the figure.
      bytes_read: Floats [S], bytes of the text that were read at each point of the curves.
      curves: Bits per byte of the text so far at each point, floats [S], by name.
      levels: Bits per byte of a compressor for the whole text, by name.
    """
    drawing = figure(5, width=12)
    drawing.suptitle(title)
    training, reading = drawing.subplots(1, 2, sharey=True, width_ratios=(5, 6))

    shown = _draw_kinds(training, records)
    last_step = max((record["step"] for record in records), default=1)
    training.set(
        title="Training: bits per byte at each step",
        xlabel="training steps\n"
        "Training reads its text in order and learns as it goes.\n"
        "Validation does not learn, so it needs more bits.",
        ylabel="bits per byte (fewer are better)",
        # Slightly more, to leave room for the last marker.
        xlim=(0, 1.01 * last_step),
    )
    training.legend(frameon=False)

    ends = {**_draw_reading(reading, bytes_read, curves), **_draw_compressors(reading, levels)}
    lowest = min([*levels.values(), *(float(curve.min()) for curve in curves.values()), *shown])
    highest = max(float(curve[-1]) for curve in curves.values())
    bottom = max(0, lowest - 0.2)
    top = highest + 0.8 * (highest - bottom)
    reading.set_ylim(bottom, top)
    _name_ends(reading, ends, least_distance=0.055 * (top - bottom))

    for panel in (training, reading):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    save(drawing, path)


def _draw_reading(
    panel: Any, bytes_read: np.ndarray, curves: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, str]]:
    """Draws bits per byte along a text, and returns the last value and the color of each name."""
    ends: dict[str, tuple[float, str]] = {}
    first = int(np.searchsorted(bytes_read, _NOT_SHOWN * bytes_read[-1]))
    kilobytes = bytes_read / 1000
    for color, (name, curve) in zip(_READING_COLORS, curves.items(), strict=True):
        panel.plot(kilobytes[first:], curve[first:], color=color, linewidth=2)
        ends[name] = (float(curve[-1]), color)
    panel.set(
        title="Test split: bits per byte of everything read so far",
        xlabel="kilobytes of the test split that were read\n"
        "Learning: after it has scored a segment, the model is trained on it.\n"
        "Dashed and dotted: the whole split, compressed.",
        xlim=(0, kilobytes[-1]),
    )
    return ends


def _draw_compressors(panel: Any, levels: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Draws a dashed line for each compressor, and returns value and color of each name."""
    ends: dict[str, tuple[float, str]] = {}
    for dashes, (name, level) in zip(_LEVEL_DASHES, levels.items(), strict=True):
        panel.axhline(level, linestyle=dashes, linewidth=1.2, color=_DARK)
        ends[name] = (level, _DARK)
    return ends


def _name_ends(panel: Any, ends: Mapping[str, tuple[float, str]], *, least_distance: float) -> None:
    """Writes the name and last value of each line to the right of it, without overlaps."""
    heights = spread([end for end, _ in ends.values()], least_distance)
    for height, (name, (end, color)) in zip(heights, ends.items(), strict=True):
        # x is a fraction of the panel's width, y a number of its axis.
        panel.text(
            1.015,
            height,
            f"{end:.2f}  {name}",
            color=color,
            va="center",
            transform=panel.get_yaxis_transform(),
        )


def spread(values: Sequence[float], least_distance: float) -> list[float]:
    """Moves values apart, keeping their order, until all distances are at least `least_distance`.

    >>> spread([2.0, 1.0, 1.5], 0.25)
    [2.0, 1.0, 1.5]
    >>> spread([1.0, 1.5, 1.0], 0.25)
    [0.875, 1.5, 1.125]
    """
    order = sorted(range(len(values)), key=lambda number: values[number])
    # Values that are too close form a group, which is spread around its mean.
    groups: list[list[int]] = []
    for number in order:
        groups.append([number])
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], values, least_distance):
            last = groups.pop()
            groups[-1] += last

    moved = list(values)
    for group in groups:
        lowest = _lowest(group, values, least_distance)
        for place, number in enumerate(group):
            moved[number] = lowest + place * least_distance
    return moved


def _overlap(
    lower: Sequence[int], upper: Sequence[int], values: Sequence[float], least_distance: float
) -> bool:
    """Returns whether two neighboring groups are too close, each spread around its mean."""
    highest_of_lower = _lowest(lower, values, least_distance) + least_distance * (len(lower) - 1)
    return _lowest(upper, values, least_distance) - highest_of_lower < least_distance


def _lowest(group: Sequence[int], values: Sequence[float], least_distance: float) -> float:
    """Returns where the lowest value of a group is moved to."""
    mean = sum(values[number] for number in group) / len(group)
    return mean - least_distance * (len(group) - 1) / 2


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
        # Labels are at the left edge, where the curves are far above the level.
        curve.annotate(
            f" {name} {level:.2f}", (0, level), ha="left", va="bottom", fontsize=9, color=color
        )


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
      values: y by x, for each name.
      path: File or object to write.
      title: Title of the figure.
      xlabel: Label of the x axis.
      ylabel: Label of the y axis.
      deviations: Half the height of a band around the line by x, for some of the names.
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
    """Returns an empty figure that does not need a display. Sizes are in inches."""
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
