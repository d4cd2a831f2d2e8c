"""Tests the config tree: conflicts, ranges, names, JSON, presets, and what a resumed run may
change.
"""

import enum
import json
import re

import pytest

from txl_jax.config import COMPAT_PRESETS, Encoding, ExperimentConfig, ModelConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.errors import UserError


def test_every_number_has_a_range_and_is_refused_outside():
    """Except seeds, and `cutoffs`, whose entries depend on each other."""
    for leaf in config_tree.leaves(ExperimentConfig):
        declared = leaf.setting
        if leaf.type.kind not in (int, float) or leaf.name in (
            "seed",
            "generate.seed",
            "model.cutoffs",
        ):
            continue
        outside = [
            declared.above if declared.at_least is None else declared.at_least - 1,
            declared.below,
        ]
        outside += [] if declared.at_most is None else [declared.at_most + 1]
        outside += [float("nan")] if leaf.type.kind is float else []
        for value in (value for value in outside if value is not None):
            with pytest.raises(UserError, match=rf"^{re.escape(leaf.name)}\b.*{value}"):
                config_tree.replace(ExperimentConfig(), {leaf.name: value}).validate()
        assert outside[0] is not None, leaf.name


# Settings that do not go together, and what the message must name: settings and numbers.
LSTM = {"model.network": "lstm"}
WINDOW = {"eval.stride": 4, "eval.mem_len": 0, "eval.same_length": False}
SUBWORDS = {"data.tokenizer.kind": "subword"}
WORDS = {"data.tokenizer.kind": "word"}
CONFLICTS = [
    ({"model.d_model": 7}, "model.d_model 7"),
    ({"model.cutoffs": (10, 10)}, "model.cutoffs 10"),
    ({"model.cutoffs": (0, 10)}, "model.cutoffs 0 10"),
    ({"model.cutoffs": tuple(range(1, 1002))}, "model.cutoffs 1,000 1,001"),
    ({"model.cutoffs": (5,), "model.div_val": 1 << 60}, f"model.div_val 1048576 {1 << 60}"),
    ({"model.cutoffs": (5,), "model.tie_projs": (True,) * 3}, "tie_projs 3 2"),
    ({"model.div_val": 4}, "model.div_val 4 cutoffs"),
    ({"model.div_val": 4, "model.cutoffs": (5, 9), "model.d_model": 8}, "div_val 4 2 8"),
    ({"model.untie_r": True, "model.encoding": "vaswani"}, "model.untie_r vaswani"),
    ({"model.encoding": "al_rfou", "model.num_positions": 1}, "model.num_positions 1 2"),
    ({"model.num_positions": 8}, "model.num_positions 8 relative"),
    ({"model.tie_positions": True, "model.untie_r": True}, "tie_positions untie_r"),
    ({"model.tie_positions": True, "model.encoding": "vaswani"}, "tie_positions vaswani"),
    (LSTM | {"model.encoding": "vaswani"}, "model.encoding vaswani lstm"),
    (LSTM | {"model.tie_positions": True}, "tie_positions lstm"),
    (LSTM | {"model.dropout.qkv": 0.1}, "model.dropout.qkv 0.1 lstm"),
    (LSTM | {"train.stride": 4, "train.mem_len": 0}, "train.stride 4 lstm"),
    (LSTM | {"eval.weight_dtype": "int8"}, "eval.weight_dtype int8 lstm"),
    (LSTM | {"eval.cache_dtype": "int8"}, "eval.cache_dtype int8 lstm"),
    ({"data.corpus": "text"}, "data.file data.train"),
    ({"data.corpus": "text", "data.file": "a", "data.train": ("b",)}, "data.file data.train"),
    ({"data.corpus": "text", "data.train": ("b",)}, "data.train data.valid data.test"),
    ({"data.valid": ("b",)}, "data.valid enwik8 text"),
    ({"data.heldout": "published"}, "data.heldout published enwik8 lm1b"),
    (
        {"data.reset_at": "x", "model.network": "lstm"},
        "data.reset_at x model.network lstm transformer_xl",
    ),
    (
        {"data.reset_at": "x", "model.compat.memory_start": "zeros"},
        "data.reset_at x compat.memory_start zeros masked",
    ),
    ({"data.order": "sentences"}, "data.order sentences byte"),
    (
        WORDS | {"data.order": "sentences", "data.tokenizer.line_mark": "none"},
        "data.order line_mark none",
    ),
    (
        WORDS | {"data.order": "sentences", "data.roll": "rows"},
        "data.order sentences data.roll rows",
    ),
    (WORDS | {"data.tokenizer.newlines": "drop"}, "data.tokenizer.newlines drop word byte"),
    ({"data.tokenizer.min_count": 3}, "data.tokenizer.min_count 3 byte"),
    ({"data.tokenizer.line_mark": "s"}, "data.tokenizer.line_mark byte word"),
    (
        {"data.tokenizer.vocab_file": "words", "data.tokenizer.kind": "char"},
        "vocab_file words char word",
    ),
    (
        WORDS | {"data.tokenizer.vocab_file": "words", "data.tokenizer.min_count": 2},
        "min_count 2 words",
    ),
    (WORDS | {"data.tokenizer.hf_file": "m"}, "hf_file m word subword"),
    (
        SUBWORDS | {"data.tokenizer.hf_file": "m", "data.tokenizer.vocab_size": 900},
        "vocab_size 900 m",
    ),
    ({"data.tokenizer.vocab_size": 900}, "vocab_size 900 byte subword"),
    ({"optimizer.weight_decay": 0.1}, "optimizer.weight_decay 0.1 adam adamw"),
    ({"optimizer.name": "adamw"}, "optimizer.weight_decay adamw adam"),
    ({"optimizer.name": "adafactor", "optimizer.adam_b2": 0.9}, "optimizer.adam_b2 0.9 adafactor"),
    ({"optimizer.name": "muon", "optimizer.l2": 0.1}, "optimizer.l2 0.1 muon"),
    ({"optimizer.warmup_steps": 600, "train.steps": 400}, "warmup_steps 600 train.steps 400"),
    ({"optimizer.warmup_steps": 60, "optimizer.decay_steps": 50}, "warmup_steps 60 decay_steps 50"),
    ({"optimizer.decay_steps": 500, "train.steps": 400}, "decay_steps 500 train.steps 400"),
    (
        {"optimizer.embedding_lr_multiplier": 0.1, "optimizer.min_lr_ratio": 0.5},
        "min_lr_ratio 0.5 0.1",
    ),
    ({"average.start_step": 3, "average.nt_asgd_patience": 5}, "start_step 3 nt_asgd_patience 5"),
    ({"average.ema_decay": 0.9}, "average.ema_decay 0.9 average.start_step"),
    ({"average.start_step": 400_000}, "average.start_step 400000 train.steps"),
    ({"average.lr_scale": 0.5}, "average.lr_scale 0.5 average.start_step"),
    ({"train.stride": 600, "train.mem_len": 0}, "train.stride 600 train.segment_len"),
    ({"train.stride": 4}, "train.stride 4 train.mem_len"),
    (
        {"train.stride": 4, "train.mem_len": 0, "train.loss": "half"},
        "train.stride 4 train.loss half",
    ),
    ({"train.same_length": True, "train.mem_len": 0}, "train.same_length train.mem_len 0"),
    ({"train.grad_accum_steps": 4}, "train.grad_accum_steps 4 train.batch_size 22"),
    *(
        (
            {f"train.{name}": 1001, "train.segments_per_call": 8},
            f"train.{name} 1001 segments_per_call 8",
        )
        for name in ("steps", "log_every", "eval_every", "checkpoint_every")
    ),
    ({"train.sample_every": 6000}, "train.sample_every 6000 train.eval_every 4000"),
    (WINDOW | {"eval.stride": 600}, "eval.stride 600 eval.segment_len"),
    (WINDOW | {"eval.mem_len": 3}, "eval.stride 4 eval.mem_len"),
    (WINDOW | {"eval.weight_dtype": "int8"}, "eval.stride 4 eval.weight_dtype int8"),
    (WINDOW | {"eval.warmup_tokens": 5}, "eval.stride 4 eval.warmup_tokens 5"),
    (
        WINDOW | {"eval.stride": None, "eval.cache_dtype": "int8"},
        "eval.cache_dtype int8 eval.mem_len 0",
    ),
    ({"eval.mem_len": 0}, "eval.same_length eval.mem_len 0"),
    ({"eval.temperature": 1.1, "model.cutoffs": (5,)}, "eval.temperature 1.1 5"),
    ({"eval.temperature": 1.1, "model.d_embed": 8}, "eval.temperature 1.1 d_embed 8"),
    ({"generate.prompt": "a", "generate.prompt_file": "b"}, "generate.prompt generate.prompt_file"),
]


