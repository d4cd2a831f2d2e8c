"""Tests that every setting is read: a second value of it changes something that a run does."""

import dataclasses
import functools
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

from support import drawn_run, hf_tokenizers, miniature
from txl_jax.assemble import assemble
from txl_jax.config import (
    AttentionPath,
    AttentionWindow,
    CorpusName,
    DataConfig,
    DropoutConfig,
    DType,
    EmptyEnd,
    Encoding,
    EpochMemory,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    Heldout,
    IdType,
    InitVocabulary,
    LineMark,
    LossPart,
    MemoryStart,
    ModelConfig,
    Network,
    Newlines,
    NormPlace,
    OptimizerConfig,
    Order,
    Remat,
    Residual,
    Roll,
    ScheduleOffset,
    ShawTerms,
    Tokenizer,
    TrainConfig,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.batches.segment_reader import evaluation_segments, training_segments
from txl_jax.data.corpus import read_corpus
from txl_jax.data.sources import corpora
from txl_jax.data.sources.text import File
from txl_jax.data.tokens import sentencepiece as pieces_lib
from txl_jax.data.tokens.byte_vocabulary import ByteVocabulary
from txl_jax.data.tokens.vocabulary import dumps
from txl_jax.inference.generator import Generator
from txl_jax.jobs import evaluate, train, warm_start
from txl_jax.jobs.generate import read_prompt, read_stop
from txl_jax.jobs.train import training_reader
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.training.state import init_state
from txl_jax.training.step import make_train_step

# Chosen so that every setting matters: clusters, pre layer norm, same_length, a clamp, a warm-up.
BASE = ExperimentConfig(
    model=ModelConfig(
        n_layer=2,
        d_model=12,
        n_head=2,
        d_head=5,
        d_inner=14,
        d_embed=16,
        dropout=DropoutConfig(attention=0.1),
        layer_norm=NormPlace.PRE,
        cutoffs=(100, 200),
        div_val=2,
        tie_projs=(False, True, True),
    ),
    data=DataConfig(corpus=CorpusName.TEXT, file="words.txt"),
    optimizer=OptimizerConfig(warmup_steps=2),
    train=TrainConfig(
        steps=8,
        batch_size=2,
        segment_len=7,
        mem_len=5,
        clamp_len=6,
        same_length=True,
        segments_per_call=2,
        log_every=4,
        eval_every=4,
        checkpoint_every=4,
    ),
    eval=EvalConfig(batch_size=2, segment_len=6, mem_len=9, clamp_len=4, segments_per_call=2),
    generate=GenerateConfig(length=4, top_k=10),
)

# Where each setting must show, and its second value.
SECOND = {
    "seed": ("init", 5),
    "init_from": ("first_weights", "weights"),
    "init_vocabulary": ("first_weights", InitVocabulary.KEPT),
    "model.network": ("init", Network.LSTM),
    "model.n_layer": ("init", 3),
    "model.d_model": ("init", 14),
    "model.n_head": ("init", 3),
    "model.d_head": ("init", 6),
    "model.d_inner": ("init", 15),
    "model.d_embed": ("init", 20),
    "model.dropout.rate": ("train_step", 0.2),
    "model.dropout.attention": ("train_step", 0.3),
    "model.dropout.input": ("train_step", 0.3),
    "model.dropout.output": ("train_step", 0.3),
    "model.dropout.locked": ("train_step", True),
    "model.dropout.qkv": ("train_step", 0.3),
    "model.dropout.embedding": ("train_step", 0.3),
    "model.dropout.weight": ("train_step", 0.3),
    "model.layer_norm": ("train_step", NormPlace.POST),
    "model.residual": ("init", Residual.GATED),
    "model.attention": ("train_step", AttentionPath.TILED),
    "model.encoding": ("init", Encoding.VASWANI),
    "model.num_positions": ("init", 20),
    "model.untie_r": ("init", True),
    "model.tie_positions": ("init", True),
    "model.tie_weight": ("init", False),
    "model.cutoffs": ("init", (90, 200)),
    "model.div_val": ("init", 1),
    "model.tie_projs": ("init", (False, False, True)),
    "model.init_std": ("init", 0.03),
    "model.projection_init_std": ("init", 0.03),
    "model.dtype": ("train_step", DType.BFLOAT16),
    "model.remat": ("train_step", Remat.FULL),
    "compat.memory_start": ("train_step", MemoryStart.ZEROS),
    "compat.same_length_window": ("train_step", AttentionWindow.MEM_LEN_PLUS_ONE),
    "compat.layer_norm_eps": ("train_step", 1e-12),
    "compat.shaw_terms": ("init", ShawTerms.ORIGINAL),
    "compat.final_norm": ("init", False),
    "optimizer.schedule_offset": ("train_step", ScheduleOffset.ORIGINAL),
    "optimizer.min_lr_ratio": ("train_step", 0.1),
    "data.corpus": ("corpus", CorpusName.PYTHON_STDLIB),
    "data.file": ("corpus", "other.txt"),
    "data.train": ("corpus", ("other.txt",)),
    "data.valid": ("corpus", ("other.txt",)),
    "data.test": ("corpus", ("other.txt",)),
    "data.tokenizer.kind": ("corpus", Tokenizer.WORD),
    "data.tokenizer.newlines": ("corpus", Newlines.DROP),
    "data.tokenizer.lower_case": ("corpus", True),
    "data.tokenizer.line_mark": ("corpus", LineMark.S),
    "data.tokenizer.empty_end": ("corpus", EmptyEnd.KEEP),
    "data.tokenizer.min_count": ("corpus", 200),
    "data.tokenizer.vocab_file": ("corpus", "prompt.txt"),
    "data.tokenizer.sentencepiece_model": ("corpus", "words.model"),
    "data.tokenizer.sentencepiece_vocab": ("corpus", 300),
    "data.tokenizer.hf_file": ("corpus", "tokenizer.json"),
    "data.tokenizer.vocab_size": ("corpus", 300),
    "data.tokenizer.bin_type": ("corpus", IdType.UINT32),
    "data.heldout": ("corpus", Heldout.PUBLISHED),
    "data.order": ("epochs", Order.SENTENCES),
    "data.roll": ("epochs", Roll.ROWS),
    "data.epoch_memory": ("epochs", EpochMemory.CARRIED),
    "optimizer.learning_rate": ("train_step", 1e-3),
    "optimizer.warmup_steps": ("train_step", 3),
    "optimizer.adam_b1": ("train_step", 0.8),
    "optimizer.adam_b2": ("train_step", 0.9),
    "optimizer.adam_eps": ("train_step", 1e-6),
    "optimizer.clip_norm": ("train_step", 1.0),
    "optimizer.decay_steps": ("train_step", 6),
    "optimizer.l2": ("train_step", 0.1),
    "optimizer.weight_decay": ("train_step", 0.1),
    "optimizer.embedding_lr_multiplier": ("train_step", 2.0),
    "mesh.data": ("devices", 2),
    "mesh.dcn_data": ("devices", 2),
    "mesh.fsdp": ("devices", 2),
    "mesh.tensor": ("devices", 2),
    "train.steps": ("train_step", 10),
    "train.batch_size": ("batch", 3),
    "train.grad_accum_steps": ("train_step", 2),
    "train.segment_len": ("batch", 8),
    "train.mem_len": ("train_step", 6),
    "train.stride": ("epochs", 3),
    "train.clamp_len": ("train_step", 3),
    "train.same_length": ("train_step", False),
    "train.loss": ("train_step", LossPart.HALF),
    "regularization.activation_l2": ("train_step", 0.1),
    "regularization.temporal_l2": ("train_step", 0.1),
    "regularization.adversarial": ("train_step", 0.01),
    "train.segments_per_call": ("batch", 4),
    "train.log_every": ("files", 2),
    "train.eval_every": ("files", 2),
    "train.checkpoint_every": ("files", 2),
    "train.keep_checkpoints": ("files", 1),
    "train.patience": ("files", 1),
    "average.start_step": ("train_step", 3),
    "average.nt_asgd_patience": ("files", 1),
    "average.lr_scale": ("train_step", 0.5),
    "average.ema_decay": ("train_step", 0.9),
    "eval.batch_size": ("batch", 3),
    "eval.segment_len": ("batch", 5),
    "eval.mem_len": ("eval_step", 8),
    "eval.stride": ("files", 2),
    "eval.clamp_len": ("eval_step", 5),
    "eval.same_length": ("eval_step", False),
    "eval.segments_per_call": ("batch", 3),
    "eval.cache_dtype": ("eval_step", DType.BFLOAT16),
    "eval.average_checkpoints": ("scored", 2),
    "eval.temperature": ("eval_step", 1.1),
    "eval.warmup_tokens": ("files", 4),
    "eval.valid_tokens": ("files", 20),
    "generate.prompt": ("prompt", "one"),
    "generate.prompt_file": ("prompt", "prompt.txt"),
    "generate.length": ("text", 5),
    "generate.stop": ("text", "Q"),  # The second token of the text.
    "generate.samples": ("text", 3),
    "generate.temperature": ("text", 0.1),
    "generate.top_k": ("text", 2),
    "generate.top_p": ("text", 0.05),
    "generate.seed": ("text", 3),
}

# Settings that go with the second value, so that it is legal.
# A rate at which the loss of a tiny run rises.
RISING = {"train.steps": 20, "train.eval_every": 2, "optimizer.learning_rate": 1.0}
FULL_SOFTMAX = {"model.cutoffs": (), "model.div_val": 1, "model.tie_projs": (), "model.d_embed": None}
BESIDE = {
    "init_vocabulary": FULL_SOFTMAX | {"data.tokenizer.kind": Tokenizer.WORD, "init_from": "weights"},
    "train.patience": RISING,
    "average.nt_asgd_patience": RISING | {"average.nt_asgd_patience": 10**6},
    **{f"average.{name}": {"average.start_step": 0} for name in ("lr_scale", "ema_decay")},
    **{f"{group}.stride": {f"{group}.mem_len": 0, f"{group}.same_length": False} for group in ("train", "eval")},
    **dict.fromkeys(("regularization.adversarial", "eval.temperature"), FULL_SOFTMAX),
    "model.num_positions": {"model.encoding": Encoding.AL_RFOU},
    "compat.shaw_terms": {"model.encoding": Encoding.SHAW, "model.num_positions": 12},
    "data.corpus": {"data.file": None},
    **{
        name: {"data.tokenizer.kind": Tokenizer.WORD}
        for name in ("data.tokenizer.line_mark", "data.tokenizer.min_count", "data.tokenizer.vocab_file")
    },
    "data.tokenizer.lower_case": {"data.tokenizer.kind": Tokenizer.CHAR},
    "data.tokenizer.empty_end": {"data.tokenizer.kind": Tokenizer.WORD, "data.file": "empty-end.txt"},
    "data.tokenizer.sentencepiece_model": {"data.tokenizer.kind": Tokenizer.SENTENCEPIECE},
    "data.tokenizer.sentencepiece_vocab": {
        "data.tokenizer.kind": Tokenizer.SENTENCEPIECE,
        "data.tokenizer.sentencepiece_vocab": 280,
    },
    "data.tokenizer.hf_file": {"data.tokenizer.kind": Tokenizer.HF},
    **{
        f"data.tokenizer.{name}": {"data.tokenizer.kind": Tokenizer.ID, "data.file": "ids.bin"}
        for name in ("vocab_size", "bin_type")
    },
    "data.heldout": {"data.file": None, "data.corpus": CorpusName.LM1B, "data.tokenizer.kind": Tokenizer.WORD},
    "data.order": {"data.tokenizer.kind": Tokenizer.WORD},
    "eval.warmup_tokens": {"eval.valid_tokens": 20},
    **{
        f"data.{split}": {
            "data.file": None,
            **{f"data.{other}": ("words.txt",) for other in ("train", "valid", "test")},
        }
        for split in ("train", "valid", "test")
    },
}


# First values, where that of `BASE` is not legal beside the others.
FIRST = {
    "model.num_positions": 12,
    "average.nt_asgd_patience": 10**6,
    "data.tokenizer.hf_file": "other.json",
    **{f"data.{split}": ("words.txt",) for split in ("train", "valid", "test")},
}


@functools.cache
def small_model():
    """A SentencePiece model of few pieces."""
    content = b"one two three\n" * 50
    file = File("words", len(content), lambda: iter([content]))
    return pieces_lib.train([file], size=268, line_mark=LineMark.EOS, lower_case=False).model


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """The files that the settings name."""
    rng = np.random.default_rng(0)
    for name in ("words.txt", "other.txt"):
        (tmp_path / name).write_text("\n".join(rng.choice(["one", "two", "Three"], 300)))
    (rng.integers(0, 200, 300) | 1).astype("<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "trained.txt").write_text("three four\n" * 300)
    (tmp_path / "words.model").write_bytes(small_model())
    for name, size in (("tokenizer.json", 290), ("other.json", 280)):
        (tmp_path / name).write_text(hf_tokenizers.byte_level(size=size))
    (tmp_path / "empty-end.txt").write_text("one two\n" * 300 + "\n\n")
    monkeypatch.setitem(corpora.CORPORA, CorpusName.LM1B, miniature.corpus(CorpusName.LM1B))
    (tmp_path / miniature.OFFICIAL[CorpusName.LM1B]).write_bytes(miniature.official(CorpusName.LM1B))
    (tmp_path / "prompt.txt").write_text("two")
    monkeypatch.chdir(tmp_path)


def parts_of(config):
    return assemble(config, vocab_size=256)


def init(config):
    """The lowered initialisation: shapes, seeds and deviations."""
    parts, span = parts_of(config), config.train
    make = functools.partial(
        init_state, parts.model, parts.optimizer, seed=config.seed, batch_size=span.batch_size, mem_len=span.mem_len
    )
    return jax.jit(lambda: nn.unbox(make())).lower().as_text()


def first_weights(config):
    """The vocabulary, and what is recorded of the weights that a run begins with; a trained run is made if need be."""
    if config.init_from:
        plain = {"init_from": None, "init_vocabulary": InitVocabulary.OWN, "data.file": "trained.txt"}
        trained = config_tree.replace(config, plain)
        drawn_run.make(Path(config.init_from), trained, read_corpus(trained.data, "."))
    workdir = Workdir(Path("new-run"))
    read = warm_start.read_corpus(config, workdir, ".", None)
    parts = assemble(config, vocab_size=read.vocabulary.size)
    weights = warm_start.load(parts, read.vocabulary, workdir)
    return dumps(read.vocabulary), weights and weights.record


def train_step(config):
    """The lowered update."""
    parts = parts_of(config)
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, config)
    reader = training_segments(np.arange(200), batch_size=config.train.batch_size, segment_len=config.train.segment_len)
    return jax.jit(step).lower(parts.training.abstract_state, reader.segments(0, 1)).as_text()


def eval_step(config):
    """The lowered scoring."""
    parts = parts_of(config)
    reader = evaluation_segments(np.arange(200), batch_size=config.eval.batch_size, segment_len=config.eval.segment_len)
    weights = jax.eval_shape(parts.evaluation.prepare_params, parts.training.abstract_state.params)
    return parts.evaluation.eval_step.lower(
        weights, jax.eval_shape(parts.evaluation.init_memory, weights), reader.segments(0, 1)
    ).as_text()


def batch(config):
    """Tokens read by the first calls of training and evaluation."""
    tokens = np.arange(200)
    first_train = training_segments(tokens, batch_size=config.train.batch_size, segment_len=config.train.segment_len)
    first_eval = evaluation_segments(tokens, batch_size=config.eval.batch_size, segment_len=config.eval.segment_len)
    calls = (
        first_train.segments(0, config.train.segments_per_call),
        first_eval.segments(0, config.eval.segments_per_call),
    )
    return jax.tree.map(np.ndarray.tolist, calls)


def corpus(config):
    """The text and its ids, or why it is refused."""
    try:
        read = read_corpus(config.data, ".")
    except (ValueError, OSError) as error:
        return str(error)
    return read.digest, dumps(read.vocabulary), [split.tolist() for split in (read.train, read.valid, read.test)]


def epochs(config):
    """Segments of the first two epochs of training."""
    read = read_corpus(config.data, ".")
    reader = training_reader(parts_of(config), read)
    return jax.tree.map(np.ndarray.tolist, reader.segments(0, 2 * reader.n_segments))


def devices(config):
    """The mesh, or, on one device, why there is none."""
    try:
        return parts_of(config).mesh.shape
    except ValueError as error:
        return str(error)


def files(config):
    """Records and files of a tiny run."""
    workdir = Workdir(config_run_folder(config))
    train.run(config, read_corpus(config.data, "."), workdir)
    records = [
        (record["kind"], record["step"], record["loss"], record.get("tokens")) for record in read_metrics(workdir.path)
    ]
    return records, sorted(path.name for path in workdir.latest.iterdir())


def scored(config):
    """Test scores of a run that has ended."""
    trained = config_tree.replace(config, {"eval.average_checkpoints": None})
    corpus, workdir = read_corpus(config.data, "."), Workdir(config_run_folder(trained))
    train.run(trained, corpus, workdir)
    return evaluate.run(config, corpus, workdir, trained_on=TextInfo.of(corpus), log=str)["test"]


def config_run_folder(config):
    return Path.cwd() / f"run-{abs(hash(config))}"


def prompt(config):
    """The prompt of generation."""
    return read_prompt(config.generate)


def text(config):
    """Generated text, by random weights that are large enough for peaked distributions."""
    parts = parts_of(config)
    params = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(jax.random.key(0), leaf.shape), parts.training.abstract_state.params
    )
    stop = read_stop(config.generate, ByteVocabulary.all_bytes())
    generator = Generator(parts.model, config.eval, config.generate, stop_token=stop)
    blocks = generator.tokens(generator.prepare_params(params), np.arange(3))
    return np.concatenate(list(blocks), axis=1).tolist()


