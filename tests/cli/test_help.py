"""Tests `--help`: groups and defaults."""

import re

from absl import flags

from support import programs
from txl_jax.cli import flag_tree, help
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.experiment import preset_names


def headings(text):
    return re.findall(r"(?m)^([a-z. ]+):$", text)


def test_every_flag_is_in_a_group_once_with_its_default():
    values = flags.FlagValues()
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "Job.", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT.", flag_values=values)
    flag_tree.define(config_tree.replace(ExperimentConfig(), {"model.n_layer": 5}), values)
    text = help.help_text(list(values), None, values)
    usages = re.findall(r"(?m)^  --([\w.]+)=(\S*)", text)
    assert sorted(name for name, _ in usages) == sorted(["flagfile", *(n for n in values if not n.startswith("help"))])
    defaults = dict(usages)
    assert (defaults["mode"], defaults["model.n_layer"], defaults["model.d_embed"]) == ("train", "5", "none")
    assert (defaults["coordinator"], defaults["model.cutoffs"], defaults["model.tie_weight"]) == ("", "", "true")
    assert headings(text) == ["command", "multiple hosts", *flag_tree.groups()]
    assert "--helpfull" not in text


def test_help_of_a_program_has_the_flags_that_it_reads_and_the_flagfiles():
    _, out, _ = programs.run("experiments.paper.table9", "--help")
    assert headings(out)[-2:] == ["model", "eval"] and "--helpfull" in out and "--seed=" not in out
    code, out, err = programs.run("experiments.enwik8", "--help")
    assert code == 0 and not err
    for words in ("python -m experiments.enwik8", "--model.d_embed=none", *preset_names()):
        assert words in out
