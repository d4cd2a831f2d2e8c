"""The files of a run in place of a trained one: settings, records and results that are made up."""

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
STEPS, LOG_EVERY, EVAL_EVERY = 1000, 20, 200


def make(folder: Path, *, done: int | None = None, member_settings=(), **settings) -> Path:
    """Writes a run into a folder and returns it.

    `done`: updates done; None: all, with results. `member_settings`: what each member of an
    ensemble differs in.
    """
    defaults = ExperimentConfig(data=DataConfig(corpus=CorpusName.PTB))
    config = tiny.changed(
        defaults, **{"train__steps": STEPS, "train__eval_every": EVAL_EVERY} | settings
    )
    text = TextInfo("ptb", "Penn Treebank, 3 files", "d" * 64, VOCABULARY, data_dir="/data")
    members = list(runs.record(folder, config, text, member_settings).member_names) or [None]
    last = STEPS if done is None else done
    of_members = [
        list(_records(config.seed + 17 * number, last, name)) for number, name in enumerate(members)
    ]
    (folder / METRICS).write_text(
        "".join(json.dumps(record) + "\n" for records in of_members for record in records)
    )
    if done is None:
        scores = dict(zip(members, map(_scores, of_members), strict=True))
        own = {"members": scores} if member_settings else scores[None]
        (folder / RESULTS).write_text(
            json.dumps({"steps": STEPS, "eval": config_tree.to_dict(config.eval)} | own)
        )
    return folder


def _records(seed, last, member):
    rng, own = np.random.default_rng(seed), {"member": member} if member else {}
    for step in range(LOG_EVERY, last + 1, LOG_EVERY):
        yield {
            "kind": "train",
            "step": step,
            **own,
            **_measures(rng),
            "tokens_per_second": 9e3 + 100 * rng.random(),
        }
        if step % EVAL_EVERY == 0:
            yield {"kind": "valid", "step": step, **own, **_measures(rng)}


def _measures(rng):
    loss = 5 + rng.random()
    return {"loss": loss, "bpc": loss / math.log(2), "perplexity": math.exp(loss)}


def _scores(records):
    """The test scores are those of the last update."""
    best = min((each for each in records if each["kind"] == "valid"), key=lambda each: each["loss"])
    return {"best_valid": best, "test": records[-1]}
