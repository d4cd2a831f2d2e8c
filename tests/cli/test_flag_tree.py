"""Tests the flags that are made from the config tree, how a command line becomes a config, and --help."""

import re

import pytest
from absl import flags

from support import programs
from support.own_text import data_config
from txl_jax.cli import flag_tree, help
from txl_jax.config import ExperimentConfig, LineMark, NormPlace, Order, Tokenizer, config_tree
from txl_jax.config.experiment import preset_names
from txl_jax.errors import UserError


def parsed(*words, base=None):
    return programs.config_of(ExperimentConfig(), *words, base=base)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("--model.n_layer=3", "model.n_layer", 3),
        ("--model.dropout.rate=0.25", "model.dropout.rate", 0.25),
        ("--model.layer_norm=pre", "model.layer_norm", NormPlace.PRE),
        ("--model.untie_r", "model.untie_r", True),
        ("--notrain.same_length", "train.same_length", False),
        ("--model.cutoffs=20,40", "model.cutoffs", (20, 40)),
        ("--model.tie_projs=False,true,1", "model.tie_projs", (False, True, True)),
        ("--data.train=/a.txt,/b.txt", "data.train", ("/a.txt", "/b.txt")),
    ],
)
def test_every_kind_of_value(word, name, value):
    assert parsed(word) == config_tree.replace(ExperimentConfig(), {name: value})


def test_what_was_not_given_stays_as_the_base_or_a_preset_has_it():
    base = config_tree.replace(ExperimentConfig(), {"model.n_layer": 5, "model.n_head": 2})
    config = parsed("--model.n_layer=12", base=base)  # 12 is the default, but it was given.
    assert (config.model.n_layer, config.model.n_head) == (12, 2)
    assert parsed("--optimizer.min_lr_ratio=0.5", "--compat=tf").optimizer.min_lr_ratio == 0.5, "a flag wins"
    assert parsed("--compat=tf").optimizer.min_lr_ratio == 0.01


def test_another_kind_of_token_drops_what_the_program_sets_for_its_own():
    words = data_config(kind=Tokenizer.WORD, line_mark=LineMark.S, min_count=3, order=Order.SENTENCES)
    base = ExperimentConfig(data=words)
    assert parsed(base=base) == base
    assert parsed("--data.tokenizer.kind=byte", base=base).data == data_config()
    characters = parsed("--data.tokenizer.kind=char", "--data.tokenizer.min_count=2", base=base).data
    assert characters == data_config(kind=Tokenizer.CHAR, min_count=2)
    from_file = config_tree.replace(base, {"data.tokenizer.vocab_file": "/words", "data.tokenizer.min_count": 1})
    assert parsed("--data.tokenizer.vocab_file=/words", base=base) == from_file


def test_none_is_a_value_of_settings_that_may_be_none():
    config = parsed("--eval.clamp_len=none", "--generate.top_k=NONE", "--train.patience=3", "--data.file=none")
    assert (config.eval.clamp_len, config.generate.top_k, config.train.patience) == (None, None, 3)
    assert config.data.file is None
    with pytest.raises(UserError, match="none"):
        parsed("--model.n_layer=none")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--model.n_layers=3"], r"--model\.n_layers\b.*\bmodel\.n_layer\b"),
        (["--data.epoch_memory=carried"], r"--data\.epoch_memory\b.*\beea3a51\b"),
        (["--model.n_layer=three"], r"model\.n_layer=three\b"),
        (["--model.layer_norm=middle"], "post"),
        (["--model.cutoffs=20,x"], r"--model\.cutoffs\b.*'x'"),
        (["--flagfile=enwik8_12"], r"\bsmall\b.*'enwik8_12'.*\benwik8_12l\b"),
    ],
)
def test_mistakes_are_named(words, pattern):
    with pytest.raises(UserError, match=pattern):
        parsed(*words)


def test_a_flag_that_a_flagfile_overrides_is_a_warning(capsys):
    assert parsed("--train.batch_size=3", "--model.n_layer=2", "--flagfile=enwik8_12l").train.batch_size == 22
    first, second = sorted(capsys.readouterr().err.splitlines())
    assert "--model.n_layer=2" in first and "--train.batch_size=3" in second and "--train.batch_size=22" in second
    assert "enwik8_12l.flags, line " in second
    assert parsed("--seed=3", "--flagfile", "enwik8_12l", "--train.batch_size=3").train.batch_size == 3
    assert capsys.readouterr().err == ""


def test_a_flagfile_inside_a_flagfile_and_errors_with_file_and_line(tmp_path):
    path = tmp_path / "mine.flags"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"mine\.flags"):
        parsed(f"--flagfile={path}")
    path.write_text("--flagfile=enwik8_12l\n\n# a comment\n  // another\n--notrain.same_length\n--train.batch_size=5\n")
    config = parsed(f"--flagfile={path}")
    assert (config.model.n_layer, config.train.batch_size, config.train.same_length) == (12, 5, False)
    mistakes = ("--model.n_layers=3", r"mine\.flags, line 2: .*n_layers"), ("--model.n_layer=x", r"line 2: .*n_layer=x")
    files = ("--flagfile=none", "line 2: .*'none'"), (f"--flagfile={path}", "line 2: .*itself")
    for line, pattern in (*mistakes, *files):
        path.write_text(f"--seed=1\n{line}\n")
        with pytest.raises(UserError, match=pattern):
            parsed(f"--flagfile={path}")


# Help


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
