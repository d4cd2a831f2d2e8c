"""Tests that every setting is read: a second value of it changes something that a run does."""

import dataclasses
import functools

import numpy as np
import pytest

from support import hf_tokenizers, miniature
from support.cases import nightly_but
from support.setting_probes import BASE, PROBES, parts_of
from txl_jax.config import CorpusName
from txl_jax.config import tree as config_tree
from txl_jax.data import published

# Where each setting must show, and its second value.
SECOND = {
    "seed": ("init", 5),
    "init_from": ("first_weights", "weights"),
    "init_vocabulary": ("first_weights", "kept"),
    "model.network": ("shapes", "lstm"),
    "model.n_layer": ("shapes", 3),
    "model.d_model": ("shapes", 14),
    "model.n_head": ("shapes", 3),
    "model.d_head": ("shapes", 6),
    "model.d_inner": ("shapes", 15),
    "model.d_embed": ("shapes", 20),
    "model.dropout.rate": ("forward", 0.2),
    **dict.fromkeys(
        [f"model.dropout.{name}" for name in ("attention", "input", "output", "qkv", "embedding", "weight")],
        ("forward", 0.3),
    ),
    "model.dropout.locked": ("forward", True),
    "model.layer_norm": ("forward", "post"),
    "model.residual": ("shapes", "gated"),
    "model.attention": ("forward", "tiled"),
    "model.encoding": ("shapes", "vaswani"),
    "model.num_positions": ("shapes", 20),
    "model.untie_r": ("shapes", True),
    "model.tie_positions": ("shapes", True),
    "model.tie_weight": ("shapes", False),
    "model.cutoffs": ("shapes", (90, 200)),
    "model.div_val": ("shapes", 1),
    "model.tie_projs": ("shapes", (False, False, True)),
    "model.init_std": ("init", 0.03),
    "model.projection_init_std": ("init", 0.03),
    "model.dtype": ("forward", "bfloat16"),
    "model.remat": ("train_step", "full"),
    "compat.memory_start": ("train_step", "zeros"),
    "compat.same_length_window": ("forward", "mem_len_plus_one"),
    "compat.layer_norm_eps": ("forward", 1e-12),
    "compat.shaw_terms": ("shapes", "original"),
    "compat.final_norm": ("shapes", False),
    "compat.lamb": ("update", "nvidia"),
    "optimizer.name": ("update", "lion"),
    "optimizer.mu_dtype": ("update", "bfloat16"),
    "optimizer.schedule_offset": ("update", "original"),
    "optimizer.min_lr_ratio": ("update", 0.1),
    "data.corpus": ("corpus", "python_stdlib"),
    "data.file": ("corpus", "other.txt"),
    **{f"data.{split}": ("corpus", ("other.txt",)) for split in ("train", "valid", "test")},
    "data.tokenizer.kind": ("corpus", "word"),
    "data.tokenizer.newlines": ("corpus", "drop"),
    "data.tokenizer.lower_case": ("corpus", True),
    "data.tokenizer.line_mark": ("corpus", "s"),
    "data.tokenizer.empty_end": ("corpus", "keep"),
    "data.tokenizer.min_count": ("corpus", 200),
    "data.tokenizer.vocab_file": ("corpus", "prompt.txt"),
    "data.tokenizer.hf_file": ("corpus", "tokenizer.json"),
    "data.tokenizer.vocab_size": ("corpus", 300),
    "data.tokenizer.bin_type": ("corpus", "uint32"),
    "data.reset_at": ("end_token", "\\n"),
    "model.end_token": ("train_step", 3),
    "data.heldout": ("corpus", "published"),
    "data.order": ("epochs", "sentences"),
    "data.roll": ("epochs", "rows"),
    "data.epoch_memory": ("epochs", "carried"),
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
    **{f"mesh.{name}": ("devices", 2) for name in ("data", "dcn_data", "fsdp", "tensor")},
    "train.steps": ("train_step", 10),
    "train.batch_size": ("batch", 3),
    "train.grad_accum_steps": ("train_step", 2),
    "train.segment_len": ("batch", 8),
    "train.mem_len": ("train_step", 6),
    "train.stride": ("epochs", 3),
    "train.clamp_len": ("train_step", 3),
    "train.same_length": ("train_step", False),
    "train.loss": ("train_step", "half"),
    "regularization.activation_l2": ("train_step", 0.1),
    "regularization.temporal_l2": ("train_step", 0.1),
    "regularization.adversarial": ("train_step", 0.01),
    "train.segments_per_call": ("batch", 4),
    **{f"train.{name}_every": ("files", 2) for name in ("log", "eval", "checkpoint")},
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
    "eval.cache_dtype": ("eval_step", "bfloat16"),
    "eval.weight_dtype": ("eval_step", "int8"),
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
    "init_vocabulary": FULL_SOFTMAX | {"data.tokenizer.kind": "word", "init_from": "weights"},
    "train.patience": RISING,
    "average.nt_asgd_patience": RISING | {"average.nt_asgd_patience": 10**6},
    **{f"average.{name}": {"average.start_step": 0} for name in ("lr_scale", "ema_decay")},
    **{f"{group}.stride": {f"{group}.mem_len": 0, f"{group}.same_length": False} for group in ("train", "eval")},
    **dict.fromkeys(("regularization.adversarial", "eval.temperature"), FULL_SOFTMAX),
    "compat.lamb": {"optimizer.name": "lamb"},
    "optimizer.weight_decay": {"optimizer.name": "lion"},
    "model.num_positions": {"model.encoding": "al_rfou"},
    "compat.shaw_terms": {"model.encoding": "shaw", "model.num_positions": 12},
    "data.corpus": {"data.file": None},
    **{
        name: {"data.tokenizer.kind": "word"}
        for name in ("data.tokenizer.line_mark", "data.tokenizer.min_count", "data.tokenizer.vocab_file")
    },
    "data.tokenizer.lower_case": {"data.tokenizer.kind": "char"},
    "data.tokenizer.empty_end": {"data.tokenizer.kind": "word", "data.file": "empty-end.txt"},
    "data.tokenizer.hf_file": {"data.tokenizer.kind": "subword"},
    **{
        f"data.tokenizer.{name}": {"data.tokenizer.kind": "id", "data.file": "ids.bin"}
        for name in ("vocab_size", "bin_type")
    },
    "data.heldout": {"data.file": None, "data.corpus": "lm1b", "data.tokenizer.kind": "word"},
    "data.order": {"data.tokenizer.kind": "word"},
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


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """The files that the settings name."""
    rng = np.random.default_rng(0)
    for name in ("words.txt", "other.txt"):
        (tmp_path / name).write_text("\n".join(rng.choice(["one", "two", "Three"], 300)))
    (rng.integers(0, 200, 300) | 1).astype("<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "trained.txt").write_text("three four\n" * 300)
    for name, size in (("tokenizer.json", 290), ("other.json", 280)):
        (tmp_path / name).write_text(hf_tokenizers.byte_level(size=size))
    (tmp_path / "empty-end.txt").write_text("one two\n" * 300 + "\n\n")
    monkeypatch.setitem(published.CORPORA, CorpusName.LM1B, miniature.corpus(CorpusName.LM1B))
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


# Probes that take milliseconds run by default, but for settings whose text takes longer to make.
QUICK_PROBES = ("batch", "corpus", "devices", "end_token", "epochs", "prompt")
LONGER = ("data.corpus", "data.heldout")
# One setting stands for the others of each of these probes.
ONE_EACH = ("model.untie_r", "optimizer.schedule_offset", "train.loss", "eval.clamp_len")
QUICK = [name for name, (probe, _) in SECOND.items() if probe in QUICK_PROBES and name not in LONGER] + [*ONE_EACH]


@pytest.mark.parametrize("name", nightly_but(QUICK, SECOND))
def test_a_second_value_changes_what_a_run_does(name):
    probe, value = SECOND[name]
    before = config_tree.replace(BASE, {k: v for k, v in BESIDE.get(name, {}).items() if k != name})
    if name in FIRST:
        before = config_tree.replace(before, {name: FIRST[name]})
    after = config_tree.replace(before, {name: value})
    if name == "data.corpus":  # Without a file, own text has no legal first value.
        before = BASE
    assert found(probe, before) != found(probe, after)


@pytest.mark.parametrize("probe", nightly_but(QUICK_PROBES, (*READ_NO_FILE, *QUICK_PROBES[1:])))
def test_values_that_do_not_differ_change_nothing(probe):
    """The probes themselves are repeatable, else the test above could not fail."""
    parts_of.cache_clear()
    assert found(probe, BASE) == PROBES[probe](dataclasses.replace(BASE))