@pytest.mark.parametrize(("values", "words"), CONFLICTS, ids=[words for _, words in CONFLICTS])
def test_conflicts_are_refused_with_their_numbers(values, words):
    with pytest.raises(UserError) as error:
        config_tree.replace(ExperimentConfig(), values).validate()
    for word in words.split():
        assert re.search(rf"(?<!\w)(?<!\d\.){re.escape(word)}(?!\w|\.\d)", str(error.value)), (
            word,
            error.value,
        )


LEAVES = {leaf.name: leaf for leaf in config_tree.leaves(ExperimentConfig)}


def other_value(leaf):
    value = leaf.default
    if value is None:
        return {int: 3, float: 0.5, str: "x"}.get(leaf.type.kind) or next(iter(leaf.type.kind))
    if isinstance(value, enum.Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, {int: 7, bool: True, str: "x"}[leaf.type.kind])
    return value + ("x" if isinstance(value, str) else 1)


def test_every_setting_round_trips_through_json():
    names = list(LEAVES)
    assert len(names) == len(set(names)) > 50
    default = ExperimentConfig()
    changed = config_tree.replace(
        default, {name: other_value(leaf) for name, leaf in LEAVES.items()}
    )
    for config in (default, changed):
        values = json.loads(json.dumps(config_tree.to_dict(config)))
        assert list(values) == names
        again = config_tree.from_dict(ExperimentConfig, values)
        assert again == config
        for name in names:
            assert type(config_tree.get(again, name)) is type(config_tree.get(config, name)), name
    found = [
        (leaf.name, before, after)
        for leaf, before, after in config_tree.differences(default, changed)
    ]
    assert found == [
        (name, config_tree.get(default, name), config_tree.get(changed, name)) for name in names
    ]


