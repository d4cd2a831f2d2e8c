"""Tests `--help`: groups, defaults, choices, and the width of the terminal."""

import re

import pytest
from absl import flags

from experiments.cli import flag_tree, help_text, hosts
from support import programs
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree


@pytest.fixture
def values():
    defined = flags.FlagValues()
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "Job.", flag_values=defined)
    flags.DEFINE_string("coordinator", None, "HOST:PORT.", flag_values=defined)
    flag_tree.define(config_tree.replace(ExperimentConfig(), {"model.n_layer": 5}), defined)
    return defined


def shown(values, groups=None, **options):
    return help_text.help_text(list(values), groups, values, **options)


def headings(text):
    return re.findall(r"(?m)^([a-z. ]+):$", text)


def test_every_flag_is_in_a_group_once_with_its_default(values):
    text = shown(values)
    usages = re.findall(r"(?m)^  --([\w.]+)=(\S*)", text)
    assert sorted(name for name, _ in usages) == sorted(["flagfile", *(n for n in values if not n.startswith("help"))])
    defaults = dict(usages)
    assert (defaults["mode"], defaults["model.n_layer"], defaults["model.d_embed"]) == ("train", "5", "none")
    assert (defaults["coordinator"], defaults["model.cutoffs"], defaults["model.tie_weight"]) == ("", "", "true")
    assert headings(text) == ["program", "several hosts", *flag_tree.groups()]
    assert "--helpfull" not in text


def test_groups_that_a_program_does_not_read_are_left_out(values):
    text = shown(values, ("model", "eval"), note="A note.")
    assert headings(text) == ["program", "several hosts", "model", "eval"]
    assert "--helpfull" in text and "\nA note.\n" in text
    assert "--compat=" in text and "--seed=" not in text


@pytest.mark.parametrize(("columns", "width"), [("100", 100), ("20", 80), ("500", 120)])
def test_lines_fit_the_terminal_and_show_choices(values, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(values)
    assert width - 12 < max(map(len, text.splitlines())) <= width
    assert re.search(r"--mode=train +Job \(train, eval\)\.", text)


def test_the_flags_of_several_hosts_are_those_that_hosts_defines():
    with programs.own_flags() as before:
        hosts.define_flags()
        assert set(flags.FLAGS) - before == set(hosts.FLAG_NAMES)


@pytest.mark.parametrize("program", ["enwik8", "ensemble", "bench.speed", "paper.ablation"])
def test_help_of_a_program_has_its_flags_and_the_flagfiles(program):
    code, out, err = programs.run(f"experiments.{program}", "--help")
    assert code == 0 and not err
    for words in (f"python -m experiments.{program}", "--model.d_embed=none", *flag_tree.flagfile_names()):
        assert words in out


def test_help_of_a_study_has_its_settings_first_and_only_groups_that_it_reads():
    code, out, err = programs.run("experiments.paper.context_length", "--help")
    assert code == 0 and not err
    assert out.index("--lengths=64,") < out.index("--eval.mem_len=") and "--model.n_layer=" not in out
    code, full, _ = programs.run("experiments.paper.context_length", "--helpfull")
    assert code == 0 and "--model.n_layer=" in full
