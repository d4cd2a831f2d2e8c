"""Records anchors: numbers that a change of the code must not change.

Code that gives other numbers could pass all other tests.

    python -m pytest tests/anchors                                  # compares
    PYTHONPATH=.:tests python -m anchors.record --write [NAME ...]  # replaces NAME.json, or all

The files record:

- some elements and the sums of initial parameters,
- losses and gradient norms of the first training steps, which depend on the masks of dropout,
- and the tokens of every kind of sampling.

Each case has a twin without dropout, for changes that only draw other masks. Runs use the public
names and the files of `txl_jax`, so that modules can be moved. Write the files again only for a
change that is meant to change numbers, and say so in the commit. tests/data/test_segments.py has
the orders in which texts are read. Meshes and ensembles are compared with runs on one device and
without members.

Random bits are the same on every processor with float32. With float64 enabled JAX draws others, so
those runs have losses of their own.
"""

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import txl_jax
from support import tiny

FOLDER = Path(__file__).parent
# Training steps after which runs are stopped, before they would compile an evaluation. Only the run
# in bfloat16 goes to the end, with all steps.
UPDATES = 3
STEPS = 4
# Relative tolerances by the kind of number, and for initial parameters. Other processors and
# versions of XLA round float32 sums differently. Another mask, another initial weight or a lost
# cast changes these losses by 1e-3 and more.
FLOAT32 = 1e-4
FLOAT64 = 1e-9
BFLOAT16 = 1e-3
# From version 0.11 of JAX on, XLA rounds bfloat16 at other places than when the numbers were
# recorded. With 0.12.0.1, the first norm differs by 1.3e-3, and losses of the evaluations by up to
# 1.0e-3. Losses of training differ by at most 3.4e-4, so they keep the narrow bound. Only they
# notice a run in float32 without dropout, by 1.3e-3.
BFLOAT16_OF_LATER_VERSIONS = 2e-3
INITIAL = 1e-6

MODEL: dict[str, Any] = {
    "model.n_layer": 2,
    "model.d_model": 12,
    "model.n_head": 3,
    "model.d_head": 5,
    "model.d_inner": 14,
    # Large, so that each path leaves a mark on the loss.
    "model.init_std": 0.3,
    "model.projection_init_std": 0.3,
}
DROPOUT: dict[str, Any] = {
    "model.dropout.rate": 0.2,
    "model.dropout.attention": 0.15,
    "model.dropout.input": 0.1,
    "model.dropout.output": 0.25,
    "model.dropout.qkv": 0.1,
    "model.dropout.embedding": 0.1,
}
TRAINING: dict[str, Any] = {
    "data.corpus": "text",
    "data.tokenizer.kind": "char",
    "optimizer.learning_rate": 0.02,
    # The first training step has a learning rate of 0 and leaves the initial parameters, so that
    # they can be read after it.
    "optimizer.warmup_steps": 1,
    "train.steps": STEPS,
    "train.batch_size": 6,
    "train.segment_len": 7,
    "train.mem_len": 9,
    "train.log_every": 1,
    "train.eval_every": STEPS,
    "train.checkpoint_every": STEPS,
}
EVALUATION: dict[str, Any] = {
    "eval.batch_size": 2,
    "eval.segment_len": 8,
    "eval.mem_len": 10,
    "eval.clamp_len": None,
    "eval.same_length": False,
}
BASE = MODEL | DROPOUT | TRAINING | EVALUATION

