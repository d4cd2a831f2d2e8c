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
LOG_EVERY, EVAL_EVERY = 20, 200


def make(folder: Path, *, steps: int = 1000, done: int | None = None, member_settings=(), **settings) -> Path:
    """Writes a run into a folder and returns it.

    `done`: updates done; None: all, with results. `member_settings`: what each member of an ensemble differs in.
    """
    defaults = ExperimentConfig(data=DataConfig(corpus=CorpusName.PTB))
    config = tiny.changed(defaults, **{"train__steps": steps, "train__eval_every": EVAL_EVERY} | settings)
    text = TextInfo("ptb", "Penn Treebank, 3 files", "d" * 64, VOCABULARY, data_dir="/data")
    members = list(runs.record(folder, config, text, member_settings).member_names) or [None]
    last, records, scores = steps if done is None else done, [], {}
    for number, member in enumerate(members):
        found = list(_records(config, last, number, member))
        records += found
        scores[member] = _scores(found, member)
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    if done is None:
        facts = {"corpus": "ptb", "text": text.description, "parameters": 2_146_832, "steps": steps}
        rest = {"eval": config_tree.to_dict(config.eval), "device": "CPU (one, 2 cores)", "date": "2026-11-23"}
        own = scores[None] if members == [None] else {"members": scores}
        (folder / RESULTS).write_text(json.dumps(facts | own | rest))
    return folder


def _records(config, last, number, member):
    """Losses that fall with the updates, from 9 nats; with the seed's noise."""
    rng = np.random.default_rng(config.seed + 17 * number)
    level = 4.5 + 0.4 * abs(math.log10(config.optimizer.learning_rate / 0.002)) + 0.05 * rng.normal()
    own = {"member": member} if member else {}
    for step in range(LOG_EVERY, last + 1, LOG_EVERY):
        loss = level + 4.5 * math.exp(-step / 150) + 0.03 * rng.normal()
        rate = config.optimizer.learning_rate * (1 + math.cos(math.pi * step / config.train.steps)) / 2
        more = {"grad_norm": 1 + rng.random() / 5, "learning_rate": rate, "tokens_per_second": 9e3 + 100 * rng.normal()}
        yield {"kind": "train", "step": step, **own, **_measures(loss), **more}
        if step % EVAL_EVERY == 0:
            yield {"kind": "valid", "step": step, **own, **_measures(loss + 0.1), "tokens": 2800.0}


def _measures(loss):
    return {"loss": loss, "bpc": loss / math.log(2), "perplexity": math.exp(loss)}


def _scores(records, member):
    valid = [record for record in records if record["kind"] == "valid"]
    best = min(valid, key=lambda record: record["loss"], default=None)
    own = {name: value for name, value in (best or {}).items() if name not in ("kind", "member")}
    return {"best_valid": own, "test": {"step": own.get("step", 0), **_measures(own.get("loss", 5.0) - 0.05)}}
