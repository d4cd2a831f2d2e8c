"""Tests that every setting is read: a second value of it changes something that a run does.

Probes show parts of a run, such as lowered programs, batches, texts and files, of a config that
makes every setting matter (`BASE`).
"""

import dataclasses
import functools
import os
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

from support import drawn_run, hf_tokenizers, miniature, runs
from support.cases import nightly_but
from txl_jax.cli.flag_tree import SettingParser
from txl_jax.config import (
    CorpusName,
    DynamicConfig,
    DynamicRule,
    ExperimentConfig,
    InitVocabulary,
    config_tree,
)
from txl_jax.data import published
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import read_corpus
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.data.vocabulary import dumps
from txl_jax.runs import score_input, score_splits, warm_start
from txl_jax.runs.build import build, build_for
from txl_jax.runs.generate import read_prompt, read_stop
from txl_jax.runs.run import Run
from txl_jax.runs.trained import TrainedModel
from txl_jax.runs.trainer import training_reader
from txl_jax.runtime.log import read_metrics
from txl_jax.training.step import init_params, init_state, make_train_step

LEAVES = {leaf.name: leaf for leaf in config_tree.leaves(ExperimentConfig)}


def parsed(group, words):
    """Values by the names of settings in a group, of words that are written like flags."""
    pairs = (
        (f"{group}.{name}".removeprefix("-."), value)
        for name, value in (word.split("=") for word in words)
    )
    return {name: SettingParser(LEAVES[name].type).parse(value) for name, value in pairs}


# Chosen so that every setting matters: clusters, pre layer norm, same_length, a clamp, a warm-up.
BASE_VALUES = """
model n_layer=2 d_model=12 n_head=2 d_head=5 d_inner=14 d_embed=16 cutoffs=100,200 div_val=2
model tie_projs=false,true,true dropout.attention=0.1 layer_norm=pre
data corpus=text file=words.txt
optimizer warmup_steps=2
train batch_size=2 steps=8 segments_per_call=2 segment_len=7 mem_len=5 clamp_len=6 same_length=true
train log_every=4 eval_every=4 checkpoint_every=4
eval batch_size=2 segment_len=6 mem_len=9 clamp_len=4
generate length=4 top_k=10
"""
BASE = ExperimentConfig()
for group, *words in map(str.split, BASE_VALUES.strip().splitlines()):
    BASE = config_tree.replace(BASE, parsed(group, words))


@functools.cache
def parts_of(config):
    return build(config, vocab_size=256)


def readers(config):
    made = ((training_segments, config.train), (evaluation_segments, config.eval))
    return [
        read(np.arange(200), batch_size=c.batch_size, segment_len=c.segment_len) for read, c in made
    ]


def init(config):
    """The lowered initialisation: seeds and deviations."""
    parts = parts_of(config)

    def init():
        params = init_params(parts.model, jax.random.key(config.seed))
        return nn.unbox(init_state(parts.model, parts.optimizer, config, params))

    return jax.jit(init).lower().as_text()


def first_weights(config):
    """The vocabulary, and what is recorded of the weights that a run begins with; a trained run is
    made if need be.
    """
    if config.init_from:
        plain = {
            "init_from": None,
            "init_vocabulary": InitVocabulary.OWN,
            "data.file": "trained.txt",
        }
        trained = config_tree.replace(config, plain)
        drawn_run.make(Path(config.init_from), trained, read_corpus(trained.data, "."))
    workdir = Run(Path("new-run"))
    read = warm_start.read_corpus(config, workdir, ".", None)
    parts = build(config, vocab_size=read.vocabulary.size)
    weights = warm_start.load(parts, read.vocabulary, workdir) if config.init_from else None
    return dumps(read.vocabulary), weights and weights.record


def train_step(config):
    """The lowered update: shapes, losses, gradients and what the optimizer makes of them."""
    parts = parts_of(config)
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, config)
    return jax.jit(step).lower(parts.abstract_state, readers(config)[0].segments(0, 1)).as_text()


