"""The files of a run instead of a trained one: settings, records and results that are made up."""

import json
import math
from pathlib import Path

import numpy as np

from support import runs, tiny
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, config_tree
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.runs.run import RESULTS, TextInfo
from txl_jax.runtime.log import METRICS

VOCABULARY = WordVocabulary(("<eos>", "one", "<unk>"))  # Its measure is perplexity.
STEPS = 1000
LOG_EVERY = 20
EVAL_EVERY = 200


def make(folder: Path, *, done: int | None = None, member_settings=(), **settings) -> Path:
    """Writes a run into a directory and returns it.

    Args:
      folder: The directory.
      done: Training steps that are done, or None for all of them, with results.
      member_settings: The settings in which each ensemble member differs from the others.
      **settings: Changed settings, such as `train__steps`.
    """
    defaults = ExperimentConfig(data=DataConfig(corpus=CorpusName.PTB))
    changes = {"train__steps": STEPS, "train__eval_every": EVAL_EVERY} | settings
    config = tiny.changed(defaults, **changes)
    text = TextInfo("ptb", "Penn Treebank, 3 files", "d" * 64, VOCABULARY, data_dir="/data")
    run = runs.record(folder, config, text, member_settings)

    last_step = STEPS if done is None else done
    lines = []
    scores = {}
    for number, member in enumerate(list(run.member_names) or [None]):
        records = list(_records(config.seed + 17 * number, last_step, member))
        lines += [json.dumps(record) + "\n" for record in records]
        if done is None:
            scores[member] = _scores(records)
    (folder / METRICS).write_text("".join(lines))

    if done is None:
        results = {"steps": STEPS, "eval": config_tree.to_dict(config.eval)}
        if member_settings:
            results["members"] = scores
        else:
            results |= scores[None]
        (folder / RESULTS).write_text(json.dumps(results))
    return folder


def _records(seed, last_step, member):
    """Yields the records of one ensemble member, or of a run without members."""
    rng = np.random.default_rng(seed)
    name = {"member": member} if member else {}
    for step in range(LOG_EVERY, last_step + 1, LOG_EVERY):
        record = {"kind": "train", "step": step, **name, **_measures(rng)}
        record["tokens_per_second"] = 9e3 + 100 * rng.random()
        yield record
        if step % EVAL_EVERY == 0:
            yield {"kind": "valid", "step": step, **name, **_measures(rng)}


def _measures(rng):
    loss = 5 + rng.random()
    return {"loss": loss, "bpc": loss / math.log(2), "perplexity": math.exp(loss)}


def _scores(records):
    """The best validation record, and the last record as the test scores."""
    validations = [record for record in records if record["kind"] == "valid"]
    best = min(validations, key=lambda record: record["loss"])
    return {"best_valid": best, "test": records[-1]}
