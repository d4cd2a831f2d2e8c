"""Draws docs/dynamic.png: bits per byte along a text, of a model that learns from it and of others.

    python -m experiments.quickstart --workdir=runs/quickstart
    python -m experiments.tune_dynamic --workdir=runs/quickstart --eval.batch_size=1
    python docs/figures/dynamic.py runs/quickstart  # Measures in a quarter of an hour, and draws.
    python docs/figures/dynamic.py                  # Draws docs/figures/dynamic.csv again.

The settings are the tuned ones, with one row. The figure has the mean from the beginning of the
test split to each place. Needs matplotlib (`plots`).
"""

import csv
import dataclasses
import lzma
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax import plots
from txl_jax.config import DynamicConfig, EvalConfig, config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.run import Run
from txl_jax.runs.score import score
from txl_jax.runs.trained import TrainedModel, load_to_score
from txl_jax.runtime.storage import read_json

FOLDER = Path(__file__).parent
TABLE = FOLDER / "dynamic.csv"
PICTURE = FOLDER.parent / "dynamic.png"
STEP = 10_000  # Bytes between two places of the models' lines.
COMPRESSOR_STEP = 50_000
PLACE = "bytes"
MEMORY = "with memory"
NO_MEMORY = "without memory"
LEARNING = "learning"
LZMA = "lzma -9"
LZMA_TRAINED = "lzma -9 after the training text"
# Colors by Okabe and Ito, which people with any color vision can tell apart, and dashes besides.
STYLES: dict[str, dict[str, Any]] = {
    NO_MEMORY: {"color": "#999999"},
    MEMORY: {"color": "#0072b2"},
    LZMA: {"color": "#e69f00", "linestyle": "--"},
    LZMA_TRAINED: {"color": "#cc79a7", "linestyle": "--"},
    LEARNING: {"color": "#d55e00", "linewidth": 2.2},
}


def measure(workdir: str) -> list[dict[str, Any]]:
    """Scores and compresses the test split of a run. Returns a row for each place in the text."""
    run = Run.read(workdir)
    tuned = read_json(os.path.join(run.path, "tune_dynamic.json"))["tuned"]
    learning_eval = config_tree.from_dict(EvalConfig, tuned["eval"])
    learning_config = dataclasses.replace(run.config, eval=learning_eval)
    config = config_tree.replace(learning_config, {"eval.dynamic": DynamicConfig()})
    corpus = read_corpus(
        config.data,
        "",
        run.text.cache_dir,
        vocabulary=run.text.vocabulary,
    )
    static, _, params = load_to_score(config, corpus, run, log=print)

    without = config_tree.replace(config, {"eval.mem_len": 0, "eval.same_length": False})
    built_without, _, _ = load_to_score(without, corpus, run, log=print)
    learner = learning_model(
        TrainedModel.of(run, learning_config), params, corpus=corpus, folder=run.outputs
    )

    tokens = np.asarray(corpus.test)
    nats = {name: np.zeros(len(tokens), np.float32) for name in (NO_MEMORY, MEMORY, LEARNING)}
    for name, built in ((NO_MEMORY, built_without), (MEMORY, static)):
        score(built, params, tokens, name=name, log=print, token_nats=nats[name])
    learner.score(tokens, name=LEARNING, log=print, token_nats=nats[LEARNING])

    text = corpus.vocabulary.decode(corpus.test)
    training_text = corpus.vocabulary.decode(corpus.train)
    n_trained = len(lzma.compress(training_text, preset=9))
    rows: list[dict[str, Any]] = []
    for place in [*range(STEP, len(text), STEP), len(text)]:
        row: dict[str, Any] = {PLACE: place}
        for name, losses in nats.items():
            # The first byte is not scored.
            row[name] = losses[1:place].mean(dtype=np.float64) / math.log(2)
        if place % COMPRESSOR_STEP == 0 or place == len(text):
            start = text[:place]
            row[LZMA] = 8 * len(lzma.compress(start, preset=9)) / place
            n_both = len(lzma.compress(training_text + start, preset=9))
            row[LZMA_TRAINED] = 8 * (n_both - n_trained) / place
        rows.append(row)
    return rows


def write_table(rows: list[dict[str, Any]]) -> None:
    """Writes the rows as CSV, with four decimals."""
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, [PLACE, *STYLES], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = {name: f"{value:.4f}" for name, value in row.items() if name != PLACE}
            writer.writerow({PLACE: row[PLACE], **cells})


def draw() -> None:
    """Draws the table."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    drawing = plots.figure(4.2, width=7.2)
    plot = drawing.subplots()
    last_place = int(rows[-1][PLACE]) / 1000
    ends: list[float] = []
    for name, style in STYLES.items():
        of_line = [row for row in rows if row[name]]
        places = [int(row[PLACE]) / 1000 for row in of_line]
        bits = [float(row[name]) for row in of_line]
        plot.plot(places, bits, **{"linewidth": 1.6, **style})
        ends.append(bits[-1])

    # Each line has its name and its last value at its end, as far apart as they can be read.
    lowest, highest = plot.get_ylim()
    heights = plots.spread(ends, (highest - lowest) / 18)
    for name, end, height in zip(STYLES, ends, heights, strict=True):
        plot.annotate(
            f" {name} {end:.2f}",
            (last_place, height),
            color=STYLES[name]["color"],
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    plot.set(
        xlabel="thousand bytes of the test split, from its beginning",
        ylabel="bits per byte up to here",
        xlim=(0, last_place),
    )
    plot.grid(alpha=0.25)
    plot.spines[["top", "right"]].set_visible(False)
    plots.save(drawing, PICTURE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_table(measure(sys.argv[1]))
    draw()