def eval_step(config):
    parts = parts_of(config)
    weights = jax.eval_shape(parts.prepare_params, parts.abstract_state.params)
    memory, segments = jax.eval_shape(parts.init_memory, weights), readers(config)[1].segments(0, 1)
    return parts.eval_step.lower(weights, memory, segments).as_text()


def batch(config):
    training, evaluation = readers(config)
    calls = (training.segments(0, config.train.segments_per_call), evaluation.segments(0, 2))
    return jax.tree.map(np.ndarray.tolist, calls)


def corpus(config):
    try:
        read = read_corpus(config.data, ".")
    except (ValueError, OSError) as error:
        return str(error)
    return (
        read.digest,
        dumps(read.vocabulary),
        [split.tolist() for split in (read.train, read.valid, read.test)],
    )


def end_token(config):
    return build_for(config, read_corpus(config.data, ".").vocabulary).model.end_token


def epochs(config):
    read = read_corpus(config.data, ".")
    reader = training_reader(parts_of(config), read, config.seed)
    return jax.tree.map(np.ndarray.tolist, reader.segments(0, 2 * reader.n_segments))


def devices(config):
    """The mesh, or, on one device, why there is none."""
    try:
        return parts_of(config).mesh.shape
    except ValueError as error:
        return str(error)


def files(config):
    workdir = Run(Path(f"run-{hash(config)}"))
    runs.train(config, read_corpus(config.data, "."), workdir)
    records = read_metrics(workdir.path)
    made = [sorted(os.listdir(folder)) for folder in (workdir.latest, workdir.path)]
    return [
        [record.get(name) for name in ("kind", "step", "loss", "tokens")] for record in records
    ], made


def scored(config):
    trained = config_tree.replace(config, {"eval.average_checkpoints": None})
    corpus, folder = read_corpus(config.data, "."), f"scored-{hash(config)}"
    runs.train(trained, corpus, folder)
    return score_splits.evaluate_splits(config, corpus, Run.read(folder))["test"]


def learned(config):
    """The test score of a model that learns while it reads, or does not."""
    folder = f"learned-{hash(config)}"
    corpus = _train_without_dynamic(config, folder)
    results = score_splits.evaluate_splits(config, corpus, Run.read(folder))
    return results.get("dynamic", results)["test"]


def documents(config):
    """The scores of two documents."""
    folder = f"documents-{hash(config)}"
    _train_without_dynamic(config, folder)
    trained = TrainedModel.of(Run.read(folder), config)
    lines = []
    texts = iter([(1, b"one two one two one two"), (2, b"two one two one two one")])
    score_input.score_documents(trained, texts, name="texts", per_token=False, write=lines.append)
    return lines


def _train_without_dynamic(config, folder):
    trained = config_tree.replace(config, {"eval.dynamic": DynamicConfig()})
    corpus = read_corpus(config.data, ".")
    runs.train(trained, corpus, folder)
    return corpus


def prompt(config):
    return read_prompt(config.generate)


def text(config):
    """Generated text, by random weights that are large enough for peaked distributions."""
    parts = parts_of(config)
    shapes = parts.abstract_state.params
    params = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(jax.random.key(0), leaf.shape), shapes
    )
    stop = read_stop(config.generate, ByteVocabulary.all_bytes())
    generator = parts.generator(parts.prepare_params(params))
    blocks = generator.tokens(np.arange(3), config.generate, stop_token=stop)
    return np.concatenate(list(blocks), axis=1).tolist()


# Each runs once per config: many settings are compared with the same first one.
PROBES = (
    init,
    first_weights,
    train_step,
    eval_step,
    batch,
    corpus,
    end_token,
    epochs,
    devices,
    files,
    scored,
    learned,
    documents,
)
PROBES = {probe.__name__: functools.cache(probe) for probe in (*PROBES, prompt, text)}


