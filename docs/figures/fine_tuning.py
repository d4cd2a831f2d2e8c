"""Draws validation losses of two runs, from random weights and from a warm start, against updates.

python docs/figures/fine_tuning.py runs/random runs/tuned docs/fine-tuning.png
"""

import math
import sys
from pathlib import Path

from matplotlib.figure import Figure

from txl_jax.runtime.log import read_metrics


def main() -> None:
    """Draws the curves of two workdirs into a file."""
    random, tuned, path = map(Path, sys.argv[1:])
    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    plot = figure.add_subplot()
    for folder, label, color in (
        (random, "random weights", "#9aa7b8"),
        (tuned, "--init_from", "#c0392b"),
    ):
        records = [record for record in read_metrics(folder) if record["kind"] == "valid"]
        steps = [record["step"] for record in records]
        plot.plot(
            steps,
            [record["loss"] / math.log(2) for record in records],
            label=label,
            color=color,
            marker=".",
        )
    plot.set(xlabel="updates", ylabel="validation bpc", ylim=(1.9, 4))
    plot.grid(alpha=0.3)
    plot.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