# The settings of one run for each encoding, network and kind of softmax. The other settings that
# draw or round are spread over them.
WORDS: dict[str, Any] = {"data.tokenizer.kind": "word"}
ADAPTIVE: dict[str, Any] = {**WORDS, "model.cutoffs": (5, 11), "model.div_val": 2}
PRE_NORM: dict[str, Any] = {"model.layer_norm": "pre", "model.untie_r": True}
# Dropping the word after a reset leaves zeros. The gradients of their norms, in millions, would
# hide all others.
SHAW: dict[str, Any] = {
    "model.encoding": "shaw",
    "data.reset_at": "\n",
    "model.dropout.embedding": 0.0,
}
# A dropout with a rate of 0 is counted too: without it the dropouts after it would draw other
# masks.
VASWANI: dict[str, Any] = {
    "model.dropout.attention": 0.0,
    "model.encoding": "vaswani",
    "model.tie_weight": False,
    "model.d_embed": 8,
}
AL_RFOU: dict[str, Any] = {
    "model.encoding": "al_rfou",
    "train.mem_len": 0,
    "train.loss": "half",
    "eval.mem_len": 0,
}
# Recurrent networks do not use attention settings.
RECURRENT: dict[str, Any] = {"model.dropout.attention": 0.0, "model.dropout.qkv": 0.0}
ADAPTIVE_ONE_WIDTH: dict[str, Any] = {
    **WORDS,
    "model.cutoffs": (5, 11),
    "model.d_embed": 8,
    "model.dropout.locked": True,
}
ACCUMULATED: dict[str, Any] = {
    "train.grad_accum_steps": 3,
    "data.roll": "stream",
    "model.tie_positions": True,
}
AVERAGED: dict[str, Any] = {
    **ADAPTIVE,
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.1,
    "average.start_step": 1,
    "average.ema_decay": 0.7,
    "regularization.activation_l2": 0.5,
    "regularization.temporal_l2": 0.5,
    "train.clamp_len": 6,
    "train.same_length": True,
    "data.roll": "rows",
}
RUNS: dict[str, dict[str, Any]] = {
    "relative": {},
    "pre_norm": PRE_NORM,
    "shaw": SHAW,
    "vaswani": VASWANI,
    "al_rfou": AL_RFOU,
    "lstm": RECURRENT | {"model.network": "lstm"},
    "qrnn": RECURRENT | {"model.network": "qrnn"},
    "adaptive": ADAPTIVE | {"model.tie_projs": (False, True, True), "data.order": "sentences"},
    "adaptive_one_width": ADAPTIVE_ONE_WIDTH,
    "accumulated": ACCUMULATED,
    "averaged": AVERAGED,
    "bfloat16": ADAPTIVE | {"model.dtype": "bfloat16"},
}
FLOAT64_RUNS = ("accumulated", "adaptive")
# Each case has a twin without dropout, in NAME_no_dropout.json, whose numbers stay the same when
# masks are drawn differently.
TWIN = "_no_dropout"
WITHOUT_DROPOUT: dict[str, Any] = dict.fromkeys(DROPOUT, 0.0)


LEXICON = ("the", "a", "cat", "dog", "sat", "saw", "ran", "mat", "and")
LEXICON += ("on", "to", "it", "was", "big", "red", "old", "new", "far")


def text() -> bytes:
    """Returns 4,000 bytes of lines of words, drawn by a generator that no version of a library
    changes.
    """
    state = 1

    def draw(count: int) -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % (1 << 31)
        return (state >> 16) % count

    def draw_line() -> str:
        # The smaller of two numbers, so that the first words are frequent.
        return " ".join(LEXICON[min(draw(18), draw(18))] for _ in range(4 + draw(9)))

    lines = [draw_line() for _ in range(200)]
    return "\n".join(lines).encode()[:4000]


def config(folder: Path, changes: dict[str, Any]) -> txl_jax.ExperimentConfig:
    file = folder / "text.txt"
    file.write_bytes(text())
    settings = BASE | {"data.file": str(file)} | changes
    return tiny.changed(txl_jax.ExperimentConfig(), **settings)


