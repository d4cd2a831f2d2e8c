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


class Size(NamedTuple):
    """Expected number of parameters."""

    # Counted from the original release's model, or the rounded number in the paper.
    parameters: float
    # Fraction by which the number may differ from it. 0 for counted numbers.
    margin: float = 0.0


class Flagfile(NamedTuple):
    """The corpus's command, whose defaults a flagfile changes, and what its model must have."""

    program: str
    vocab_size: int
    size: Size


FLAGFILES = {}


def expect(program, vocab_size, **sizes):
    """Adds the flagfiles of a corpus's command, with their sizes, to `FLAGFILES`."""
    for name, size in sizes.items():
        FLAGFILES[name] = Flagfile(program, vocab_size, size)


expect(
    program="enwik8",
    vocab_size=204,  # The bytes that occur in enwik8, without newlines.
    enwik8_12l=Size(41_055_436),
    enwik8_18l=Size(88e6, margin=0.01),
    enwik8_24l=Size(277_231_820),
)
expect(
    program="text8",
    vocab_size=27,
    text8_12l=Size(40_964_635),
    text8_24l=Size(277_050_395),
)
expect(
    program="wikitext103",
    vocab_size=267_735,
    wt103_base=Size(151_107_538),
    wt103_large=Size(285_170_506),
    wt103_base_nvidia=Size(191_950_298),
    wt103_large_nvidia=Size(285_167_482),
    wt103_128m=Size(128e6, margin=0.01),
)
expect(
    program="lm1b",
    vocab_size=793_470,
    lm1b_base=Size(469.0e6, margin=0.005),
    lm1b_base_script=Size(357.8e6, margin=0.005),
    lm1b_large=Size(841e6, margin=0.005),
    lm1b_ablation=Size(0.3e9, margin=0.03),
)
expect(
    program="ptb",
    vocab_size=10_000,
    ptb=Size(24e6, margin=0.02),
    ptb_author=Size(24e6, margin=0.02),
    # The paper has no such model. The count pins the sizes.
    ptb_small=Size(2_146_832),
)
# Models of this project. Their counts pin the sizes.
expect(
    program="text",
    vocab_size=256,
    small=Size(3_483_392),
    own_bytes=Size(3_483_904),
)
expect(program="text", vocab_size=10_000, own_words=Size(5_988_112))
expect(program="text", vocab_size=16_384, own_subwords_gpu=Size(104_697_856))


def dynamic(*, mem_len, learning_rate, decay, epsilon):
    """Returns the published settings of dynamic evaluation."""
    return EvalConfig(
        batch_size=1,
        segment_len=128,
        mem_len=mem_len,
        clamp_len=1000,
        same_length=True,
        dynamic=DynamicConfig(
            rule=DynamicRule.RMS, learning_rate=learning_rate, decay=decay, epsilon=epsilon
        ),
    )


# Flagfiles of evaluation, which go with --mode=eval over a trained run.
EVALUATIONS = {
    "enwik8_24l_dynamic": dynamic(mem_len=3800, learning_rate=1.2e-5, decay=24.0, epsilon=1e-4),
    "text8_24l_dynamic": dynamic(mem_len=3800, learning_rate=1.5e-5, decay=24.0, epsilon=1e-4),
    "wt103_large_dynamic": dynamic(mem_len=1600, learning_rate=2e-6, decay=0.0, epsilon=1e-5),
}

# The implementation of attention whose functions are traced fastest. Sizes do not depend on it.
SIMPLEST = ("--model.attention=reference",)
# Parameters if each layer has its own u and v, which is --model.untie_r.
UNTIED = {"wt103_base": 151_119_838, "wt103_large": 285_205_322}


@functools.cache  # Defining the flags takes most of a second.
def resolved(name, *more):
    """Returns the config that a flagfile, and flags after it, make of its program's defaults."""
    defaults = importlib.import_module(f"experiments.{FLAGFILES[name].program}").DEFAULTS
    return programs.config_of(defaults, f"--flagfile={name}", *more)


