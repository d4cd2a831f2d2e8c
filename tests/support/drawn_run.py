"""Runs in place of trained ones: workdirs with parameters that were drawn, in a second instead of a
minute.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from support import runs, tiny, tiny_run
from txl_jax.config import CorpusName, EvalConfig, ExperimentConfig, Tokenizer
from txl_jax.data.corpus import Corpus, read_corpus
from txl_jax.runs.build import Built, build_for
from txl_jax.runs.run import Run
from txl_jax.runtime.checkpoint import Checkpointer

STEP = 7
SENTENCE = (
    b"the cat sat on a mat and saw the dog run . it ran to the cat , which ran away from it too"
)
TEXT = b"\n".join(b" ".join(SENTENCE.split()[k % 7 : k % 7 + 5 + k % 11]) for k in range(300))
# wt103_large's structure, scaled down: three tails of width d_embed / 4**c, all projections but the
# head's shared.
WT103 = {"model.cutoffs": (5, 8, 14), "model.div_val": 4, "model.d_embed": 64, "model.d_model": 64}
WT103 |= {"model.tie_projs": (False, True, True, True), "model.compat.final_norm": False}


def make(folder, config: ExperimentConfig, corpus: Corpus) -> tuple[Run, Built]:
    """The workdir, and the parts of its model; `tiny_run.params` are its parameters."""
    parts = build_for(config, corpus.vocabulary)
    workdir = runs.record(folder, config, corpus)
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(STEP, {"params": jax.device_put(tiny_run.params(parts.model))}, {})
        best.wait()
    return workdir, parts


def on_text(folder: Path, content: bytes, **changes: Any) -> tuple[ExperimentConfig, Corpus]:
    """Returns the config of a tiny run on a text, with some settings changed, and the text."""
    (folder / "text").write_bytes(content)
    own = {"data__corpus": CorpusName.TEXT, "data__file": str(folder / "text")}
    config = tiny.changed(tiny_run.CONFIG, **own | changes)
    return config, read_corpus(config.data, "nowhere", str(folder))


def of_words(folder: Path, *, tokenizer=Tokenizer.WORD, **changes: Any) -> Run:
    """Returns a workdir on `TEXT`, which lies beside it; settings are changed as by `on_text`."""
    beside = folder.with_name(f"{folder.name}-text")
    beside.mkdir()
    own = {
        "eval": EvalConfig(segment_len=5, mem_len=9, clamp_len=6),
        "data.tokenizer.kind": tokenizer,
    }
    return make(folder, *on_text(beside, TEXT, **own, **changes))[0]


def letters() -> bytes:
    """Returns a text of seven letters, the same at each call."""
    return np.random.default_rng(0).choice(list(b"the cat"), 1110).astype(np.uint8).tobytes()
