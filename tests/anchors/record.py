"""Records anchors: numbers that a change of the code must not change, where others would pass every
other test.

    python -m pytest tests/anchors                                  # compares
    PYTHONPATH=.:tests python -m anchors.record --write [NAME ...]  # replaces NAME.json, or all

What is recorded: some elements and the sums of initial parameters; losses and gradient norms of the
first updates, in which masks of dropout show; and the tokens of every kind of draw. Each case has a
twin without dropout, for changes that draw other masks and nothing else. Runs go through the public
names of `txl_jax` and its files, so that modules can be moved. Write the files again only for a
change that is meant to change numbers, and say so in the commit. The orders in which texts are read
are in tests/data/test_segments.py; meshes and ensembles are compared with the runs of one device
and of one member.

Random bits are the same on every processor with float32. With float64 enabled JAX draws others, so
those runs have losses of their own.
"""

import dataclasses
import functools
import json
import re
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
# Those of runs that are stopped before they compile an evaluation, and of the others.
UPDATES, STEPS = 3, 4
# Relative tolerances by the kind of number. Other processors and versions of XLA round float32 sums
# differently. Another mask, another initial weight or a lost cast changes these losses by 1e-3 and
# more.
FLOAT32, FLOAT64, BFLOAT16, INITIAL = 1e-4, 1e-9, 1e-3, 1e-6


def _of(group: str, **values: Any) -> dict[str, Any]:
    return {f"{group}.{name}": value for name, value in values.items()}


BASE: dict[str, Any] = {
    **_of("model", n_layer=2, d_model=12, n_head=3, d_head=5, d_inner=14),
    # Large, so that each path leaves a mark on the loss.
    **_of("model", init_std=0.3, projection_init_std=0.3),
    **_of(
        "model.dropout", rate=0.2, attention=0.15, input=0.1, output=0.25, qkv=0.1, embedding=0.1
    ),
    "data.corpus": "text",
    "data.tokenizer.kind": "char",
    # The first update has a rate of 0 and leaves the initial parameters.
    **_of("optimizer", learning_rate=0.02, warmup_steps=1),
    **_of("train", steps=STEPS, batch_size=6, segment_len=7, mem_len=9),
    **_of("train", log_every=1, eval_every=STEPS, checkpoint_every=STEPS),
    **_of("eval", batch_size=2, segment_len=8, mem_len=10, clamp_len=None, same_length=False),
}
WORDS = {"data.tokenizer.kind": "word"}
ADAPTIVE = {**WORDS, "model.cutoffs": (5, 11), "model.div_val": 2}
# One run for each encoding, network and kind of softmax; the other settings that draw or round are
# spread over them.
RUNS: dict[str, dict[str, Any]] = {
    "relative": {},
    "pre_norm": {"model.layer_norm": "pre", "model.untie_r": True},
    # Dropping the word after a reset leaves zeros. The gradients of their norms, in millions, would
    # hide all others.
    "shaw": {
        "model.encoding": "shaw",
        "data.reset_at": "\n",
        "model.dropout.embedding": 0.0,
    },
    # A dropout with a rate of 0 is counted too: without it those behind it would draw other masks.
    "vaswani": {
        "model.dropout.attention": 0.0,
        **_of("model", encoding="vaswani", tie_weight=False, d_embed=8),
    },
    "al_rfou": {
        "model.encoding": "al_rfou",
        "train.mem_len": 0,
        "train.loss": "half",
        "eval.mem_len": 0,
    },
    "lstm": {"model.network": "lstm", "model.dropout.attention": 0.0, "model.dropout.qkv": 0.0},
    "qrnn": {"model.network": "qrnn", "model.dropout.attention": 0.0, "model.dropout.qkv": 0.0},
    "adaptive": {**ADAPTIVE, "model.tie_projs": (False, True, True), "data.order": "sentences"},
    "adaptive_one_width": {
        **WORDS,
        "model.cutoffs": (5, 11),
        "model.d_embed": 8,
        "model.dropout.locked": True,
    },
    "accumulated": {
        "train.grad_accum_steps": 3,
        "data.roll": "stream",
        "model.tie_positions": True,
    },
    "averaged": {
        **ADAPTIVE,
        **_of("optimizer", name="adamw", weight_decay=0.1),
        **_of("average", start_step=1, ema_decay=0.7),
        **_of("regularization", activation_l2=0.5, temporal_l2=0.5),
        **_of("train", clamp_len=6, same_length=True),
        "data.roll": "rows",
    },
    "bfloat16": {**ADAPTIVE, "model.dtype": "bfloat16"},
}
FLOAT64_RUNS = ("accumulated", "adaptive")
# Each case has a twin without dropout, in NAME_no_dropout.json, whose numbers stay the same when
# masks are drawn differently.
TWIN = "_no_dropout"
WITHOUT_DROPOUT = _of(
    "model.dropout", rate=0.0, attention=0.0, input=0.0, output=0.0, qkv=0.0, embedding=0.0
)