def test_an_unknown_setting_or_a_value_of_another_type_is_refused():
    for name, value, pattern in (
        ("model.n_layers", 3, r"'model\.n_layers'.*\bmodel\.n_layer\b"),
        *(
            ("model.n_layer", value, rf"^model\.n_layer .*{value!r}")
            for value in ("3", None, True, 2.5)
        ),
        ("model.untie_r", 1, r"^model\.untie_r .*\b1\b"),
        ("model.encoding", "shav", r"^model\.encoding .*\bshaw\b.*'shav'"),
        ("model.cutoffs", 5, r"^model\.cutoffs .*\b5\b"),
        ("model.cutoffs", [5, "9"], r"^model\.cutoffs .*'9'"),
        ("data.file", ["a"], r"^data\.file .*\['a'\]"),
    ):
        with pytest.raises(UserError, match=pattern):
            config_tree.from_dict(ExperimentConfig, {name: value})


def test_presets_name_settings_and_change_them():
    for name, preset in COMPAT_PRESETS.items():
        assert set(preset) <= set(LEAVES)
        assert all(value != LEAVES[setting].default for setting, value in preset.items())
        config = apply_preset(ExperimentConfig(), name)
        config.validate()
        assert {
            leaf.name: after
            for leaf, _, after in config_tree.differences(ExperimentConfig(), config)
        } == preset
        assert apply_preset(apply_preset(ExperimentConfig(), "tf"), name) == config, (
            "nothing of the one before is left"
        )


def test_a_learned_encoding_needs_a_table():
    with pytest.raises(
        UserError, match=r"model\.num_positions must be set for model\.encoding=shaw, got none"
    ):
        ModelConfig(encoding=Encoding.SHAW).clamp(5)


def marked(mark):
    return {name for name, leaf in LEAVES.items() if getattr(leaf.setting, mark)}


def test_which_settings_are_paths_and_which_a_resumed_run_may_change():
    """Only those that leave the trajectory alone.

    Other weights are another run; a text is compared by its digest.
    """
    texts = {
        f"data.{name}"
        for name in ("file", "train", "valid", "test", "tokenizer.vocab_file", "tokenizer.hf_file")
    }
    assert marked("path") == texts | {"generate.prompt_file", "init_from"}
    names = (
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_every",
        "patience",
    )
    groups = {name for name in LEAVES if name.startswith(("mesh.", "eval.", "generate."))}
    others = {f"train.{name}" for name in names}
    others |= {"model.attention", "model.remat", "data.json_field"}
    assert marked("free_on_resume") == texts | groups | others
    assert marked("may_grow") == {"train.steps"}
    names = ("kind", "newlines", "line_mark", "min_count", "vocab_size")
    assert marked("shapes_tokens") == {f"data.tokenizer.{name}" for name in names} | {
        "data.reset_at"
    }
    sizes = (
        "n_layer",
        "d_model",
        "n_head",
        "d_head",
        "d_inner",
        "d_embed",
        "num_positions",
        "cutoffs",
        "div_val",
    )
    ties = ("untie_r", "tie_positions", "tie_weight", "tie_projs")
    others = ("network", "encoding", "layer_norm", "compat.shaw_terms", "compat.final_norm")
    assert marked("shapes_params") == {f"model.{name}" for name in (*sizes, *ties, *others)}
