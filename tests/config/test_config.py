"""Tests of the config tree: every conflict is refused with its numbers, and dicts round-trip."""

import dataclasses
import re

import pytest

from txl_jax.config import (
    COMPAT_PRESETS,
    CacheDType,
    CorpusName,
    DType,
    EmptyEnd,
    Encoding,
    ExperimentConfig,
    Heldout,
    LineMark,
    LossPart,
    ModelConfig,
    Network,
    Newlines,
    NormPlace,
    OptimizerName,
    Order,
    Residual,
    Roll,
    Tokenizer,
    WeightDType,
)
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError

# (changed settings, what the message must name: the settings and every number of the conflict)
CONFLICTS = [
    *(({f"model.{name}": 0}, (f"model.{name}", "0")) for name in ("n_layer", "d_model", "n_head")),
    *(({f"model.{name}": -3}, (f"model.{name}", "-3")) for name in ("d_head", "d_inner", "div_val")),
    ({"model.d_model": 7}, ("model.d_model", "7")),
    ({"model.d_embed": -1}, ("model.d_embed", "-1")),
    ({"model.dropout.rate": 1.0}, ("model.dropout.rate", "1.0")),
    ({"model.dropout.attention": -0.1}, ("model.dropout.attention", "-0.1")),
    ({"model.cutoffs": (20, 10)}, ("model.cutoffs", "[20, 10]")),
    ({"model.cutoffs": (10, 10)}, ("model.cutoffs", "[10, 10]")),
    ({"model.cutoffs": (0, 10)}, ("model.cutoffs", "[0, 10]")),
    ({"model.cutoffs": (5,), "model.tie_projs": (True,) * 3}, ("tie_projs", "3", "2")),
    ({"model.div_val": 4}, ("model.div_val", "4", "cutoffs")),
    ({"model.div_val": 4, "model.cutoffs": (5, 9), "model.d_model": 8}, ("div_val", "4", "2", "8")),
    ({"model.untie_r": True, "model.encoding": Encoding.VASWANI}, ("model.untie_r", "vaswani")),
    ({"model.encoding": Encoding.AL_RFOU, "model.num_positions": 1}, ("model.num_positions", "1", "at least 2")),
    ({"model.num_positions": 8}, ("model.num_positions", "8", "relative")),
    ({"eval.temperature": 0.0}, ("eval.temperature", "0.0")),
    ({"eval.temperature": 1.1, "model.cutoffs": (5,)}, ("eval.temperature", "1.1", "[5]")),
    ({"regularization.adversarial": 0.1, "model.d_embed": 8}, ("regularization.adversarial", "0.1", "d_embed", "8")),
    ({"model.dropout.weight": 0.1, "model.network": Network.LSTM}, ("model.dropout.weight", "0.1", "lstm")),
    *(
        ({f"model.dropout.{name}": rate}, (f"model.dropout.{name}", f"{rate}", "at least 0 and below 1"))
        for name in ("input", "output", "qkv", "embedding", "weight")
        for rate in (1.0, -0.5)
    ),
    (
        {"average.start_step": 3, "average.nt_asgd_patience": 5},
        ("average.start_step", "3", "average.nt_asgd_patience", "5"),
    ),
    ({"average.ema_decay": 0.9}, ("average.ema_decay", "0.9", "average.start_step")),
    ({"average.start_step": 400_000}, ("average.start_step", "400000", "train.steps", "400000")),
    ({"model.network": Network.LSTM, "model.encoding": Encoding.VASWANI}, ("model.encoding", "vaswani", "lstm")),
    ({"train.patience": -1}, ("train.patience", "-1")),
    ({"optimizer.embedding_lr_multiplier": 0.0}, ("optimizer.embedding_lr_multiplier", "0.0")),
    ({"compat.layer_norm_eps": 0.0}, ("compat.layer_norm_eps", "0.0")),
    ({"optimizer.min_lr_ratio": 1.5}, ("optimizer.min_lr_ratio", "1.5")),
    ({"data.corpus": CorpusName.TEXT}, ("--data.file=PATH", "--data.train")),
    (
        {"data.tokenizer.kind": Tokenizer.WORD, "data.tokenizer.newlines": Newlines.DROP},
        ("data.tokenizer.newlines", "drop", "word", "byte"),
    ),
    ({"data.tokenizer.lower_case": True}, ("data.tokenizer.lower_case", "True", "byte", "char, word, sentencepiece")),
    ({"data.tokenizer.min_count": 3}, ("data.tokenizer.min_count", "3", "byte", "char, word")),
    ({"data.tokenizer.min_count": 0}, ("data.tokenizer.min_count", "0", "at least 1")),
    (
        {"data.tokenizer.vocab_file": "words", "data.tokenizer.kind": Tokenizer.CHAR},
        ("data.tokenizer.vocab_file", "words", "char", "word"),
    ),
    (
        {"data.tokenizer.vocab_file": "words", "data.tokenizer.kind": Tokenizer.WORD, "data.tokenizer.min_count": 2},
        ("data.tokenizer.min_count", "2", "'words'"),
    ),
    (
        {"data.tokenizer.sentencepiece_model": "m", "data.tokenizer.kind": Tokenizer.WORD},
        ("data.tokenizer.sentencepiece_model", "m", "word", "sentencepiece"),
    ),
    (
        {"data.tokenizer.kind": Tokenizer.SENTENCEPIECE, "data.tokenizer.line_mark": LineMark.S},
        ("data.tokenizer.line_mark", "s", "eos", "none"),
    ),
    (
        {
            "data.tokenizer.kind": Tokenizer.SENTENCEPIECE,
            "data.tokenizer.sentencepiece_model": "m",
            "data.tokenizer.sentencepiece_vocab": 9,
        },
        ("data.tokenizer.sentencepiece_vocab", "9", "'m'"),
    ),
    ({"data.tokenizer.sentencepiece_vocab": 9}, ("data.tokenizer.sentencepiece_vocab", "9", "byte", "sentencepiece")),
    (
        {"data.tokenizer.kind": Tokenizer.SENTENCEPIECE, "data.tokenizer.sentencepiece_vocab": 0},
        ("data.tokenizer.sentencepiece_vocab", "0"),
    ),
    ({"data.tokenizer.line_mark": LineMark.S}, ("data.tokenizer.line_mark", "s", "byte", "word, sentencepiece")),
    (
        {
            "data.corpus": CorpusName.PTB,
            "data.tokenizer.kind": Tokenizer.WORD,
            "data.tokenizer.empty_end": EmptyEnd.KEEP,
        },
        ("data.tokenizer.empty_end", "keep", "ptb", "text"),
    ),
    ({"data.heldout": Heldout.PUBLISHED}, ("data.heldout", "published", "enwik8", "lm1b")),
    ({"data.order": Order.SENTENCES}, ("data.order", "sentences", "byte")),
    (
        {
            "data.order": Order.SENTENCES,
            "data.tokenizer.kind": Tokenizer.WORD,
            "data.tokenizer.line_mark": LineMark.NONE,
        },
        ("data.order", "sentences", "data.tokenizer.line_mark", "none"),
    ),
    (
        {"data.order": Order.SENTENCES, "data.tokenizer.kind": Tokenizer.WORD, "data.roll": Roll.ROWS},
        ("data.order", "sentences", "data.roll", "rows"),
    ),
    ({"eval.warmup_tokens": -1}, ("eval.warmup_tokens", "-1")),
    (
        {"data.corpus": CorpusName.TEXT, "data.file": "a", "data.train": ("b",)},
        ("data.file", "'a'", "data.train"),
    ),
    (
        {"data.corpus": CorpusName.TEXT, "data.train": ("b",)},
        ("data.train", "data.valid", "data.test"),
    ),
    ({"data.valid": ("b",)}, ("data.valid", "enwik8", "text")),
    *(
        ({f"optimizer.{name}": 0.0}, (f"optimizer.{name}", "0.0"))
        for name in ("learning_rate", "adam_eps", "clip_norm")
    ),
    *(({f"optimizer.{name}": 1.0}, (f"optimizer.{name}", "1.0")) for name in ("adam_b1", "adam_b2")),
    ({"optimizer.weight_decay": 0.1}, ("optimizer.weight_decay", "0.1", "optimizer.name", "adam", "adamw")),
    ({"optimizer.name": OptimizerName.ADAMW}, ("optimizer.name", "adamw", "optimizer.weight_decay", "0.0", "adam")),
    *(
        ({"optimizer.name": name, f"optimizer.{setting}": value}, (f"optimizer.{setting}", f"{value}", f"is {name}"))
        for name, setting, value in (
            (OptimizerName.ADAFACTOR, "mu_dtype", DType.BFLOAT16),
            (OptimizerName.ADAFACTOR, "adam_b1", 0.8),
            (OptimizerName.LION, "adam_b2", 0.9),
            (OptimizerName.MUON, "l2", 0.1),
        )
    ),
    ({"optimizer.warmup_steps": -1}, ("optimizer.warmup_steps", "-1")),
    ({"optimizer.warmup_steps": 600, "train.steps": 400}, ("warmup_steps", "600", "train.steps", "400")),
    ({"optimizer.warmup_steps": 60, "optimizer.decay_steps": 50}, ("warmup_steps", "60", "decay_steps", "50")),
    ({"optimizer.decay_steps": 500, "train.steps": 400}, ("decay_steps", "500", "train.steps", "400")),
    ({"optimizer.decay_steps": -1}, ("optimizer.decay_steps", "-1")),
    *(({f"optimizer.{name}": -1}, (f"optimizer.{name}", "-1.0")) for name in ("l2", "weight_decay")),
    *(
        ({f"regularization.{name}": -0.5}, (f"regularization.{name}", "-0.5"))
        for name in ("activation_l2", "temporal_l2", "adversarial")
    ),
    *(
        ({f"average.{name}": value}, (f"average.{name}", f"{value}"))
        for name, value in (("start_step", -1), ("nt_asgd_patience", 0), ("ema_decay", 0.0), ("ema_decay", 1.0))
    ),
    *(({f"model.{name}": -0.1}, (f"model.{name}", "-0.1")) for name in ("init_std", "projection_init_std")),
    ({"eval.average_checkpoints": 0}, ("eval.average_checkpoints", "0", "none")),
    ({"eval.cache_dtype": None, "eval.stride": 0}, ("eval.stride", "0", "none")),
    ({"optimizer.learning_rate": float("nan")}, ("optimizer.learning_rate", "nan")),
    (
        {"optimizer.embedding_lr_multiplier": 0.1, "optimizer.min_lr_ratio": 0.5},
        ("min_lr_ratio", "0.5", "embedding_lr_multiplier", "0.1"),
    ),
    ({"average.lr_scale": 0.5}, ("average.lr_scale", "0.5", "average.start_step", "None")),
    ({"average.lr_scale": 0.0, "average.start_step": 3}, ("average.lr_scale", "0.0")),
    ({"model.tie_positions": True, "model.untie_r": True}, ("tie_positions", "untie_r", "True")),
    ({"model.tie_positions": True, "model.encoding": Encoding.VASWANI}, ("tie_positions", "encoding", "vaswani")),
    ({"model.residual": Residual.GATED}, ("model.residual", "gated", "layer_norm", "pre")),
    (
        {"model.residual": Residual.GATED, "model.layer_norm": NormPlace.PRE, "model.network": Network.LSTM},
        ("model.residual", "gated", "lstm"),
    ),
    ({"model.tie_positions": True, "model.network": Network.LSTM}, ("tie_positions", "True", "network", "lstm")),
    (
        {"train.stride": 4, "train.mem_len": 0, "model.network": Network.LSTM},
        ("train.stride", "4", "network", "lstm"),
    ),
    ({"model.dropout.qkv": 0.1, "model.network": Network.LSTM}, ("model.dropout.qkv", "0.1", "model.network", "lstm")),
    *(
        ({f"{group}.stride": 600, f"{group}.mem_len": 0}, (f"{group}.stride", "600", f"{group}.segment_len"))
        for group in ("train", "eval")
    ),
    *(({f"{group}.stride": 4}, (f"{group}.stride", "4", f"{group}.mem_len")) for group in ("train", "eval")),
    (
        {"train.stride": 4, "train.mem_len": 0, "train.loss": LossPart.HALF},
        ("train.stride", "4", "train.loss", "half"),
    ),
    (
        {"eval.stride": 4, "eval.mem_len": 0, "eval.same_length": False, "eval.weight_dtype": WeightDType.INT8},
        ("eval.stride", "4", "eval.weight_dtype", "int8"),
    ),
    (
        {"model.network": Network.LSTM, "eval.weight_dtype": WeightDType.INT8},
        ("eval.weight_dtype", "int8", "model.network", "lstm"),
    ),
    (
        {"model.network": Network.LSTM, "eval.cache_dtype": CacheDType.INT8},
        ("eval.cache_dtype", "int8", "model.network", "lstm"),
    ),
    (
        {"eval.mem_len": 0, "eval.same_length": False, "eval.cache_dtype": CacheDType.INT8},
        ("eval.cache_dtype", "int8", "eval.mem_len", "0"),
    ),
    (
        {"eval.stride": 4, "eval.mem_len": 0, "eval.same_length": False, "eval.warmup_tokens": 5},
        ("eval.stride", "4", "eval.warmup_tokens", "5"),
    ),
    ({"mesh.data": -1}, ("mesh.data", "-1")),
    *(({f"mesh.{name}": 0}, (f"mesh.{name}", "0")) for name in ("data", "fsdp", "tensor")),
    *(
        ({f"{group}.{name}": 0}, (f"{group}.{name}", "0"))
        for group in ("train", "eval")
        for name in ("batch_size", "segment_len", "segments_per_call")
    ),
    *(
        ({f"{group}.{name}": -2}, (f"{group}.{name}", "-2"))
        for group in ("train", "eval")
        for name in ("mem_len", "clamp_len")
    ),
    *(
        ({f"{group}.same_length": True, f"{group}.mem_len": 0}, (f"{group}.same_length", f"{group}.mem_len", "0"))
        for group in ("train", "eval")
    ),
    ({"train.grad_accum_steps": 0}, ("train.grad_accum_steps", "0", "at least 1")),
    ({"train.grad_accum_steps": 4}, ("train.grad_accum_steps", "4", "train.batch_size", "22")),
    ({"train.keep_checkpoints": 0}, ("train.keep_checkpoints", "0")),
    ({"train.steps": 0}, ("train.steps", "0")),
    *(
        ({f"train.{name}": 1001, "train.segments_per_call": 8}, (f"train.{name}", "1001", "segments_per_call", "8"))
        for name in ("steps", "log_every", "eval_every", "checkpoint_every")
    ),
    ({"eval.valid_tokens": 1}, ("eval.valid_tokens", "1")),
    ({"generate.prompt": "a", "generate.prompt_file": "b"}, ("generate.prompt", "generate.prompt_file")),
    *(({f"generate.{name}": 0}, (f"generate.{name}", "0")) for name in ("length", "samples")),
    ({"generate.temperature": -1.0}, ("generate.temperature", "-1.0")),
    ({"generate.top_k": -1}, ("generate.top_k", "-1")),
    *(({"generate.top_p": p}, ("generate.top_p", f"{p}")) for p in (0.0, 1.1)),
]