def text() -> bytes:
    """Returns 4,000 bytes of lines of words, drawn by a generator that no version of a library
    changes.
    """
    words, state = (
        re.findall(r"\w+", "the a cat dog sat saw ran mat and on to it was big red old new far"),
        1,
    )

    def draw(count: int) -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % (1 << 31)
        return (state >> 16) % count

    lines = (
        " ".join(words[min(draw(18), draw(18))] for _ in range(4 + draw(9))) for _ in range(200)
    )
    return "\n".join(lines).encode()[:4000]


def config(folder: Path, changes: dict[str, Any]) -> txl_jax.ExperimentConfig:
    file = folder / "text.txt"
    file.write_bytes(text())
    return tiny.changed(txl_jax.ExperimentConfig(), **BASE | {"data.file": str(file)} | changes)


def summary(tree: Any) -> dict[str, Any]:
    """Returns shape, sums and three elements of each array of a tree, by its path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        flat = np.asarray(leaf, np.float64).ravel()
        found[jax.tree_util.keystr(path)] = {
            "shape": list(np.shape(leaf)),
            "sums": [float(flat.sum()), float(np.abs(flat).sum())],
            "elements": flat[[0, len(flat) // 3, -1]].tolist(),
        }
    return found


def curves(workdir: Path) -> dict[str, Any]:
    """Returns the losses and gradient norms of metrics.jsonl, by kind."""
    found: dict[str, Any] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in ("loss", "grad_norm"):
            if key in record:
                found.setdefault(f"{record['kind']} {key}", []).append(float(record[key]))
    return found


def run(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns the initial parameters, which the first update leaves as they are, and
    the curves.
    """
    initial: dict[str, Any] = {}

    def look(context: Any) -> None:
        if context.step == 1:
            initial.update(summary(context.state.params))

    narrow = changes.get("model.dtype") == "bfloat16"  # Evaluation is compiled for bfloat16 alone.
    found = train(folder, changes, txl_jax.Hook(1, look), *(() if narrow else (STOP,)))
    if narrow:  # Later norms differ by 1 % between versions of XLA, the losses by less than 0.1 %.
        found["train grad_norm"] = found["train grad_norm"][:1]
    return {"initial": initial, "curves": found}


STOP = txl_jax.Hook(UPDATES, lambda context: context.request_stop())


def train(folder: Path, changes: dict[str, Any], *hooks: txl_jax.Hook) -> dict[str, Any]:
    txl_jax.train(
        config(folder, changes), folder / "run", cache_dir=str(folder / "cache"), hooks=hooks
    )
    return curves(folder / "run")


def run_float64(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    with tiny.enable_x64(True):
        return run(folder, {**changes, "model.dtype": "float64"})


# Of models that write: logits as far apart as those of a trained one, and as different after
# different prompts.
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
    """Returns the texts that a model writes: of several prompts, by these kinds of draw."""
    found: dict[str, Any] = {"curves": train(folder, WRITER | changes, STOP)}
    model = txl_jax.load(folder / "run")
    found |= _texts(model, kinds)
    if "--write" in sys.argv:
        noise = np.random.default_rng(0)

        def move(leaf):
            return leaf * (1 + 1e-5 * noise.normal(size=leaf.shape)).astype(leaf.dtype)

        near = dataclasses.replace(model, params=jax.tree.map(move, jax.device_get(model.params)))
        same = found.items() >= _texts(near, kinds).items()
        assert same, "a near-tie, which rounding may decide; take another prompt or seed"
    return found


def _texts(model: txl_jax.LanguageModel, kinds: tuple[str, ...]) -> dict[str, list[str]]:
    settings = {name: txl_jax.GenerateConfig(length=24, seed=3, **LIMITS[name]) for name in kinds}
    return {name: model.generate(PROMPTS, each, seeds=(3, 4, 5)) for name, each in settings.items()}


def _cases() -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Returns what measures each case, by its name: those with dropout, then their twins."""
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


def tolerance(name: str) -> float:
    """Returns the relative tolerance of the losses, norms and texts of a case."""
    name = name.removesuffix(TWIN)
    if name.endswith("float64"):
        return FLOAT64
    if name == "bfloat16":
        return BFLOAT16
    return FLOAT32


def differences(found: Any, expected: Any, relative: float, path: str = "") -> Iterator[str]:
    """Yields where two trees differ: lists of floats by more than this part of their largest, all
    else at all.
    """
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for key in expected:
            bound = INITIAL if key == "initial" else relative
            yield from differences(found[key], expected[key], bound, f"{path} {key}".strip())
    elif isinstance(expected, list) and expected and isinstance(expected[0], float):
        bound = relative * max(map(abs, expected))
        if len(found) != len(expected) or not all(
            abs(a - b) <= bound for a, b in zip(found, expected, strict=True)
        ):
            yield f"{path}: {found} instead of {expected}"
    elif found != expected:
        yield f"{path}: {found} instead of {expected}"


def main(option: str, *words: str) -> None:
    """Writes the files of the cases that are named, or of all."""
    assert option == "--write", __doc__
    for name in words or CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = CASES[name](Path(folder))
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
