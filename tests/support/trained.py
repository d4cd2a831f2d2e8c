"""Trained models in small: workdirs with drawn parameters, of words and of an adaptive softmax."""

import dataclasses

from support import drawn_run, tiny_run
from txl_jax.config import CorpusName, DataConfig, EvalConfig, ExperimentConfig, Tokenizer, TokenizerConfig
from txl_jax.config import settings as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.runs.run import Run

SENTENCE = b"the cat sat on a mat and saw the dog run . it ran to the cat , which ran away from it too"
TEXT = b"\n".join(b" ".join(SENTENCE.split()[k % 7 : k % 7 + 5 + k % 11]) for k in range(300))
# wt103_large's structure, scaled down: three tails of width d_embed / 4**c, all projections but the head's shared.
WT103 = {
    "model.cutoffs": (5, 8, 14),
    "model.div_val": 4,
    "model.d_embed": 64,
    "model.d_model": 64,
    "model.tie_projs": (False, True, True, True),
    "compat.final_norm": False,
}


def make(folder, *, tokenizer=Tokenizer.WORD, **changes) -> Run:
    """Returns a workdir of the tiny run with some settings changed: `model__untie_r` for model.untie_r."""
    text = folder.with_name(f"{folder.name}-text")
    text.write_bytes(TEXT)
    data = DataConfig(corpus=CorpusName.TEXT, file=str(text), tokenizer=TokenizerConfig(kind=tokenizer))
    base = dataclasses.replace(tiny_run.CONFIG, data=data, eval=EvalConfig(segment_len=5, mem_len=9, clamp_len=6))
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    config: ExperimentConfig = config_tree.replace(base, dotted)
    corpus = read_corpus(config.data, data_dir="", cache_dir=str(folder.with_name(f"{folder.name}-cache")))
    workdir, _ = drawn_run.make(folder, config, corpus)
    return workdir