def complete(name, *more):
    """Returns the same, with the name of a text, which some programs need. It is not read here."""
    if FLAGFILES[name].program == "text":
        return resolved(name, "--data.file=book.txt", *more)
    return resolved(name, *more)


@functools.cache
def parts(name, *more):
    """Builds the model of a flagfile. Arrays have shapes and take no memory."""
    return build(complete(name, *more), vocab_size=FLAGFILES[name].vocab_size)


def golden_text(name):
    """Returns the content of a preset's file."""
    return json.dumps(config_tree.to_dict(resolved(name)), indent=1) + "\n"


def evaluation_settings(name):
    """Returns the settings that a flagfile of evaluation sets, as JSON has them."""
    values = config_tree.to_dict(programs.config_of(ExperimentConfig(), f"--flagfile={name}"))
    settings = {}
    for line in lines_of(name):
        if line.startswith("--"):
            setting = line.removeprefix("--").partition("=")[0]
            settings[setting] = values[setting]
    return settings


def lines_of(name):
    """Returns the lines of a flagfile."""
    return (flag_tree.FLAGFILE_DIR / f"{name}.flags").read_text().splitlines()


def evaluation_text(name):
    """Returns the content of the file of an evaluation's preset."""
    return json.dumps(evaluation_settings(name), indent=1) + "\n"


def test_every_flagfile_is_in_the_table_and_has_a_preset():
    names = sorted(path.stem for path in flag_tree.FLAGFILE_DIR.glob("*.flags"))
    assert sorted([*FLAGFILES, *EVALUATIONS]) == names
    assert sorted(FLAGFILES) == preset_names()
    assert sorted(EVALUATIONS) == evaluation_preset_names()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_flagfile_of_evaluation_has_the_published_numbers(name):
    static = resolved(name.removesuffix("_dynamic"))
    evaluation = config_tree.replace(static, evaluation_preset(name)).eval
    assert evaluation == EVALUATIONS[name]
    # It differs from the static evaluation only in what it learns.
    assert dataclasses.replace(evaluation, dynamic=DynamicConfig()) == static.eval
    assert evaluation_text(name) == (PRESETS / "evaluation" / f"{name}.json").read_text()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_flagfile_of_evaluation_changes_nothing_else_of_a_run(name, monkeypatch, tmp_path):
    # The settings of any run, which `text` evaluates with those of the flagfile.
    recorded = txl_jax.preset("ptb_small")
    expected = config_tree.replace(recorded, evaluation_preset(name))
    words = ["text", f"--flagfile={name}"]
    assert config_of_words(ExperimentConfig(), words, recorded=recorded) == expected
    # Outside of a clone there is the preset instead of the file.
    monkeypatch.setattr(flag_tree, "FLAGFILE_DIR", tmp_path)
    assert config_of_words(ExperimentConfig(), words, recorded=recorded) == expected


def test_a_flagfile_of_evaluation_is_applied_to_a_trained_run(tmp_path):
    """The run's own text is scored, whichever corpus the program is for. Flags come after the file,
    and here make its lengths short.
    """
    run = drawn_run.of_words(tmp_path / "run", model__n_layer=1)
    short = {"eval.mem_len": 9, "eval.segment_len": 5}
    words = [f"--{name}={value}" for name, value in short.items()]

    code, _, err = programs.run(
        "experiments.enwik8",
        "--mode=eval",
        "--flagfile=enwik8_24l_dynamic",
        f"--workdir={run.path}",
        *words,
    )

    assert code == 0, err
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    for name, value in (evaluation_settings("enwik8_24l_dynamic") | short).items():
        assert results["eval"][name.removeprefix("eval.")] == value, name
    assert results["dynamic"]["test"]["loss"] != results["static"]["test"]["loss"]


