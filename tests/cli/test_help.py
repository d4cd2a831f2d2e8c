"""Tests `--help`: groups and defaults."""

import re

import pytest
from absl import flags

from support import programs
from txl_jax.cli import flag_tree, help
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.experiment import preset_names


@pytest.fixture
def values():
    defined = flags.FlagValues()
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "Job.", flag_values=defined)
    flags.DEFINE_string("coordinator", None, "HOST:PORT.", flag_values=defined)
    flag_tree.define(config_tree.replace(ExperimentConfig(), {"model.n_layer": 5}), defined)
    return defined


def headings(text):
    return re.findall(r"(?m)^([a-z. ]+):$", text)


def test_every_flag_is_in_a_group_once_with_its_default(values):
    text = help.help_text(list(values), None, values)
    usages = re.findall(r"(?m)^  --([\w.]+)=(\S*)", text)
    assert sorted(name for name, _ in usages) == sorted(["flagfile", *(n for n in values if not n.startswith("help"))])
    defaults = dict(usages)
    assert (defaults["mode"], defaults["model.n_layer"], defaults["model.d_embed"]) == ("train", "5", "none")
    assert (defaults["coordinator"], defaults["model.cutoffs"], defaults["model.tie_weight"]) == ("", "", "true")
    assert headings(text) == ["program", "several hosts", *flag_tree.groups()]
    assert "--helpfull" not in text


def test_groups_that_a_program_does_not_read_are_left_out(values):
    text = help.help_text(list(values), ("model", "eval"), values, note="A note.")
    assert headings(text) == ["program", "several hosts", "model", "eval"]
    assert "--helpfull" in text and "\nA note.\n" in text
    assert "--compat=" in text and "--seed=" not in text


def test_help_of_a_program_has_its_flags_and_the_flagfiles():
    code, out, err = programs.run("experiments.enwik8", "--help")
    assert code == 0 and not err
    for words in ("python -m experiments.enwik8", "--model.d_embed=none", *preset_names()):
        assert words in out
