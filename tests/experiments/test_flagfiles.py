"""Tests that every flagfile is the preset of its name, and builds a model of the published size.

    PYTHONPATH=.:tests python -m tests.experiments.test_flagfiles     # writes the presets again

A preset that changes means that a published configuration changed, or that a default did.
"""

import dataclasses
import functools
import importlib
import json
from typing import NamedTuple

import jax
import pytest

import txl_jax
from experiments import ptb
from support import ROOT, drawn_run, programs
from support.cases import full_but
from txl_jax.cli import flag_tree
from txl_jax.cli.precedence import config_of_words
from txl_jax.config import (
    DynamicConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    NormPlace,
    config_tree,
)
from txl_jax.config.experiment import evaluation_preset, evaluation_preset_names, preset_names
from txl_jax.runs.build import build
from txl_jax.training.step import make_train_step

PRESETS = ROOT / "txl_jax" / "presets"

# Vocabularies; enwik8's without newlines.
ENWIK8, TEXT8, WT103, LM1B, PTB = 204, 27, 267_735, 793_470, 10_000


class Row(NamedTuple):
    """Expected facts of a flagfile."""

    # Whose defaults it changes.
    program: str
    vocab_size: int
    # Counted from the original release's model (margin 0), or the number in the paper.
    parameters: float
    # Fraction by which the size may differ from that.
    margin: float = 0.0


FLAGFILES = {
    "enwik8_12l": Row("enwik8", ENWIK8, 41_055_436),
    "enwik8_18l": Row("enwik8", ENWIK8, 88e6, 0.01),
    "enwik8_24l": Row("enwik8", ENWIK8, 277_231_820),
    "text8_12l": Row("text8", TEXT8, 40_964_635),
    "text8_24l": Row("text8", TEXT8, 277_050_395),
    "wt103_base": Row("wikitext103", WT103, 151_107_538),
    "wt103_large": Row("wikitext103", WT103, 285_170_506),
    "wt103_base_nvidia": Row("wikitext103", WT103, 191_950_298),
    "wt103_large_nvidia": Row("wikitext103", WT103, 285_167_482),
    "wt103_128m": Row("wikitext103", WT103, 128e6, 0.01),
    "lm1b_base": Row("lm1b", LM1B, 469.0e6, 0.005),
    "lm1b_base_script": Row("lm1b", LM1B, 357.8e6, 0.005),
    "lm1b_large": Row("lm1b", LM1B, 841e6, 0.005),
    "lm1b_ablation": Row("lm1b", LM1B, 0.3e9, 0.03),
    "ptb": Row("ptb", PTB, 24e6, 0.02),
    "ptb_author": Row("ptb", PTB, 24e6, 0.02),
    # Not from the paper: the count pins the sizes.
    "ptb_small": Row("ptb", PTB, 2_146_832),
    "small": Row("text", 256, 3_483_392),
    "own_bytes": Row("text", 256, 3_483_904),
    "own_words": Row("text", 10_000, 5_988_112),
}

# Flagfiles of evaluation, with --mode=eval over a trained run: L, M, learning rate, decay, epsilon.
EVALUATIONS = {
    "enwik8_24l_dynamic": (128, 3800, 1.2e-5, 24.0, 1e-4),
    "text8_24l_dynamic": (128, 3800, 1.5e-5, 24.0, 1e-4),
    "wt103_large_dynamic": (128, 1600, 2e-6, 0.0, 1e-5),
}

# With u and v per layer, --model.untie_r.
UNTIED = {"wt103_base": 151_119_838, "wt103_large": 285_205_322}


@functools.cache  # Defining the flags takes most of a second.
def resolved(name, *more):
    """The config that a flagfile, and flags after it, make of its program's defaults."""
    defaults = importlib.import_module(f"experiments.{FLAGFILES[name].program}").DEFAULTS
    return programs.config_of(defaults, f"--flagfile={name}", *more)


@functools.cache
def parts(name, *more):
    """The abstract parts of a run: shapes, no memory."""
    if FLAGFILES[name].program == "text":
        more = ("--data.file=book.txt", *more)  # The program reads no text that nobody names.
    return build(resolved(name, *more), vocab_size=FLAGFILES[name].vocab_size)


def golden_text(name):
    return json.dumps(config_tree.to_dict(resolved(name)), indent=1) + "\n"


def evaluation_settings(name):
    """The settings that a flagfile of evaluation sets, as JSON has them."""
    path = flag_tree.FLAGFILE_DIR / f"{name}.flags"
    lines = [line for line in path.read_text().splitlines() if line.startswith("--")]
    names = [line.removeprefix("--").partition("=")[0] for line in lines]
    values = config_tree.to_dict(programs.config_of(ExperimentConfig(), f"--flagfile={name}"))
    return {name: values[name] for name in names}


def evaluation_text(name):
    return json.dumps(evaluation_settings(name), indent=1) + "\n"


