"""Draws docs/agents.png: rewards of memory policies on T-mazes, from benchmarks/memory_policy.csv.

    python docs/figures/agents.py

Each policy has the learning rate with the lowest median of steps to a reward of 0.95. Needs
matplotlib (`plots`).
"""

import csv
import runpy
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax import plots

DOCS = Path(__file__).parent.parent
BENCHMARK = DOCS.parent / "benchmarks" / "memory_policy.py"
PICTURE = DOCS / "agents.png"
STEPS_PER_UPDATE = 2048
# Colors by Okabe and Ito, which people with any color vision can tell apart.
STYLES: dict[str, dict[str, Any]] = {
    "no memory": {"color": "#999999", "linestyle": ":"},
    "no gates": {"color": "#0072b2"},
    "GTrXL's gates": {"color": "#d55e00", "linestyle": "--"},
}
LABELS = {
    "no memory": "without memory",
    "no gates": "Transformer-XL",
    "GTrXL's gates": "with GTrXL's gates",
}
TITLES = {"short": "Corridor of 4 to 12 steps", "long": "Corridor of 20 to 40 steps"}


def main() -> None:
    """Draws the curves of both mazes."""
    benchmark = runpy.run_path(str(BENCHMARK))
    with benchmark["TABLE"].open(newline="") as file:
        seeds_by_rate = benchmark["by_rate"](list(csv.DictReader(file)))

    drawing = plots.figure(3.4, width=8.4)
    panels = drawing.subplots(1, len(TITLES), sharey=True)
    for plot, (maze, title) in zip(panels, TITLES.items(), strict=True):
        for policy, style in STYLES.items():
            seeds = benchmark["best_rate"](seeds_by_rate, maze, policy)
            draw(plot, seeds, label=LABELS[policy], style=style)
        plot.set_title(title, fontsize=10, loc="left")
        plot.set(xlabel="environment steps, thousands", ylim=(0.35, 1.03))
        plot.set_xlim(left=0)
        plot.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean reward of an episode")
    panels[0].legend(frameon=False, fontsize=9, loc="center right")
    plots.save(drawing, PICTURE)


def draw(plot: Any, seeds: list[dict[str, str]], *, label: str, style: dict[str, Any]) -> None:
    """Draws the median of the seeds as a line, and their range as a band."""
    curves = np.array([[float(reward) for reward in row["curve"].split()] for row in seeds])
    thousands = STEPS_PER_UPDATE / 1000 * np.arange(1, curves.shape[1] + 1)
    plot.plot(thousands, np.median(curves, axis=0), label=label, **style)
    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
    plot.fill_between(thousands, curves.min(axis=0), curves.max(axis=0), **band)


if __name__ == "__main__":
    main()
