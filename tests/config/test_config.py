"""Tests the config tree: conflicts, ranges, names, JSON, presets, and what a resumed run may
change.
"""

import enum
import json
import re

import pytest

from txl_jax.cli.flag_tree import SettingParser
from txl_jax.config import COMPAT_PRESETS, Encoding, ExperimentConfig, ModelConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.errors import UserError

LEAVES = {leaf.name: leaf for leaf in config_tree.leaves(ExperimentConfig)}

# Any seed is allowed, and the entries of `cutoffs` depend on each other.
WITHOUT_A_RANGE = ("seed", "generate.seed", "model.cutoffs")
NUMBERS = [
    name
    for name, leaf in LEAVES.items()
    if leaf.type.kind in (int, float) and name not in WITHOUT_A_RANGE
]


def values_outside(leaf):
    """Returns values just outside of a number's range, below and above, and NaN for a float."""
    declared = leaf.setting
    values = []
    if declared.at_least is not None:
        values.append(declared.at_least - 1)
    else:
        # A number without a least value must have a bound that it stays above.
        assert declared.above is not None, f"{leaf.name} has no range"
        values.append(declared.above)
    if declared.below is not None:
        values.append(declared.below)
    if declared.at_most is not None:
        values.append(declared.at_most + 1)
    if leaf.type.kind is float:
        values.append(float("nan"))
    return values


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_of_its_range_is_an_error_that_names_setting_and_value(name):
    for value in values_outside(LEAVES[name]):
        with pytest.raises(UserError, match=rf"^{re.escape(name)}\b.*{value}"):
            config_tree.replace(ExperimentConfig(), {name: value}).validate()


# Settings that do not go together, written like flags, and the settings and numbers that the error
# must name. Numbers that a line does not set are defaults, or limits such as 1048576 for div_val.
CONFLICTS = """
model.d_model=7 | model.d_model 7
model.cutoffs=10,10 | model.cutoffs 10
model.cutoffs=0,10 | model.cutoffs 0 10
model.cutoffs=5 model.div_val=1152921504606846976 | model.div_val 1048576 1152921504606846976
model.cutoffs=5 model.tie_projs=true,true,true | tie_projs 3 2
model.div_val=4 | model.div_val 4 cutoffs
model.div_val=4 model.cutoffs=5,9 model.d_model=8 | div_val 4 2 8
model.untie_r=true model.encoding=vaswani | model.untie_r vaswani
model.encoding=al_rfou model.num_positions=1 | model.num_positions 1 2
model.num_positions=8 | model.num_positions 8 relative
model.tie_positions=true model.untie_r=true | tie_positions untie_r
model.tie_positions=true model.encoding=vaswani | tie_positions vaswani
model.network=lstm model.encoding=vaswani | model.encoding vaswani lstm
model.network=lstm model.tie_positions=true | tie_positions lstm
model.network=lstm model.dropout.qkv=0.1 | model.dropout.qkv 0.1 lstm
model.network=lstm train.stride=4 train.mem_len=0 | train.stride 4 lstm
model.network=lstm eval.weight_dtype=int8 | eval.weight_dtype int8 lstm
model.network=lstm eval.cache_dtype=int8 | eval.cache_dtype int8 lstm
data.corpus=text | data.file data.train
data.corpus=text data.file=a data.train=b | data.file data.train
data.corpus=text data.train=b | data.train data.valid data.test
data.valid=b | data.valid enwik8 text
data.heldout=published | data.heldout published enwik8 lm1b
data.reset_at=x model.network=lstm | data.reset_at x model.network lstm transformer_xl
data.reset_at=x model.compat.memory_start=zeros | data.reset_at x compat.memory_start zeros masked
data.order=sentences | data.order sentences byte
data.tokenizer.kind=word data.order=sentences data.tokenizer.line_mark=none | \
    data.order line_mark none
data.tokenizer.kind=word data.order=sentences data.roll=rows | data.order sentences data.roll rows
data.tokenizer.kind=word data.tokenizer.newlines=drop | data.tokenizer.newlines drop word byte
data.tokenizer.min_count=3 | data.tokenizer.min_count 3 byte
data.tokenizer.line_mark=s | data.tokenizer.line_mark byte word
data.tokenizer.vocab_file=words data.tokenizer.kind=char | vocab_file words char word
data.tokenizer.kind=word data.tokenizer.vocab_file=words data.tokenizer.min_count=2 | \
    min_count 2 words
data.tokenizer.kind=word data.tokenizer.hf_file=m | hf_file m word subword
data.tokenizer.kind=subword data.tokenizer.hf_file=m data.tokenizer.vocab_size=900 | \
    vocab_size 900 m
data.tokenizer.vocab_size=900 | vocab_size 900 byte subword
optimizer.weight_decay=0.1 | optimizer.weight_decay 0.1 adam adamw
optimizer.name=adamw | optimizer.weight_decay adamw adam
optimizer.name=adafactor optimizer.adam_b2=0.9 | optimizer.adam_b2 0.9 adafactor
optimizer.name=muon optimizer.l2=0.1 | optimizer.l2 0.1 muon
optimizer.warmup_steps=600 train.steps=400 | warmup_steps 600 train.steps 400
optimizer.warmup_steps=60 optimizer.decay_steps=50 | warmup_steps 60 decay_steps 50
optimizer.decay_steps=500 train.steps=400 | decay_steps 500 train.steps 400
optimizer.embedding_lr_multiplier=0.1 optimizer.min_lr_ratio=0.5 | min_lr_ratio 0.5 0.1
average.start_step=3 average.nt_asgd_patience=5 | start_step 3 nt_asgd_patience 5
average.ema_decay=0.9 | average.ema_decay 0.9 average.start_step
average.start_step=400000 | average.start_step 400000 train.steps
average.lr_scale=0.5 | average.lr_scale 0.5 average.start_step
train.stride=600 train.mem_len=0 | train.stride 600 train.segment_len
train.stride=4 | train.stride 4 train.mem_len
train.stride=4 train.mem_len=0 train.loss=half | train.stride 4 train.loss half
train.same_length=true train.mem_len=0 | train.same_length train.mem_len 0
train.grad_accum_steps=4 | train.grad_accum_steps 4 train.batch_size 22
train.steps=1001 train.segments_per_call=8 | train.steps 1001 segments_per_call 8
train.log_every=1001 train.segments_per_call=8 | train.log_every 1001 segments_per_call 8
train.eval_every=1001 train.segments_per_call=8 | train.eval_every 1001 segments_per_call 8
train.checkpoint_every=1001 train.segments_per_call=8 | \
    train.checkpoint_every 1001 segments_per_call 8
train.sample_every=6000 | train.sample_every 6000 train.eval_every 4000
eval.stride=600 eval.mem_len=0 eval.same_length=false | eval.stride 600 eval.segment_len
eval.stride=4 eval.mem_len=3 eval.same_length=false | eval.stride 4 eval.mem_len
eval.stride=4 eval.mem_len=0 eval.same_length=false eval.weight_dtype=int8 | \
    eval.stride 4 eval.weight_dtype int8
eval.stride=4 eval.mem_len=0 eval.same_length=false eval.warmup_tokens=5 | \
    eval.stride 4 eval.warmup_tokens 5
eval.mem_len=0 eval.same_length=false eval.cache_dtype=int8 | eval.cache_dtype int8 eval.mem_len 0
eval.mem_len=0 | eval.same_length eval.mem_len 0
eval.temperature=1.1 model.cutoffs=5 | eval.temperature 1.1 5
eval.temperature=1.1 model.d_embed=8 | eval.temperature 1.1 d_embed 8
generate.prompt=a generate.prompt_file=b | generate.prompt generate.prompt_file
"""


