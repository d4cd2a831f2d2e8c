"""Tests that every setting is read: a second value of it changes something that a run does."""

import dataclasses
import functools

import numpy as np
import pytest

from support import hf_tokenizers, miniature
from support.setting_probes import BASE, PROBES, parts_of
from txl_jax.config import (
    AttentionPath,
    AttentionWindow,
    CacheDType,
    CorpusName,
    DType,
    EmptyEnd,
    Encoding,
    EpochMemory,
    Heldout,
    IdType,
    InitVocabulary,
    LambRule,
    LineMark,
    LossPart,
    MemoryStart,
    Network,
    Newlines,
    NormPlace,
    OptimizerName,
    Order,
    Remat,
    Residual,
    Roll,
    ScheduleOffset,
    ShawTerms,
    Tokenizer,
    WeightDType,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.sources import corpora
from txl_jax.data.sources.text import File
from txl_jax.data.tokens import sentencepiece as pieces_lib

# Where each setting must show, and its second value.
SECOND = {
    "seed": ("init", 5),
    "init_from": ("first_weights", "weights"),
    "init_vocabulary": ("first_weights", InitVocabulary.KEPT),
    "model.network": ("shapes", Network.LSTM),
    "model.n_layer": ("shapes", 3),
    "model.d_model": ("shapes", 14),
    "model.n_head": ("shapes", 3),
    "model.d_head": ("shapes", 6),
    "model.d_inner": ("shapes", 15),
    "model.d_embed": ("shapes", 20),
    "model.dropout.rate": ("forward", 0.2),
    "model.dropout.attention": ("forward", 0.3),
    "model.dropout.input": ("forward", 0.3),
    "model.dropout.output": ("forward", 0.3),
    "model.dropout.locked": ("forward", True),
    "model.dropout.qkv": ("forward", 0.3),
    "model.dropout.embedding": ("forward", 0.3),
    "model.dropout.weight": ("forward", 0.3),
    "model.layer_norm": ("forward", NormPlace.POST),
    "model.residual": ("shapes", Residual.GATED),
    "model.attention": ("forward", AttentionPath.TILED),
    "model.encoding": ("shapes", Encoding.VASWANI),
    "model.num_positions": ("shapes", 20),
    "model.untie_r": ("shapes", True),
    "model.tie_positions": ("shapes", True),
    "model.tie_weight": ("shapes", False),
    "model.cutoffs": ("shapes", (90, 200)),
    "model.div_val": ("shapes", 1),
    "model.tie_projs": ("shapes", (False, False, True)),
    "model.init_std": ("init", 0.03),
    "model.projection_init_std": ("init", 0.03),
    "model.dtype": ("forward", DType.BFLOAT16),
    "model.remat": ("train_step", Remat.FULL),
    "compat.memory_start": ("train_step", MemoryStart.ZEROS),
    "compat.same_length_window": ("forward", AttentionWindow.MEM_LEN_PLUS_ONE),
    "compat.layer_norm_eps": ("forward", 1e-12),
    "compat.shaw_terms": ("shapes", ShawTerms.ORIGINAL),
    "compat.final_norm": ("shapes", False),
    "compat.lamb": ("update", LambRule.NVIDIA),
    "optimizer.name": ("update", OptimizerName.LION),
    "optimizer.mu_dtype": ("update", DType.BFLOAT16),
    "optimizer.schedule_offset": ("update", ScheduleOffset.ORIGINAL),
    "optimizer.min_lr_ratio": ("update", 0.1),
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
    "data.reset_at": ("end_token", "\\n"),
    "model.end_token": ("train_step", 3),
    "data.heldout": ("corpus", Heldout.PUBLISHED),
    "data.order": ("epochs", Order.SENTENCES),
    "data.roll": ("epochs", Roll.ROWS),
    "data.epoch_memory": ("epochs", EpochMemory.CARRIED),
    "optimizer.learning_rate": ("update", 1e-3),
    "optimizer.warmup_steps": ("update", 3),
    "optimizer.adam_b1": ("update", 0.8),
    "optimizer.adam_b2": ("update", 0.9),
    "optimizer.adam_eps": ("update", 1e-6),
    "optimizer.clip_norm": ("update", 1.0),
    "optimizer.decay_steps": ("update", 6),
    "optimizer.l2": ("update", 0.1),
    "optimizer.weight_decay": ("update", 0.1),
    "optimizer.embedding_lr_multiplier": ("update", 2.0),
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
    "average.lr_scale": ("update", 0.5),
    "average.ema_decay": ("train_step", 0.9),
    "eval.batch_size": ("batch", 3),
    "eval.segment_len": ("batch", 5),
    "eval.mem_len": ("eval_step", 8),
    "eval.stride": ("files", 2),
    "eval.clamp_len": ("eval_step", 5),
    "eval.same_length": ("eval_step", False),
    "eval.segments_per_call": ("batch", 3),
    "eval.cache_dtype": ("eval_step", CacheDType.BFLOAT16),
    "eval.weight_dtype": ("eval_step", WeightDType.INT8),
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
    "compat.lamb": {"optimizer.name": OptimizerName.LAMB},
    "optimizer.weight_decay": {"optimizer.name": OptimizerName.LION},
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


def test_the_table_names_every_setting():
    assert set(SECOND) == {leaf.name for leaf in config_tree.leaves()}


READ_NO_FILE = ("shapes", "init", "forward", "update", "train_step", "eval_step", "batch", "text")


@functools.cache
def of_many(probe, config):
    """Runs a probe that reads no file once per config: many settings are compared with the same first one."""
    return PROBES[probe](config)


def found(probe, config):
    """Runs a probe, or takes what it found before."""
    return of_many(probe, config) if probe in READ_NO_FILE else PROBES[probe](config)


def settings():
    """The names of all settings. Those that show in whole runs only are slow; other tests run them too."""
    for name, (probe, _) in SECOND.items():
        yield pytest.param(name, marks=pytest.mark.slow if probe in ("files", "scored") else ())


@pytest.mark.parametrize("name", list(settings()))
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
    parts_of.cache_clear()
    for name in (*READ_NO_FILE, "corpus", "epochs", "devices", "prompt"):
        assert found(name, BASE) == PROBES[name](copy)