# Lines of a probe, a group, and second values of its settings, written like flags, that must show
# in the probe.
VALUES = r"""
init - seed=5
init model init_std=0.03 projection_init_std=0.03
first_weights - init_from=weights init_vocabulary=kept
train_step model network=lstm n_layer=3 d_model=14 n_head=3 d_head=6 d_inner=15 d_embed=20
train_step model layer_norm=post
train_step model encoding=vaswani num_positions=20 untie_r=true tie_positions=true tie_weight=false
train_step model cutoffs=90,200 div_val=1 tie_projs=false,false,true attention=tiled
train_step model dtype=bfloat16 remat=full
train_step model.dropout rate=0.2 attention=0.3 input=0.3 output=0.3 qkv=0.3 embedding=0.3
train_step model.dropout locked=true
train_step model.compat memory_start=zeros same_length_window=mem_len_plus_one layer_norm_eps=1e-12
train_step model.compat shaw_terms=original final_norm=false
corpus data corpus=python_stdlib file=other.txt heldout=published
corpus data train=other.txt valid=other.txt test=other.txt
corpus data json_field=text
corpus data.tokenizer kind=word newlines=drop line_mark=s min_count=200 vocab_file=prompt.txt
corpus data.tokenizer hf_file=tokenizer.json vocab_size=300
end_token data reset_at=\n
epochs data order=sentences roll=rows
train_step optimizer name=lion schedule_offset=original min_lr_ratio=0.1 learning_rate=1e-3
train_step optimizer warmup_steps=3 adam_b2=0.9 adam_eps=1e-6 clip_norm=1.0 decay_steps=6
train_step optimizer l2=0.1 weight_decay=0.1 embedding_lr_multiplier=2.0 clip_eps=0.1
train_step optimizer schedule=linear
devices mesh data=2 fsdp=2 tensor=2
train_step train steps=10 grad_accum_steps=2 mem_len=6 clamp_len=3 same_length=false loss=half
batch train batch_size=3 segment_len=8 segments_per_call=4
epochs train stride=3
files train log_every=2 eval_every=2 checkpoint_every=2 keep_checkpoints=1 patience=1 sample_every=4
train_step regularization activation_l2=0.1 temporal_l2=0.1
train_step average start_step=3 ema_decay=0.9 lr_scale=0.5
files average nt_asgd_patience=1
batch eval batch_size=3 segment_len=5
eval_step eval mem_len=8 clamp_len=5 same_length=false cache_dtype=bfloat16 weight_dtype=int8
eval_step eval temperature=1.1
files eval stride=2 warmup_tokens=4 valid_tokens=20
scored eval average_checkpoints=2
learned eval.dynamic rule=sgd learning_rate=0.01 decay=0.5 epsilon=0.1 statistics_segments=5
documents eval.dynamic shared=true
prompt generate prompt=one prompt_file=prompt.txt
text generate length=5 stop=Q samples=3 temperature=0.1 top_k=2 top_p=0.05 seed=3
"""
SECOND = {}  # Probe and second value by the name of a setting. "Q" is the second token of the text.
for probe_name, group, *words in map(str.split, VALUES.strip().splitlines()):
    SECOND |= {name: (probe_name, value) for name, value in parsed(group, words).items()}

