"""Runs instead of trained ones: workdirs with drawn parameters, in a second instead of a minute."""

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


def _lines() -> bytes:
    """Returns 300 lines, each a part of the sentence."""
    words = SENTENCE.split()
    lines = []
    for number in range(300):
        first = number % 7
        last = first + 5 + number % 11
        lines.append(b" ".join(words[first:last]))
    return b"\n".join(lines)


TEXT = _lines()
# wt103_large's structure, scaled down: three tails of size d_embed / 4**c, all projections shared
# except the head's.
WT103 = {
    "model.cutoffs": (5, 8, 14),
    "model.div_val": 4,
    "model.d_embed": 64,
    "model.d_model": 64,
    "model.tie_projs": (False, True, True, True),
    "model.compat.final_norm": False,
}


def make(folder, config: ExperimentConfig, corpus: Corpus) -> tuple[Run, Built]:
    """The workdir, and the parts of its model, whose parameters are `tiny_run.params`."""
    parts = build_for(config, corpus.vocabulary)
    workdir = runs.record(folder, config, corpus)
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(STEP, {"params": jax.device_put(tiny_run.params(parts.model))}, {})
        best.wait()
    return workdir, parts


def on_text(folder: Path, content: bytes, **changes: Any) -> tuple[ExperimentConfig, Corpus]:
    """Returns the config of a tiny run on a text, with some settings changed, and the text."""
    file = folder / "text"
    file.write_bytes(content)
    text = {"data__corpus": CorpusName.TEXT, "data__file": str(file)}
    config = tiny.changed(tiny_run.CONFIG, **text | changes)
    return config, read_corpus(config.data, "nowhere", str(folder))


def of_words(folder: Path, *, tokenizer=Tokenizer.WORD, **changes: Any) -> Run:
    """Returns a workdir on `TEXT`, with settings changed as by `on_text`.

    The text is in the directory next to it whose name ends in "-text".
    """
    text_folder = folder.with_name(f"{folder.name}-text")
    text_folder.mkdir()
    settings = {
        "eval": EvalConfig(segment_len=5, mem_len=9, clamp_len=6),
        "data.tokenizer.kind": tokenizer,
    }
    config, corpus = on_text(text_folder, TEXT, **settings, **changes)
    run, _ = make(folder, config, corpus)
    return run


def letters() -> bytes:
    """Returns a text of seven letters, the same at each call."""
    return np.random.default_rng(0).choice(list(b"the cat"), 1110).astype(np.uint8).tobytes()
