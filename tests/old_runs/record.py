"""Wrote the runs in this directory, with code from before 0.1.

Its dropout masks are of version 1.

    PYTHONPATH=CLONE_OF_THAT_CODE python record.py DIRECTORY

The runs were recorded in /old_runs, a directory without a meaning, because records name the files
of their texts. `numbers.json` has the numbers that this code computed with them, each in a copy.
"""

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import txl_jax
from txl_jax.config import config_tree

STEPS = 8
# Updates after which the runs are stopped.
STOPPED = 4
DROPOUT = {f"model.dropout.{name}": 0.2 for name in ("rate", "attention", "embedding")}
# Settings of each run, and the updates after which it is stopped.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "without_dropout": ({"model.dropout.rate": 0.0}, STOPPED),
    "with_dropout": (DROPOUT, STOPPED),
    "finished": (DROPOUT, STEPS),
}
MODEL: dict[str, Any] = {
    "model.n_layer": 1,
    "model.d_model": 8,
    "model.n_head": 2,
    "model.d_head": 4,
    "model.d_inner": 8,
    # Large, so that texts differ from prompt to prompt.
    "model.init_std": 1.0,
    "model.projection_init_std": 1.0,
}
TRAINING: dict[str, Any] = {
    "optimizer.learning_rate": 0.01,
    # Large, so that updates do not enlarge rounding where a gradient is almost 0.
    "optimizer.adam_eps": 1e-3,
    "data.corpus": "text",
    "data.tokenizer.kind": "char",
    "train.steps": STEPS,
    "train.batch_size": 2,
    "train.segment_len": 6,
    "train.mem_len": 5,
    "train.segments_per_call": 1,
    "train.log_every": 1,
    "train.eval_every": STOPPED,
    "train.checkpoint_every": STOPPED,
    "train.keep_checkpoints": 1,
}
EVALUATION: dict[str, Any] = {
    "eval.batch_size": 1,
    "eval.segment_len": 6,
    "eval.mem_len": 7,
    "eval.clamp_len": None,
    "eval.same_length": False,
}
SETTINGS = MODEL | TRAINING | EVALUATION
DOCUMENTS = ("abba cab", "bad dada", "dab ")
PROMPTS = ("abba ", "ca")
# Characters of a text.
LENGTH = 16
DRAWS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.3, "top_k": None}}


def write_text(folder: Path) -> Path:
    """Writes 1,200 characters of six, and returns the path."""
    letters = random.Random(0).choices("abcd \n", weights=(6, 4, 3, 2, 3, 2), k=1200)
    path = folder / "text.txt"
    path.write_text("".join(letters))
    return path


def config_of(text: Path, **changes: Any) -> txl_jax.ExperimentConfig:
    settings = SETTINGS | {"data.file": str(text)} | changes
    return config_tree.replace(txl_jax.ExperimentConfig(), settings)


def curves(run: Path) -> dict[str, list[float]]:
    """Returns the losses and gradient norms of a run, by kind."""
    values: dict[str, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in ("loss", "grad_norm"):
            if key in record:
                values.setdefault(f"{record['kind']} {key}", []).append(record[key])
    return values


def used(run: Path) -> dict[str, Any]:
    """Returns losses of documents, and generated texts, of a trained run."""
    model = txl_jax.load(run)
    texts = {}
    for name, limits in DRAWS.items():
        settings = txl_jax.GenerateConfig(length=LENGTH, **limits)
        texts[name] = model.generate(PROMPTS, settings, seeds=(3, 4))
    nats = [score.nats for score in model.score(DOCUMENTS)]
    return {"step": model.step, "texts": texts, "documents": nats}


def evaluation(run: Path, text: Path, cache: Path) -> dict[str, float]:
    """Returns the losses of both splits, as the command computes them."""
    folders = [f"--workdir={run}", f"--data.file={text}", f"--cache_dir={cache}"]
    command = [sys.executable, "-m", "experiments.text", "--mode=eval", *folders]
    subprocess.run(command, check=True)
    scores = json.loads((run / "evaluation.json").read_text())
    return {split: scores[split]["loss"] for split in ("valid", "test")}


def main(folder: Path) -> None:
    text = write_text(folder)
    numbers: dict[str, Any] = {}
    for name, (changes, stop) in RUNS.items():
        config = config_of(text, **changes)
        run = folder / name
        hooks = []
        if stop < STEPS:
            hooks.append(txl_jax.Hook(stop, lambda context: context.request_stop()))
        txl_jax.train(config, run, cache_dir=str(folder / "prepared"), hooks=hooks)

        copy = folder / f"copy of {name}"
        shutil.copytree(run, copy)
        numbers[name] = used(copy)
        numbers[name]["evaluation"] = evaluation(copy, text, folder / "prepared")
        # The same command resumes it.
        outcome = txl_jax.train(config, copy, cache_dir=str(folder / "prepared"))
        results = {split: outcome.results[split]["loss"] for split in ("best_valid", "test")}
        numbers[name] |= {"curves": curves(copy), "results": results}

        # A new run begins with the weights.
        begun = folder / f"from {name}"
        from_weights = dataclasses.replace(
            config_of(text, **{"model.dropout.rate": 0.0, "train.steps": STOPPED}),
            init_from=str(run),
        )
        txl_jax.train(from_weights, begun, cache_dir=str(folder / "prepared"))
        record = json.loads((begun / "config.json").read_text())
        numbers[name]["begun"] = {
            "sha256": record["warm_start"]["sha256"],
            "curves": curves(begun),
        }
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
