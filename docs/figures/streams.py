"""Draws docs/streams.png: how many planted anomalies each method finds at how many false alarms.

    python -m benchmarks.log_anomalies score runs/log --log=log  # Writes the table.
    python docs/figures/streams.py                               # Draws it.

Lines are means over the seeds of planting in benchmarks/log_anomalies.csv, for scores in nats per
byte, which templates do not have: theirs are per line. Bands go from the lowest to the highest
seed. Needs matplotlib (`plots`).
"""

import collections
import csv
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax import plots

FOLDER = Path(__file__).parent
TABLE = FOLDER.parents[1] / "benchmarks" / "log_anomalies.csv"
PICTURE = FOLDER.parent / "streams.png"
RATE = "test rate "  # How the names of the drawn thresholds begin.
TEMPLATES = "template pairs"
# Colors by Okabe and Ito, which people with any color vision can tell apart, and dashes besides.
STYLES: dict[str, dict[str, Any]] = {
    "model with memory and learning": {"color": "#d55e00", "linewidth": 2.2},
    "model with memory": {"color": "#0072b2", "linewidth": 1.8},
    "model without memory": {"color": "#7f7f7f", "linewidth": 1.6},
    "zlib after 32 KB": {"color": "#e69f00", "linestyle": "--", "linewidth": 1.6},
    "zlib": {"color": "#cc79a7", "linestyle": "--", "linewidth": 1.6},
    TEMPLATES: {"color": "#009e73", "linestyle": "-.", "linewidth": 1.6},
}


def found_by_rate(method: str) -> dict[float, list[float]]:
    """Returns the percentages of anomalies that a method finds, one per seed.

    The keys are false alarms in percent of the normal lines, in rising order.
    """
    score = "nats per line" if method == TEMPLATES else "nats per byte"
    found = collections.defaultdict(list)
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            is_drawn = row["threshold"].startswith(RATE) and row["score"] == score
            if is_drawn and row["method"] == method:
                rate = 100 * float(row["threshold"].removeprefix(RATE))
                found[rate].append(100 * float(row["found"]))
    return dict(sorted(found.items()))


def draw() -> None:
    """Draws the table."""
    drawing = plots.figure(4.2, width=7.2)
    plot = drawing.subplots()
    ends = []
    last_place = 0
    for method, style in STYLES.items():
        found = found_by_rate(method)
        # Rates are not evenly spaced, so that each gets a place of its own.
        places = np.arange(len(found))
        means = [np.mean(values) for values in found.values()]
        lowest = [min(values) for values in found.values()]
        highest = [max(values) for values in found.values()]
        plot.plot(places, means, marker="o", markersize=3, **style)
        plot.fill_between(places, lowest, highest, color=style["color"], alpha=0.12, linewidth=0)
        plot.set_xticks(places, [f"{rate:g}" for rate in found])
        last_place = len(found) - 1
        ends.append(float(means[-1]))

    # Each line has its name at its end, as far apart as they can be read.
    for method, height in zip(STYLES, plots.spread(ends, 6), strict=True):
        plot.annotate(
            f"  {method}",
            (last_place, height),
            color=STYLES[method]["color"],
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    plot.set(
        xlabel="false alarms, % of the normal lines",
        ylabel="anomalies that are found, %",
        xlim=(0, last_place),
        ylim=(0, 101),
    )
    plot.grid(alpha=0.25)
    plot.spines[["top", "right"]].set_visible(False)
    plots.save(drawing, PICTURE)


if __name__ == "__main__":
    draw()