PROBES = {
    probe.__name__: probe
    for probe in (
        init,
        first_weights,
        train_step,
        eval_step,
        batch,
        corpus,
        epochs,
        devices,
        files,
        scored,
        prompt,
        text,
    )
}


def test_the_table_names_every_setting():
    assert set(SECOND) == {leaf.name for leaf in config_tree.leaves()}


@functools.cache
def of_many(probe, config):
    """Runs a probe that reads no file once per config: many settings are compared with the same first one."""
    return PROBES[probe](config)


def found(probe, config):
    """Runs a probe, or takes what it found before."""
    return of_many(probe, config) if probe in ("init", "train_step", "eval_step", "batch") else PROBES[probe](config)


def settings():
    """The names of all settings. Those that show in whole runs only are slow; other tests run them too."""
    for name, (probe, _) in SECOND.items():
        yield pytest.param(name, marks=pytest.mark.slow if probe in ("files", "scored") else ())


@pytest.mark.parametrize("name", settings())
def test_a_second_value_changes_what_a_run_does(name):
    probe, value = SECOND[name]
    beside = {k: v for k, v in BESIDE.get(name, {}).items() if k != name}
    before = config_tree.replace(BASE, beside)
    if name in FIRST:
        before = config_tree.replace(before, {name: FIRST[name]})
    after = config_tree.replace(before, {name: value})
    if name == "data.corpus":  # Without a file, own text has no legal first value.
        before = BASE
    assert found(probe, before) != found(probe, after)


def test_values_that_do_not_differ_change_nothing():
    """The probes themselves are repeatable, else the test above could not fail."""
    copy = dataclasses.replace(BASE)
    for name in ("init", "train_step", "eval_step", "batch", "corpus", "epochs", "devices", "prompt", "text"):
        assert PROBES[name](BASE) == PROBES[name](copy)
