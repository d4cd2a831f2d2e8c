"""Tests that every setting is read: a second value of it changes something that a run does.

Probes show parts of a run, such as lowered programs, batches, texts and files, of a config that
makes every setting matter (`BASE`).
"""

import dataclasses
import functools
import os
from pathlib import Path

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
    """Returns values by setting, from words like "n_layer=2" for the settings of a group.

    The group of the settings at the top of the config is "-".
    """
    values = {}
    for word in words:
        short_name, value = word.split("=")
        name = f"{group}.{short_name}".removeprefix("-.")
        values[name] = SettingParser(LEAVES[name].type).parse(value)
    return values


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
for line in BASE_VALUES.strip().splitlines():
    group, *words = line.split()
    BASE = config_tree.replace(BASE, parsed(group, words))


@functools.cache
def parts_of(config):
    """Builds the model of a config for tokens that are bytes."""
    return build(config, vocab_size=256)


def training_reader_of(config):
    """Reads 200 tokens as training does."""
    lengths = config.train
    return training_segments(
        np.arange(200), batch_size=lengths.batch_size, segment_len=lengths.segment_len
    )


def evaluation_reader_of(config):
    """Reads 200 tokens as evaluation does."""
    lengths = config.eval
    return evaluation_segments(
        np.arange(200), batch_size=lengths.batch_size, segment_len=lengths.segment_len
    )


def init(config):
    """Shows the lowered initialization: seeds and deviations."""
    parts = parts_of(config)

    def init():
        params = init_params(parts.model, jax.random.key(config.seed))
        return init_state(parts.model, parts.optimizer, config, params)

    return jax.jit(init).lower().as_text()


def first_weights(config):
    """Shows the vocabulary, and the record of the weights that a run begins with.

    If the config begins with weights, a trained run is made first.
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
    if not config.init_from:
        return dumps(read.vocabulary), None
    weights = warm_start.load(parts, read.vocabulary, workdir)
    return dumps(read.vocabulary), weights.record


def train_step(config):
    """Shows the lowered update: shapes, losses, gradients, and what the optimizer makes of them."""
    parts = parts_of(config)
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, config)
    segments = training_reader_of(config).segments(0, 1)
    return jax.jit(step).lower(parts.abstract_state, segments).as_text()


def eval_step(config):
    """Shows the lowered step of evaluation."""
    parts = parts_of(config)
    weights = jax.eval_shape(parts.prepare_params, parts.abstract_state.params)
    memory = jax.eval_shape(parts.init_memory, weights)
    segments = evaluation_reader_of(config).segments(0, 1)
    return parts.eval_step.lower(weights, memory, segments).as_text()


def batch(config):
    """Shows the segments of a call in training and in evaluation."""
    training = training_reader_of(config).segments(0, config.train.segments_per_call)
    evaluation = evaluation_reader_of(config).segments(0, 2)
    return jax.tree.map(np.ndarray.tolist, (training, evaluation))


def corpus(config):
    """Shows digest, vocabulary and splits of the text, or the error of reading it."""
    try:
        read = read_corpus(config.data, ".")
    except (ValueError, OSError) as error:
        return str(error)
    splits = [read.train.tolist(), read.valid.tolist(), read.test.tolist()]
    return read.digest, dumps(read.vocabulary), splits


def end_token(config):
    """Shows the token behind which the model starts anew."""
    return build_for(config, read_corpus(config.data, ".").vocabulary).model.end_token


def epochs(config):
    """Shows two epochs of segments."""
    read = read_corpus(config.data, ".")
    reader = training_reader(parts_of(config), read, config.seed)
    return jax.tree.map(np.ndarray.tolist, reader.segments(0, 2 * reader.n_segments))


def devices(config):
    """Shows the mesh, or the error if one device is too few for it."""
    try:
        return parts_of(config).mesh.shape
    except ValueError as error:
        return str(error)


def files(config):
    """Shows the metrics of a training run, and the names of its files."""
    workdir = Run(Path(f"run-{hash(config)}"))  # Each config has its own.
    runs.train(config, read_corpus(config.data, "."), workdir)

    records = []
    for record in read_metrics(workdir.path):
        records.append(
            [record.get("kind"), record.get("step"), record.get("loss"), record.get("tokens")]
        )
    return records, sorted(os.listdir(workdir.latest)), sorted(os.listdir(workdir.path))


def scored(config):
    """Shows the test score of a trained run."""
    trained = config_tree.replace(config, {"eval.average_checkpoints": None})
    corpus = read_corpus(config.data, ".")
    folder = f"scored-{hash(config)}"
    runs.train(trained, corpus, folder)
    return score_splits.evaluate_splits(config, corpus, Run.read(folder))["test"]


def learned(config):
    """Shows the test score of a model that learns while it is scored, or does not."""
    folder = f"learned-{hash(config)}"
    corpus = _train_without_dynamic(config, folder)
    results = score_splits.evaluate_splits(config, corpus, Run.read(folder))
    return results.get("dynamic", results)["test"]


def documents(config):
    """Shows the scores of two documents."""
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
    """Shows the prompt of generation."""
    return read_prompt(config.generate)


def text(config):
    """Shows generated text, by random weights that are large enough for peaked distributions."""
    parts = parts_of(config)
    shapes = parts.abstract_state.params
    params = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(jax.random.key(0), leaf.shape), shapes
    )
    stop = read_stop(config.generate, ByteVocabulary.all_bytes())
    generator = parts.generator(parts.prepare_params(params))
    blocks = generator.tokens(np.arange(3), config.generate, stop_token=stop)
    return np.concatenate(list(blocks), axis=1).tolist()


FUNCTIONS = (
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
    prompt,
    text,
)
# Each probe runs once per config, because many settings are compared with the same first config.
PROBES = {function.__name__: functools.cache(function) for function in FUNCTIONS}


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
# Probe and second value by the name of a setting. `stop=Q` ends generated text early, because its
# second token is "Q".
SECOND = {}
for line in VALUES.strip().splitlines():
    probe_name, group, *words = line.split()
    for name, value in parsed(group, words).items():
        SECOND[name] = (probe_name, value)

# A rate at which the loss of a tiny run rises, for settings that act when it does.
RISING = {"train.steps": 20, "train.eval_every": 2, "optimizer.learning_rate": 1.0}
FULL_SOFTMAX = {
    "model.cutoffs": (),
    "model.div_val": 1,
    "model.tie_projs": (),
    "model.d_embed": None,
}
WORDS = {"data.tokenizer.kind": "word"}
IDS = {"data.tokenizer.kind": "id", "data.file": "ids.bin"}
SPLITS = dict.fromkeys(("data.train", "data.valid", "data.test"), ("words.txt",))
LEARNING = {"eval.dynamic.rule": DynamicRule.SGD}

# Settings that go with the first and the second value of a setting, so that the second one is legal
# and matters.
BESIDE = {
    "init_vocabulary": FULL_SOFTMAX | WORDS | {"init_from": "weights"},
    "model.num_positions": {"model.encoding": "al_rfou"},
    "model.compat.shaw_terms": {"model.encoding": "shaw", "model.num_positions": 12},
    "optimizer.weight_decay": {"optimizer.name": "lion"},
    "train.patience": RISING,
}
BESIDE |= {
    "average.nt_asgd_patience": RISING | {"average.nt_asgd_patience": 10**6},
    "average.lr_scale": {"average.start_step": 0},
    "average.ema_decay": {"average.start_step": 0},
    "train.stride": {"train.mem_len": 0, "train.same_length": False},
    "eval.stride": {"eval.mem_len": 0, "eval.same_length": False},
    "eval.temperature": FULL_SOFTMAX,
    "eval.warmup_tokens": {"eval.valid_tokens": 20},
}
BESIDE |= {
    "eval.dynamic.learning_rate": LEARNING,
    "eval.dynamic.decay": LEARNING,
    "eval.dynamic.shared": LEARNING,
    "eval.dynamic.epsilon": {"eval.dynamic.rule": DynamicRule.RMSPROP},
    "eval.dynamic.statistics_segments": {
        "eval.dynamic.rule": DynamicRule.RMS,
        "eval.dynamic.epsilon": 0.1,
    },
}
BESIDE |= {
    "data.corpus": {"data.file": None},
    "data.heldout": WORDS | {"data.file": None, "data.corpus": "lm1b"},
    "data.order": WORDS,
    "data.tokenizer.line_mark": WORDS,
    "data.tokenizer.min_count": WORDS,
    "data.tokenizer.vocab_file": WORDS,
    "data.tokenizer.hf_file": {"data.tokenizer.kind": "subword"},
    "data.tokenizer.vocab_size": IDS,
    **dict.fromkeys(SPLITS, SPLITS | {"data.file": None}),
}
# First values for settings whose value in `BASE` is not legal with the others.
FIRST = {
    "model.num_positions": 12,
    "average.nt_asgd_patience": 10**6,
    "data.tokenizer.hf_file": "other.json",
    **SPLITS,
}


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Writes the texts, vocabularies and prompts that the values name, and works next to them."""
    rng = np.random.default_rng(0)
    for name in ("words.txt", "other.txt"):
        (tmp_path / name).write_text("\n".join(rng.choice(["one", "two", "Three"], 300)))
    rng.integers(0, 200, 300).astype("<u2").tofile(tmp_path / "ids.bin")
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


