"""Draws validation losses of two runs, from random weights and from a warm start, against updates.

python docs/figures/fine_tuning.py runs/random runs/tuned docs/fine-tuning.png
"""

import math
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from txl_jax.runtime.log import read_metrics


def main() -> None:
    """Draws the curves of two workdirs into a file."""
    random, tuned, path = map(Path, sys.argv[1:])
    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    plot = figure.add_subplot()
    draw_run(plot, random, label="random weights", color="#9aa7b8")
    draw_run(plot, tuned, label="--init_from", color="#c0392b")
    plot.set(xlabel="updates", ylabel="validation bpc", ylim=(1.9, 4))
    plot.grid(alpha=0.3)
    plot.legend()
    figure.savefig(path)


def draw_run(plot: Axes, workdir: Path, *, label: str, color: str) -> None:
    """Draws the validation losses of a run, in bits per character."""
    steps = []
    bpc = []
    for record in read_metrics(workdir):
        if record["kind"] == "valid":
            steps.append(record["step"])
            bpc.append(record["loss"] / math.log(2))
    plot.plot(steps, bpc, label=label, color=color, marker=".")


if __name__ == "__main__":
    main()