def test_every_flagfile_is_in_the_table_and_has_a_preset():
    names = sorted(path.stem for path in flag_tree.FLAGFILE_DIR.glob("*.flags"))
    assert sorted([*FLAGFILES, *EVALUATIONS]) == names
    assert sorted(FLAGFILES) == preset_names()
    assert sorted(EVALUATIONS) == evaluation_preset_names()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_flagfile_of_evaluation_has_the_published_numbers(name):
    segment_len, mem_len, learning_rate, decay, epsilon = EVALUATIONS[name]
    static = resolved(name.removesuffix("_dynamic"))
    evaluation = config_tree.replace(static, evaluation_preset(name)).eval
    assert evaluation == EvalConfig(
        batch_size=1,
        segment_len=segment_len,
        mem_len=mem_len,
        clamp_len=1000,
        same_length=True,
        dynamic=DynamicConfig(
            rule=DynamicRule.RMS, learning_rate=learning_rate, decay=decay, epsilon=epsilon
        ),
    )
    # It differs from the static evaluation only in what it learns.
    assert dataclasses.replace(evaluation, dynamic=DynamicConfig()) == static.eval
    assert evaluation_text(name) == (PRESETS / "evaluation" / f"{name}.json").read_text()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_flagfile_of_evaluation_changes_nothing_else_of_a_run(name, monkeypatch, tmp_path):
    recorded = txl_jax.preset("ptb_small")
    expected = config_tree.replace(recorded, evaluation_preset(name))
    words = ["text", f"--flagfile={name}"]
    assert config_of_words(ExperimentConfig(), words, recorded=recorded) == expected
    # Outside of a clone there is the preset instead of the file.
    monkeypatch.setattr(flag_tree, "FLAGFILE_DIR", tmp_path)
    assert config_of_words(ExperimentConfig(), words, recorded=recorded) == expected


def test_a_flagfile_of_evaluation_is_applied_to_a_trained_run_and_trains_none(tmp_path):
    run = drawn_run.of_words(tmp_path / "run")
    words = ["--flagfile=enwik8_24l_dynamic", f"--workdir={run.path}"]
    settings = ["--eval.mem_len=9", "--eval.segment_len=5"]

    code, _, err = programs.run("experiments.enwik8", "--mode=eval", *words, *settings)

    assert code == 0, err
    recorded = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    expected = evaluation_settings("enwik8_24l_dynamic")
    expected |= {"eval.mem_len": 9, "eval.segment_len": 5}
    assert expected.items() <= {f"eval.{k}": v for k, v in recorded["eval"].items()}.items()
    assert recorded["dynamic"]["test"]["loss"] != recorded["static"]["test"]["loss"]

    other = f"--workdir={tmp_path / 'new'}"
    code, _, err = programs.run("experiments.enwik8", words[0], other)
    assert code == 1 and "--mode=eval" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", FLAGFILES)
def test_a_flagfile_is_its_preset(name):
    parts(name).config.validate()
    assert golden_text(name) == (PRESETS / f"{name}.json").read_text()
    assert txl_jax.preset(name) == resolved(name)
    assert (
        f'txl_jax.preset("{name}")'
        in (flag_tree.FLAGFILE_DIR / f"{name}.flags").read_text().splitlines()[0]
    )


@pytest.mark.parametrize("name", FLAGFILES)
def test_a_flagfile_says_before_the_training_that_other_formats_lack_its_final_norm(name):
    model = txl_jax.preset(name).model
    flag = "--model.compat.final_norm=false"
    lines = (flag_tree.FLAGFILE_DIR / f"{name}.flags").read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    has_final_norm = model.layer_norm is NormPlace.PRE and model.compat.final_norm
    assert any(flag in comment for comment in comments) is has_final_norm


def test_outside_of_a_clone_a_flagfile_is_its_preset(monkeypatch, tmp_path):
    monkeypatch.setattr(flag_tree, "FLAGFILE_DIR", tmp_path)
    resolved.cache_clear()
    for name in FLAGFILES:
        assert resolved(name) == txl_jax.preset(name)
    resolved.cache_clear()
    # A program of words keeps its corpus, as with the file.
    config = programs.config_of(ptb.DEFAULTS, "--flagfile=small")
    assert config == dataclasses.replace(txl_jax.preset("small"), data=ptb.DEFAULTS.data)


@pytest.mark.parametrize("name", FLAGFILES)
def test_size_is_the_published_one(name):
    row, size = FLAGFILES[name], parts(name).num_parameters
    assert abs(size - row.parameters) <= row.margin * row.parameters, f"{size:,}"
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct)
        for leaf in jax.tree.leaves(parts(name).abstract_state)
    )
    if name in UNTIED:
        assert parts(name, "--model.untie_r").num_parameters == UNTIED[name]


@pytest.mark.parametrize("name", full_but(["wt103_base"], FLAGFILES))
def test_training_step_fits_together_at_full_size(name):
    made = parts(name)
    step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
    state, metrics = jax.eval_shape(
        step, made.abstract_state, made.abstract_segments(made.config.train)
    )
    assert jax.tree.map(kind, state) == jax.tree.map(kind, made.abstract_state)
    assert {kind(metric) for metric in jax.tree.leaves(metrics)} == {
        ((made.config.train.segments_per_call,), "float32")
    }


def kind(array):
    return array.shape, array.dtype.name


if __name__ == "__main__":
    PRESETS.mkdir(exist_ok=True)
    for flagfile in FLAGFILES:
        (PRESETS / f"{flagfile}.json").write_text(golden_text(flagfile))
    (PRESETS / "evaluation").mkdir(exist_ok=True)
    for flagfile in EVALUATIONS:
        (PRESETS / "evaluation" / f"{flagfile}.json").write_text(evaluation_text(flagfile))