@pytest.mark.parametrize(("values", "words"), CONFLICTS, ids=[" ".join(values) for values, _ in CONFLICTS])
def test_conflicts_are_refused_with_their_numbers(values, words):
    config = config_tree.replace(ExperimentConfig(), values)
    with pytest.raises(UserError) as error:
        config.validate()
    for word in words:
        assert re.search(rf"(?<!\w)(?<!\d\.){re.escape(word)}(?!\w|\.\d)", str(error.value)), (word, error.value)


def test_the_defaults_go_together():
    ExperimentConfig().validate()


@pytest.mark.parametrize("name", COMPAT_PRESETS)
def test_compat_presets_go_together(name):
    config_tree.apply_preset(ExperimentConfig(), name).validate()


def test_compat_presets_differ():
    assert len({config_tree.apply_preset(ExperimentConfig(), name) for name in COMPAT_PRESETS}) == len(COMPAT_PRESETS)


def test_edges_that_are_allowed():
    values = {"train.mem_len": 0, "eval.mem_len": 0, "eval.same_length": False, "model.dropout.rate": 0.0}
    config_tree.replace(ExperimentConfig(), values).validate()
    adaptive = {
        "model.cutoffs": (5, 9),
        "model.div_val": 4,
        "model.d_model": 16,
        "model.tie_projs": (False, True, True),
    }
    config_tree.replace(ExperimentConfig(), adaptive).validate()


def test_clusters_must_fit_the_vocabulary():
    model = ModelConfig(cutoffs=(10, 20))
    model.validate_vocabulary(21)
    with pytest.raises(UserError, match=r"cutoffs\D*\b20\b\D*\b20\b"):
        model.validate_vocabulary(20)


def test_widths_of_clusters():
    model = ModelConfig(d_model=32, d_embed=20, cutoffs=(10, 20), div_val=4)
    assert (model.n_cluster, [model.cluster_width(c) for c in range(3)]) == (3, [20, 5, 1])
    assert ModelConfig(d_model=32).embed_width == 32


def test_the_config_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ExperimentConfig().model.n_layer = 3
