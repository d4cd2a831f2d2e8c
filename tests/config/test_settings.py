"""Tests of the declaration of settings: ranges, conditions, defaults, and which settings may change."""

import dataclasses
import enum

import pytest

from txl_jax.config import ExperimentConfig
from txl_jax.config import settings as config_tree
from txl_jax.config.settings import check_fields, setting
from txl_jax.errors import UserError

Kind = enum.StrEnum("Kind", ["A", "B", "C"])


@dataclasses.dataclass(frozen=True)
class Group:
    kind: Kind = setting(Kind.A, "Kind.")
    rate: float = setting(0.5, "Rate.", at_least=0, below=1)
    count: int | None = setting(None, "Count; none: all.", above=0, at_most=9)
    flag: bool = setting(False, "Flag.", at_least=1)
    words: str | None = setting(None, "Words.", only_with={"kind": (Kind.B, Kind.C)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1.0}, r"some\.group\.rate is 1\.0\b"),
        ({"rate": -0.1}, r"some\.group\.rate is -0\.1\b"),
        ({"rate": 2}, r"some\.group\.rate is 2\b"),
        ({"count": 0}, r"some\.group\.count is 0\b.*\bnone\b"),
        ({"count": 10}, r"some\.group\.count is 10\b"),
        ({"words": "x"}, r"some\.group\.words is x\b.*some\.group\.kind is a\b.*\bb, c\b"),
    ],
)
def test_a_field_out_of_its_range_or_without_a_reader_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        check_fields(Group(**values), "some.group")
    with pytest.raises(UserError, match=rf"^{next(iter(values))} is "):
        check_fields(Group(**values), "")


@pytest.mark.parametrize(
    "values", [{}, {"rate": 0.0}, {"count": 9}, {"flag": True}, {"words": "x", "kind": Kind.B}, {"kind": Kind.C}]
)
def test_fields_in_their_range_pass(values):
    check_fields(Group(**values), "some.group")


def test_files_are_marked_as_paths():
    paths = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.path}
    texts = {f"data.{name}" for name in ("file", "train", "valid", "test", "tokenizer.vocab_file", "tokenizer.hf_file")}
    assert paths == texts | {"generate.prompt_file", "init_from"}
    # Other weights are another run, wherever they are; a text is compared by its digest.
    assert texts <= {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.free_on_resume}


def test_a_resumed_run_may_change_what_leaves_the_trajectory_alone():
    free = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.free_on_resume}
    for group in ("mesh", "eval", "generate"):
        assert {name for name in config_tree.to_dict(ExperimentConfig()) if name.startswith(f"{group}.")} <= free
    names = ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "patience")
    assert {name for name in free if name.startswith("train.")} == {f"train.{name}" for name in names}
    assert {name for name in free if name.startswith("model.")} == {"model.attention"}
    for group in ("compat", "optimizer", "regularization", "average"):
        assert not any(name.startswith(f"{group}.") for name in free)


def test_a_trained_run_keeps_what_makes_its_token_ids():
    shaping = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.setting.shapes_tokens}
    names = ("kind", "newlines", "line_mark", "min_count", "vocab_size")
    assert shaping == {f"data.tokenizer.{name}" for name in names} | {"data.reset_at"}