# Probes that take milliseconds run by default, except for settings whose text takes longer to make.
QUICK_PROBES = ("batch", "corpus", "devices", "end_token", "epochs", "prompt")
LONGER = ("data.corpus", "data.heldout")
# Of the slower probes `train_step` and `eval_step`, one setting stands for the others.
ONE_EACH = ("train.loss", "eval.clamp_len")
QUICK = [*ONE_EACH]
for name, (probe_name, _) in SECOND.items():
    if probe_name in QUICK_PROBES and name not in LONGER:
        QUICK.append(name)


@pytest.mark.parametrize("name", nightly_but(QUICK, SECOND))
def test_a_second_value_changes_what_a_run_does(name):
    probe, second_value = SECOND[name]
    first_values = dict(BESIDE.get(name, {}))
    first_values.pop(name, None)
    if name in FIRST:
        first_values[name] = FIRST[name]
    before = config_tree.replace(BASE, first_values)
    after = config_tree.replace(before, {name: second_value})
    # The second corpus allows no file, and own text needs one.
    if name == "data.corpus":
        before = BASE

    assert PROBES[probe](before) != PROBES[probe](after), f"{name} does not show in {probe}"


@pytest.mark.parametrize(
    "probe", nightly_but(QUICK_PROBES, ("init", "train_step", "eval_step", "text", *QUICK_PROBES))
)
def test_values_that_do_not_differ_change_nothing(probe):
    """The probes themselves are repeatable, else the test above could not fail."""
    # The second result is computed anew, by the function without its cache.
    parts_of.cache_clear()
    assert PROBES[probe](BASE) == PROBES[probe].__wrapped__(dataclasses.replace(BASE))