def summary(tree: Any) -> dict[str, Any]:
    """Returns shape, sums and three elements of each array of a tree, by its path."""
    by_path = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        flat = np.asarray(leaf, np.float64).ravel()
        by_path[jax.tree_util.keystr(path)] = {
            "shape": list(np.shape(leaf)),
            "sums": [float(flat.sum()), float(np.abs(flat).sum())],
            "elements": flat[[0, len(flat) // 3, -1]].tolist(),
        }
    return by_path


def read_curves(workdir: Path) -> dict[str, Any]:
    """Returns the losses and gradient norms of metrics.jsonl, by kind."""
    by_kind: dict[str, Any] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in ("loss", "grad_norm"):
            if key in record:
                by_kind.setdefault(f"{record['kind']} {key}", []).append(float(record[key]))
    return by_kind


def run(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns the curves and the initial parameters.

    The first training step leaves the parameters as they are.
    """
    initial: dict[str, Any] = {}

    def look(context: Any) -> None:
        if context.step == 1:
            initial.update(summary(context.state.params))

    if changes.get("model.dtype") != "bfloat16":
        curves = train(folder, changes, txl_jax.Hook(1, look), STOP)
        return {"initial": initial, "curves": curves}

    # Only here, the run goes to its end, so that evaluation is recorded too.
    curves = train(folder, changes, txl_jax.Hook(1, look))
    # Later norms differ by 1 % between versions of XLA, the losses by less than 0.1 %.
    curves["train grad_norm"] = curves["train grad_norm"][:1]
    return {"initial": initial, "curves": curves}


STOP = txl_jax.Hook(UPDATES, lambda context: context.request_stop())


def train(folder: Path, changes: dict[str, Any], *hooks: txl_jax.Hook) -> dict[str, Any]:
    cache_dir = str(folder / "cache")
    txl_jax.train(config(folder, changes), folder / "run", cache_dir=cache_dir, hooks=hooks)
    return read_curves(folder / "run")


def run_float64(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    with tiny.enable_x64(True):
        return run(folder, {**changes, "model.dtype": "float64"})


# Changes for models that generate: their logits are as far apart as a trained model's, and as
# different after different prompts. They hardly train.
WRITER = {"model.init_std": 0.8, "optimizer.learning_rate": 1e-6}
LIMITS = {
    "plain": {"top_k": None},
    "top_k": {"top_k": 5, "temperature": 1.3},
    "top_p": {"top_k": None, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
}
PROMPTS = ("the cat sat on the big red mat", "a dog", "it was far and it was")


def drawn(
    folder: Path, changes: dict[str, Any], kinds: tuple[str, ...] = tuple(LIMITS)
) -> dict[str, Any]:
    """Returns the curves, and the texts that the model writes after the prompts by these draws."""
    curves = train(folder, WRITER | changes, STOP)
    model = txl_jax.load(folder / "run")
    texts = _texts(model, kinds)
    # Only texts that rounding cannot change are worth recording.
    if "--write" in sys.argv:
        message = "a near-tie, which rounding may decide: choose another prompt or seed"
        assert _texts(_almost_equal(model), kinds) == texts, message
    return {"curves": curves, **texts}


def _texts(model: txl_jax.LanguageModel, kinds: tuple[str, ...]) -> dict[str, list[str]]:
    texts = {}
    for name in kinds:
        settings = txl_jax.GenerateConfig(length=24, seed=3, **LIMITS[name])
        texts[name] = model.generate(PROMPTS, settings, seeds=(3, 4, 5))
    return texts


def _almost_equal(model: txl_jax.LanguageModel) -> txl_jax.LanguageModel:
    """Returns the model with noise on its parameters, larger than rounding."""
    noise = np.random.default_rng(0)

    def move(leaf):
        return leaf * (1 + 1e-5 * noise.normal(size=leaf.shape)).astype(leaf.dtype)

    return dataclasses.replace(model, params=jax.tree.map(move, jax.device_get(model.params)))


def _cases() -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Returns the function that measures each case, by its name: with dropout, then their twins."""
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for ending, dropout in (("", {}), (TWIN, WITHOUT_DROPOUT)):
        for name, changes in RUNS.items():
            cases[name + ending] = functools.partial(run, changes=changes | dropout)
        for name in FLOAT64_RUNS:
            changes = RUNS[name] | dropout
            cases[f"{name}_float64{ending}"] = functools.partial(run_float64, changes=changes)
        cases[f"drawn{ending}"] = functools.partial(drawn, changes=dropout)
        cases[f"drawn_by_cluster{ending}"] = functools.partial(
            drawn, changes=ADAPTIVE | dropout, kinds=("plain", "top_k")
        )
    return cases


CASES = _cases()


def tolerance(case: str, path: str) -> float:
    """Returns the relative tolerance of some numbers of a case.

    Args:
      case: Name of the case.
      path: Keys of the numbers in its file, such as "curves train loss".
    """
    if path.startswith("initial "):
        return INITIAL
    case = case.removesuffix(TWIN)
    if case.endswith("float64"):
        return FLOAT64
    if case == "bfloat16":
        if jax.__version_info__ >= (0, 11) and path != "curves train loss":
            return BFLOAT16_OF_LATER_VERSIONS
        return BFLOAT16
    return FLOAT32


def differences(found: Any, expected: Any, case: str, path: str = "") -> Iterator[str]:
    """Yields the places where two trees of a case differ.

    Lists of floats may differ by a part of their largest number (`tolerance`). All else must be
    equal.
    """
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for key in expected:
            yield from differences(found[key], expected[key], case, f"{path} {key}".strip())
        return

    if isinstance(expected, list) and expected and isinstance(expected[0], float):
        bound = tolerance(case, path) * max(map(abs, expected))
        are_equal = _are_close(found, expected, bound=bound)
    else:
        are_equal = found == expected
    if not are_equal:
        yield f"{path}: {found} instead of {expected}"


def _are_close(found: list[float], expected: list[float], *, bound: float) -> bool:
    if len(found) != len(expected):
        return False
    # A nan is not close to anything.
    return all(abs(a - b) <= bound for a, b in zip(found, expected, strict=True))


def main(option: str, *words: str) -> None:
    """Writes the files of the cases that are named, or of all."""
    assert option == "--write", __doc__
    for name in words or CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = CASES[name](Path(folder))
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