def conflicts():
    """Yields a case of each line of `CONFLICTS`, with the settings' text as its id."""
    for line in CONFLICTS.replace("\\\n", " ").strip().splitlines():
        settings, _, words = line.partition("|")
        values = {}
        for setting in settings.split():
            name, _, value = setting.partition("=")
            values[name] = SettingParser(LEAVES[name].type).parse(value)
        yield pytest.param(values, words.split(), id=settings.strip())
    # One cluster more than the limit of 1,000.
    cutoffs = tuple(range(1, 1002))
    yield pytest.param(
        {"model.cutoffs": cutoffs}, ["model.cutoffs", "1,000", "1,001"], id="too many clusters"
    )


@pytest.mark.parametrize(("values", "words"), list(conflicts()))
def test_conflicts_are_refused_with_their_numbers(values, words):
    config = config_tree.replace(ExperimentConfig(), values)

    with pytest.raises(UserError) as error:
        config.validate()

    message = str(error.value)
    for word in words:
        # 5 is neither in 50 nor in 0.5 or 5.1.
        as_a_word = rf"(?<!\w)(?<!\d\.){re.escape(word)}(?!\w|\.\d)"
        assert re.search(as_a_word, message), f"{word} is not in: {message}"


def other_value(leaf):
    """Returns a value of the setting's type that is not its default."""
    value = leaf.default
    kind = leaf.type.kind
    if value is None:
        if issubclass(kind, enum.Enum):
            return next(iter(kind))
        return {int: 3, float: 0.5, str: "x"}[kind]
    if isinstance(value, enum.Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, {int: 7, bool: True, str: "x"}[kind])
    if isinstance(value, str):
        return value + "x"
    return value + 1


DEFAULT = ExperimentConfig()
CHANGED = config_tree.replace(DEFAULT, {name: other_value(leaf) for name, leaf in LEAVES.items()})


def test_names_of_settings_are_unique():
    names = [leaf.name for leaf in config_tree.leaves(ExperimentConfig)]
    assert len(names) == len(set(names))
    assert len(names) > 50, "the settings of groups are missing"


