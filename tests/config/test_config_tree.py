"""Tests of the tree of settings: dotted names, JSON, presets, what follows from other settings, what may change."""

import enum
import json
import re

import pytest

from txl_jax.config import COMPAT_PRESETS, Encoding, ExperimentConfig, ModelConfig, config_tree
from txl_jax.config.experiment import REMOVED, apply_preset, from_record
from txl_jax.errors import UserError

LEAVES = {leaf.name: leaf for leaf in config_tree.leaves(ExperimentConfig)}


def other_value(leaf):
    """Some other value of the same type."""
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
    changed = config_tree.replace(default, {name: other_value(leaf) for name, leaf in LEAVES.items()})
    for config in (default, changed):
        values = json.loads(json.dumps(config_tree.to_dict(config)))
        assert list(values) == names
        again = config_tree.from_dict(ExperimentConfig, values)
        assert again == config
        for name in names:
            assert type(config_tree.get(again, name)) is type(config_tree.get(config, name)), name
    found = [(leaf.name, before, after) for leaf, before, after in config_tree.differences(default, changed)]
    assert found == [(name, config_tree.get(default, name), config_tree.get(changed, name)) for name in names]


@pytest.mark.parametrize("name", REMOVED)
def test_a_record_may_have_a_removed_setting_at_its_default_only(name):
    record = config_tree.to_dict(ExperimentConfig())
    assert name not in record
    assert from_record(record | {name: REMOVED[name]}) == ExperimentConfig()
    with pytest.raises(UserError, match=rf"^{re.escape(name)} is \S+, but .*\beea3a51\b"):
        from_record(record | {name: 3})


def test_settings_of_a_record_that_are_read_otherwise():
    zeros = {"compat.memory_start": "zeros"}
    assert from_record(zeros) == config_tree.replace(ExperimentConfig(), {"model.compat.memory_start": "zeros"})
    documents = {"data.reset_at": "\\n"}
    assert from_record(documents | {"model.end_token": 3}) == from_record(documents)
    for before, now in (("lamb", "lamb_nvidia"), ("adam", "adam")):
        assert from_record({"compat.lamb": "nvidia", "optimizer.name": before}).optimizer.name == now


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("model.n_layers", 3, r"'model\.n_layers'.*\bmodel\.n_layer\b"),
        *(("model.n_layer", value, rf"^model\.n_layer .*{value!r}") for value in ("3", None, True, 2.5)),
        ("model.untie_r", 1, r"^model\.untie_r .*\b1\b"),
        ("model.encoding", "shav", r"^model\.encoding .*\bshaw\b.*'shav'"),
        ("model.cutoffs", 5, r"^model\.cutoffs .*\b5\b"),
        ("model.cutoffs", [5, "9"], r"^model\.cutoffs .*'9'"),
        ("data.file", ["a"], r"^data\.file .*\['a'\]"),
    ],
)
def test_an_unknown_setting_or_a_value_of_another_type_is_refused(name, value, pattern):
    with pytest.raises(UserError, match=pattern):
        config_tree.from_dict(ExperimentConfig, {name: value})


def test_presets_name_settings_and_change_them():
    for name, preset in COMPAT_PRESETS.items():
        assert set(preset) <= set(LEAVES)
        assert all(value != LEAVES[setting].default for setting, value in preset.items())
        config = apply_preset(ExperimentConfig(), name)
        config.validate()
        assert {leaf.name: after for leaf, _, after in config_tree.differences(ExperimentConfig(), config)} == preset
        assert apply_preset(apply_preset(ExperimentConfig(), "tf"), name) == config, "nothing of the one before is left"


def test_a_learned_encoding_needs_a_table():
    with pytest.raises(UserError, match=r"model\.num_positions must be set for model\.encoding=shaw, got none"):
        ModelConfig(encoding=Encoding.SHAW).clamp(5)


def marked(mark):
    return {name for name, leaf in LEAVES.items() if getattr(leaf.setting, mark)}


def test_which_settings_are_paths_and_which_a_resumed_run_may_change():
    """Only those that leave the trajectory alone. Other weights are another run; a text is compared by its digest."""
    texts = {f"data.{name}" for name in ("file", "train", "valid", "test", "tokenizer.vocab_file", "tokenizer.hf_file")}
    assert marked("path") == texts | {"generate.prompt_file", "init_from"}
    names = ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "sample_every", "patience")
    groups = {name for name in LEAVES if name.startswith(("mesh.", "eval.", "generate."))}
    others = {f"train.{name}" for name in names} | {"model.attention", "data.json_field"}
    assert marked("free_on_resume") == texts | groups | others
    assert marked("may_grow") == {"train.steps"}


def test_a_trained_run_keeps_what_makes_its_token_ids():
    names = ("kind", "newlines", "line_mark", "min_count", "vocab_size")
    assert marked("shapes_tokens") == {f"data.tokenizer.{name}" for name in names} | {"data.reset_at"}
