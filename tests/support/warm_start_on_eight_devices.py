"""Begins a run with trained weights on one device and on a mesh of eight; run by tests/runs/test_warm_start.py.

The weights are in a portable folder. Prints, for each, what is recorded, and the sha256 of the parameters after the
transfer to another vocabulary: 13 words in clusters cut at 3 and 7, of a trained run with 11.
"""

import json
import tempfile
from pathlib import Path

from support import drawn_run
from txl_jax.config import EvalConfig, MeshConfig, ModelConfig, Tokenizer, config_tree
from txl_jax.runs import warm_start
from txl_jax.runs.build import build
from txl_jax.runs.convert import convert
from txl_jax.runs.run import Run

WORDS = [f"w{i}" for i in range(9)]
CLUSTERS = {"cutoffs": (3, 7), "div_val": 2, "tie_projs": (False,) * 3}
CHANGES = {
    "model": ModelConfig(n_layer=2, d_model=16, n_head=4, d_head=5, d_inner=24, **CLUSTERS),
    "data__tokenizer__kind": Tokenizer.WORD,
    "train__batch_size": 16,
    "eval": EvalConfig(),
    "mesh": MeshConfig(data=1),
}


def main() -> None:
    """Prints JSON: [of one device, of eight]."""
    folder = Path(tempfile.mkdtemp())
    texts = []
    for name, words in (("old", WORDS), ("new", [*WORDS[::-1], "x", "y"])):
        (folder / name).mkdir()
        content = "\n".join(" ".join(words[i:]) for i in range(len(words))) * 9
        texts.append(drawn_run.on_text(folder / name, content.encode(), **CHANGES))
    old, (config, corpus) = texts
    drawn_run.make(folder / "run", *old)
    convert(folder / "run", folder / "portable", log=lambda line: None)
    found = []
    for mesh in (MeshConfig(data=1), MeshConfig(data=2, fsdp=2, tensor=2)):
        on_mesh = config_tree.replace(config, {"mesh": mesh, "init_from": str(folder / "portable")})
        parts = build(on_mesh, vocab_size=corpus.vocabulary.size)
        weights = warm_start.load(parts, corpus.vocabulary, Run(folder / "new-run"))
        assert weights is not None
        state = weights.state(parts.init_params())
        found.append({**weights.record, "after": warm_start.digest(state.params)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