# A rate at which the loss of a tiny run rises.
RISING = {"train.steps": 20, "train.eval_every": 2, "optimizer.learning_rate": 1.0}
FULL_SOFTMAX = {
    "model.cutoffs": (),
    "model.div_val": 1,
    "model.tie_projs": (),
    "model.d_embed": None,
}
WORDS, IDS = {"data.tokenizer.kind": "word"}, {"data.tokenizer.kind": "id", "data.file": "ids.bin"}
SPLITS = dict.fromkeys(("data.train", "data.valid", "data.test"), ("words.txt",))
# Settings that go with the second value, so that it is legal.
BESIDE = {
    "init_vocabulary": FULL_SOFTMAX | WORDS | {"init_from": "weights"},
    "train.patience": RISING,
    "average.nt_asgd_patience": RISING | {"average.nt_asgd_patience": 10**6},
    **{f"average.{name}": {"average.start_step": 0} for name in ("lr_scale", "ema_decay")},
    **{
        f"{group}.stride": {f"{group}.mem_len": 0, f"{group}.same_length": False}
        for group in ("train", "eval")
    },
    "eval.temperature": FULL_SOFTMAX,
    "optimizer.weight_decay": {"optimizer.name": "lion"},
    "model.num_positions": {"model.encoding": "al_rfou"},
    "model.compat.shaw_terms": {"model.encoding": "shaw", "model.num_positions": 12},
    "data.corpus": {"data.file": None},
    **{f"data.tokenizer.{name}": WORDS for name in ("line_mark", "min_count", "vocab_file")},
    "data.tokenizer.hf_file": {"data.tokenizer.kind": "subword"},
    "data.tokenizer.vocab_size": IDS,
    "data.heldout": WORDS | {"data.file": None, "data.corpus": "lm1b"},
    "data.order": WORDS,
    "eval.warmup_tokens": {"eval.valid_tokens": 20},
    **{
        f"eval.dynamic.{name}": {"eval.dynamic.rule": DynamicRule.SGD}
        for name in ("learning_rate", "decay", "shared")
    },
    "eval.dynamic.epsilon": {"eval.dynamic.rule": DynamicRule.RMSPROP},
    "eval.dynamic.statistics_segments": {
        "eval.dynamic.rule": DynamicRule.RMS,
        "eval.dynamic.epsilon": 0.1,
    },
    **dict.fromkeys(SPLITS, SPLITS | {"data.file": None}),
}
# First values, where that of `BASE` is not legal beside the others.
FIRST = {
    "model.num_positions": 12,
    "average.nt_asgd_patience": 10**6,
    "data.tokenizer.hf_file": "other.json",
    **SPLITS,
}


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name in ("words.txt", "other.txt"):
        (tmp_path / name).write_text("\n".join(rng.choice(["one", "two", "Three"], 300)))
    (rng.integers(0, 200, 300) | 1).astype("<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "trained.txt").write_text("three four\n" * 300)
    for name, size in (("tokenizer.json", 290), ("other.json", 280)):
        (tmp_path / name).write_text(hf_tokenizers.byte_level(size=size))
    monkeypatch.setitem(published.CORPORA, CorpusName.LM1B, miniature.corpus(CorpusName.LM1B))
    (tmp_path / miniature.OFFICIAL[CorpusName.LM1B]).write_bytes(
        miniature.official(CorpusName.LM1B)
    )
    (tmp_path / "prompt.txt").write_text("two")
    monkeypatch.chdir(tmp_path)


def test_the_table_names_every_setting():
    assert SECOND.keys() == LEAVES.keys()


# Probes that take milliseconds run by default, but for settings whose text takes longer to make.
QUICK_PROBES = ("batch", "corpus", "devices", "end_token", "epochs", "prompt")
LONGER = ("data.corpus", "data.heldout")
# One setting stands for the others of each of these probes.
ONE_EACH = ("train.loss", "eval.clamp_len")
QUICK = [
    name for name, (probe, _) in SECOND.items() if probe in QUICK_PROBES and name not in LONGER
] + [*ONE_EACH]


@pytest.mark.parametrize("name", nightly_but(QUICK, SECOND))
def test_a_second_value_changes_what_a_run_does(name):
    probe, value = SECOND[name]
    before = config_tree.replace(BASE, {k: v for k, v in BESIDE.get(name, {}).items() if k != name})
    if name in FIRST:
        before = config_tree.replace(before, {name: FIRST[name]})
    after = config_tree.replace(before, {name: value})
    if name == "data.corpus":  # Without a file, own text has no legal first value.
        before = BASE
    assert PROBES[probe](before) != PROBES[probe](after)


@pytest.mark.parametrize(
    "probe", nightly_but(QUICK_PROBES, ("init", "train_step", "eval_step", "text", *QUICK_PROBES))
)
def test_values_that_do_not_differ_change_nothing(probe):
    """The probes themselves are repeatable, else the test above could not fail."""
    parts_of.cache_clear()
    assert PROBES[probe](BASE) == PROBES[probe].__wrapped__(dataclasses.replace(BASE))