def test_a_flagfile_of_evaluation_trains_no_run(tmp_path):
    """Without --mode=eval it is an error, and no workdir is made."""
    words = ["--flagfile=enwik8_24l_dynamic", f"--workdir={tmp_path / 'new'}"]
    code, _, err = programs.run("experiments.enwik8", *words)
    assert code == 1
    assert "--mode=eval" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", FLAGFILES)
def test_a_flagfile_is_its_preset(name):
    complete(name).validate()
    assert golden_text(name) == (PRESETS / f"{name}.json").read_text()
    assert txl_jax.preset(name) == resolved(name)
    assert f'txl_jax.preset("{name}")' in lines_of(name)[0]


@pytest.mark.parametrize("name", FLAGFILES)
def test_a_flagfile_says_before_the_training_that_other_formats_lack_its_final_norm(name):
    model = txl_jax.preset(name).model
    # Only a pre-norm model has this norm. Its flagfile names the flag that leaves it out.
    has_final_norm = model.layer_norm is NormPlace.PRE and model.compat.final_norm
    comments = [line for line in lines_of(name) if line.startswith("#")]
    assert ("--model.compat.final_norm=false" in "\n".join(comments)) is has_final_norm


def test_outside_of_a_clone_a_flagfile_is_its_preset(monkeypatch, tmp_path):
    # An empty directory, as outside of a clone. What was resolved from the files is forgotten, and
    # later tests resolve from the files again.
    monkeypatch.setattr(flag_tree, "FLAGFILE_DIR", tmp_path)
    resolved.cache_clear()
    for name in FLAGFILES:
        assert resolved(name) == txl_jax.preset(name), name
    resolved.cache_clear()

    # The file sets no corpus, so another program than the preset's keeps its own.
    config = programs.config_of(ptb.DEFAULTS, "--flagfile=small")
    assert config == dataclasses.replace(txl_jax.preset("small"), data=ptb.DEFAULTS.data)


@pytest.mark.parametrize("name", FLAGFILES)
def test_size_is_the_published_one(name):
    expected = FLAGFILES[name].size
    built = parts(name, *SIMPLEST)
    for path, leaf in jax.tree.leaves_with_path(built.abstract_state):
        assert isinstance(leaf, jax.ShapeDtypeStruct), jax.tree_util.keystr(path)
    difference = abs(built.num_parameters - expected.parameters)
    assert difference <= expected.margin * expected.parameters, f"{built.num_parameters:,}"
    if name in UNTIED:
        assert parts(name, *SIMPLEST, "--model.untie_r").num_parameters == UNTIED[name]


@pytest.mark.parametrize("name", full_but(["wt103_base"], FLAGFILES))
def test_training_step_fits_together_at_full_size(name):
    """It is traced with shapes: the state keeps shapes and dtypes, so the next step accepts it."""
    built = parts(name)
    step = make_train_step(built.model, built.optimizer, built.schedule, built.config)
    segments = built.abstract_segments(built.config.train)

    state, metrics = jax.eval_shape(step, built.abstract_state, segments)

    assert jax.tree.map(kind, state) == jax.tree.map(kind, built.abstract_state)
    # Each metric has a value for each update.
    n_update = built.config.train.segments_per_call
    for path, metric in jax.tree.leaves_with_path(metrics):
        assert kind(metric) == ((n_update,), "float32"), jax.tree_util.keystr(path)


def kind(array):
    """Returns shape and dtype."""
    return array.shape, array.dtype.name


if __name__ == "__main__":
    PRESETS.mkdir(exist_ok=True)
    for flagfile in FLAGFILES:
        (PRESETS / f"{flagfile}.json").write_text(golden_text(flagfile))
    (PRESETS / "evaluation").mkdir(exist_ok=True)
    for flagfile in EVALUATIONS:
        (PRESETS / "evaluation" / f"{flagfile}.json").write_text(evaluation_text(flagfile))