@pytest.mark.parametrize("config", [DEFAULT, CHANGED], ids=["defaults", "other values"])
def test_every_setting_round_trips_through_json(config):
    values = json.loads(json.dumps(config_tree.to_dict(config)))
    assert list(values) == list(LEAVES)

    read = config_tree.from_dict(ExperimentConfig, values)
    assert read == config
    for name in LEAVES:
        assert type(config_tree.get(read, name)) is type(config_tree.get(config, name)), name


def test_differences_of_configs_are_the_settings_in_order_with_both_values():
    expected = []
    for name in LEAVES:
        expected.append((name, config_tree.get(DEFAULT, name), config_tree.get(CHANGED, name)))

    differences = []
    for leaf, before, after in config_tree.differences(DEFAULT, CHANGED):
        differences.append((leaf.name, before, after))
    assert differences == expected


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("model.n_layers", 3, r"'model\.n_layers'.*\bmodel\.n_layer\b"),
        ("model.n_layer", "3", r"^model\.n_layer .*'3'"),
        ("model.n_layer", None, r"^model\.n_layer .*None"),
        ("model.n_layer", True, r"^model\.n_layer .*True"),
        ("model.n_layer", 2.5, r"^model\.n_layer .*2.5"),
        ("model.untie_r", 1, r"^model\.untie_r .*\b1\b"),
        ("model.encoding", "shav", r"^model\.encoding .*\bshaw\b.*'shav'"),
        ("model.cutoffs", 5, r"^model\.cutoffs .*\b5\b"),
        ("model.cutoffs", [5, "9"], r"^model\.cutoffs .*'9'"),
        ("data.file", ["a"], r"^data\.file .*\['a'\]"),
    ],
    ids=str,
)
def test_an_unknown_setting_or_a_value_of_another_type_is_refused(name, value, pattern):
    with pytest.raises(UserError, match=pattern):
        config_tree.from_dict(ExperimentConfig, {name: value})


@pytest.mark.parametrize("name", COMPAT_PRESETS)
def test_a_compatibility_preset_changes_the_settings_that_it_names_and_no_others(name):
    preset = COMPAT_PRESETS[name]
    config = apply_preset(ExperimentConfig(), name)
    config.validate()  # What it changes goes together.

    changes = {}
    for leaf, _, after in config_tree.differences(ExperimentConfig(), config):
        changes[leaf.name] = after
    assert changes == preset


@pytest.mark.parametrize("name", COMPAT_PRESETS)
def test_a_compatibility_preset_replaces_an_earlier_one_completely(name):
    earlier = apply_preset(ExperimentConfig(), "tf")
    assert apply_preset(earlier, name) == apply_preset(ExperimentConfig(), name)


def test_a_learned_encoding_needs_a_table():
    """The longest distance depends on its size, which has no default."""
    message = r"model\.num_positions must be set for model\.encoding=shaw, got none"
    with pytest.raises(UserError, match=message):
        ModelConfig(encoding=Encoding.SHAW).clamp(5)


# Which settings are declared with a mark. The lists are written out here, so that a mark that is
# forgotten or added by mistake is seen.


def marked(mark):
    """Returns the names of the settings that are declared with a mark."""
    return {name for name, leaf in LEAVES.items() if getattr(leaf.setting, mark)}


# Paths of a text and its vocabulary.
TEXTS = {
    "data.file",
    "data.train",
    "data.valid",
    "data.test",
    "data.tokenizer.vocab_file",
    "data.tokenizer.hf_file",
}


def test_which_settings_are_paths():
    """Programs make them absolute."""
    assert marked("path") == TEXTS | {"generate.prompt_file", "init_from"}


def test_a_resumed_run_may_change_only_settings_that_leave_its_trajectory_alone():
    """Other weights are another run. A text is compared by its digest, so its paths may change.

    The number of steps may only become larger.
    """
    of_use = {name for name in LEAVES if name.startswith(("mesh.", "eval.", "generate."))}
    assert marked("free_on_resume") == TEXTS | of_use | {
        "train.log_every",
        "train.eval_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.sample_every",
        "train.patience",
        "model.attention",
        "model.remat",
        "data.json_field",
    }
    assert marked("may_grow") == {"train.steps"}


def test_which_settings_shape_tokens():
    """The ids of a text depend on them, so a trained run keeps them."""
    assert marked("shapes_tokens") == {
        "data.tokenizer.kind",
        "data.tokenizer.newlines",
        "data.tokenizer.line_mark",
        "data.tokenizer.min_count",
        "data.tokenizer.vocab_size",
        "data.reset_at",
    }


def test_which_settings_shape_parameters():
    """A warm start keeps them."""
    assert marked("shapes_params") == {
        "model.n_layer",
        "model.d_model",
        "model.n_head",
        "model.d_head",
        "model.d_inner",
        "model.d_embed",
        "model.num_positions",
        "model.cutoffs",
        "model.div_val",
        "model.untie_r",
        "model.tie_positions",
        "model.tie_weight",
        "model.tie_projs",
        "model.network",
        "model.encoding",
        "model.layer_norm",
        "model.compat.shaw_terms",
        "model.compat.final_norm",
    }
