"""Tests of the declaration of settings: ranges, conditions, and that each is declared once, with a help text."""

import dataclasses
import enum
import re

import pytest

from support.vocabulary import METAPHORS
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import Setting, check_fields, setting, setting_of
from txl_jax.errors import UserError


class Kind(enum.StrEnum):
    A = "a"
    B = "b"
    C = "c"


@dataclasses.dataclass(frozen=True)
class Group:
    kind: Kind = setting(Kind.A, "Kind.")
    rate: float = setting(0.5, "Rate.", at_least=0, below=1)
    count: int | None = setting(None, "Count; none: all.", above=0, at_most=9)
    flag: bool = setting(False, "Flag.", at_least=1)
    words: str | None = setting(None, "Words.", only_with={"kind": (Kind.B, Kind.C)})


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        ({}, "", (-1e9, 0, 1e9), ()),
        ({"at_least": 1}, "at least 1", (1, 2), (0, 0.999)),
        ({"above": 0}, "above 0", (1e-9,), (0, -1)),
        ({"at_least": 0, "below": 1}, "at least 0 and below 1", (0, 0.999), (1, -1e-9)),
        ({"above": 0, "at_most": 1}, "above 0 and at most 1", (1e-9, 1), (0, 1.001)),
    ],
)
def test_ranges(bounds, text, inside, outside):
    declared = Setting("Help.", **bounds)
    assert declared.range_text() == text
    assert all(map(declared.holds, inside)) and not any(map(declared.holds, outside))
    assert declared.holds(float("nan")) == (not bounds)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1.0}, "some.group.rate is 1.0; it must be at least 0 and below 1"),
        ({"rate": -0.1}, "some.group.rate is -0.1; it must be at least 0 and below 1"),
        ({"rate": 2}, "some.group.rate is 2; it must be at least 0 and below 1"),
        ({"count": 0}, "some.group.count is 0; it must be above 0 and at most 9, or none"),
        ({"count": 10}, "some.group.count is 10; it must be above 0 and at most 9, or none"),
        (
            {"words": "x"},
            "some.group.words is x and some.group.kind is a, which does not read it; it goes with b, c",
        ),
    ],
)
def test_a_field_out_of_its_range_or_without_a_reader_is_refused(values, message):
    with pytest.raises(UserError) as error:
        check_fields(Group(**values), "some.group")
    assert str(error.value) == message


@pytest.mark.parametrize(
    "values", [{}, {"rate": 0.0}, {"count": 9}, {"flag": True}, {"words": "x", "kind": Kind.B}, {"kind": Kind.C}]
)
def test_fields_in_their_range_pass(values):
    check_fields(Group(**values), "some.group")


def test_the_names_of_a_root_have_no_prefix():
    with pytest.raises(UserError, match=r"^rate is 1\.0;"):
        check_fields(Group(rate=1.0), "")


def test_an_unknown_property_is_refused():
    with pytest.raises(TypeError, match="at_leest"):
        setting(1, "Help.", at_leest=1)


def classes_of(cls):
    """A config class and those below it."""
    yield cls
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default):
            yield from classes_of(type(field.default))


FIELDS = [
    pytest.param(cls, field, id=f"{cls.__name__}.{field.name}")
    for cls in classes_of(ExperimentConfig)
    for field in dataclasses.fields(cls)
]
LEAVES = [pytest.param(leaf, id=leaf.name) for leaf in config_tree.leaves()]


@pytest.mark.parametrize(("cls", "field"), FIELDS)
def test_a_field_is_a_group_with_its_own_defaults_or_is_declared_by_setting(cls, field):
    if dataclasses.is_dataclass(field.default):
        assert field.default == type(field.default)(), "a group's defaults are those of its class"
    else:
        assert isinstance(setting_of(field), Setting)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_default_has_the_declared_type_and_is_in_its_range(leaf):
    if leaf.is_list:
        assert leaf.default == ()
    elif leaf.default is None:
        assert leaf.is_optional
    else:
        assert type(leaf.default) is leaf.type
        assert isinstance(leaf.default, str) or leaf.setting.holds(leaf.default)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_condition_names_a_field_beside_it_and_values_of_it(leaf):
    leaves = {other.name: other for other in config_tree.leaves()}
    for name, readers in leaf.setting.only_with.items():
        other = leaves[f"{leaf.name.rpartition('.')[0]}.{name}"]
        assert readers and all(type(reader) is other.type for reader in readers)


# Metaphors, and questions in place of nouns.
VAGUE = METAPHORS | {"leaves", "spread", "lay", "whose", "what", "how", "where"}


@pytest.mark.parametrize("leaf", LEAVES)
def test_help_is_one_short_sentence_in_plain_words(leaf):
    text = leaf.setting.help
    assert text[0].isupper() and text.endswith(".") and not text.endswith("..")
    assert not re.search(r"[.!?]\s", text), "one sentence"
    assert len(text) <= 110
    assert not VAGUE & set(re.findall(r"[a-z]+", text.lower()))
    files = (
        "data.file",
        "data.tokenizer.hf_file",
        "generate.prompt_file",
    )  # None: no file is read, which needs no words.
    assert ("none: " in text) == (leaf.is_optional and leaf.name not in files), "the meaning of none is in the help"


def test_there_are_few_enough_flags_to_read():
    assert sum(leaf.setting.flag for leaf in config_tree.leaves()) <= 110


def test_files_are_marked_as_paths():
    paths = {leaf.name for leaf in config_tree.leaves() if leaf.setting.path}
    assert paths == {
        *(f"data.{name}" for name in ("file", "train", "valid", "test")),
        *(f"data.tokenizer.{name}" for name in ("vocab_file", "sentencepiece_model", "hf_file")),
        "generate.prompt_file",
        "init_from",
    }
    # Other weights are another run, wherever they are; a text is compared by its digest.
    assert paths - {"generate.prompt_file", "init_from"} <= {
        leaf.name for leaf in config_tree.leaves() if leaf.setting.free_on_resume
    }


def test_a_resumed_run_may_change_what_leaves_the_trajectory_alone():
    free = {leaf.name for leaf in config_tree.leaves() if leaf.setting.free_on_resume}
    for group in ("mesh", "eval", "generate"):
        assert {name for name in config_tree.to_dict(ExperimentConfig()) if name.startswith(f"{group}.")} <= free
    assert {name for name in free if name.startswith("train.")} == {
        f"train.{name}" for name in ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "patience")
    }
    assert {name for name in free if name.startswith("model.")} == {"model.attention", "model.end_token"}
    for group in ("compat", "optimizer", "regularization", "average"):
        assert not any(name.startswith(f"{group}.") for name in free)


def test_a_trained_run_keeps_what_makes_its_token_ids():
    shaping = {leaf.name for leaf in config_tree.leaves() if leaf.setting.shapes_tokens}
    names = ("kind", "newlines", "lower_case", "line_mark", "min_count", "sentencepiece_vocab")
    assert shaping == {f"data.tokenizer.{name}" for name in names} | {"data.reset_at"}
