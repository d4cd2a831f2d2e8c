"""Tests the config of a run that is trained: with --init_from the model's settings come from the trained model."""

import pytest
from absl import flags

from support import drawn_run
from support.own_text import own_text
from txl_jax.cli import flag_tree, training_config
from txl_jax.config import COMPAT_PRESETS, ExperimentConfig, ModelConfig, Tokenizer
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import UserError
from txl_jax.runs.run import TextInfo, Workdir

SIZES = {"n_layer": 1, "d_model": 12, "n_head": 3, "d_head": 5, "d_inner": 14, "untie_r": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on words with the numerics of another implementation; returns its folder and its config."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text("one two three\n" * 200)
    model = ModelConfig(**SIZES)
    config = ExperimentConfig(model=model, data=own_text(file=str(folder / "text"), kind=Tokenizer.WORD))
    config = config_tree.apply_preset(config_tree.replace(config, {"model.dropout.rate": 0.3}), "hf")
    drawn_run.make(folder / "run", config, read_corpus(config.data, "nowhere", str(folder)))
    return folder, config


def built(trained, workdir, *words):
    """The config of a command line with --init_from."""
    values, defaults = flags.FlagValues(), ExperimentConfig(data=own_text())
    flag_tree.define(defaults, values)
    files = [f"--data.file={trained[0] / 'text'}", f"--init_from={trained[0] / 'run'}"]
    flag_tree.parse(["program", *files, *words], values)
    return training_config.build(defaults, Workdir(workdir), values)


def test_sizes_and_compatibility_come_from_the_trained_model(trained, tmp_path):
    """And nothing else: dropout, tokens, lengths and optimizer are those of the program and the flags."""
    config = built(trained, tmp_path / "new", "--train.mem_len=30")
    assert {name: getattr(config.model, name) for name in SIZES} == SIZES
    assert config.compat == trained[1].compat != ExperimentConfig().compat
    assert config.model.dropout == ExperimentConfig().model.dropout
    assert config.data.tokenizer.kind is Tokenizer.BYTE and config.train.mem_len == 30


def test_flags_of_the_same_model_may_be_given_and_others_are_named(trained, tmp_path):
    assert built(trained, tmp_path / "new", "--model.n_layer=1").model.n_layer == 1
    with pytest.raises(UserError, match=r"model\.n_layer is 4 and there 1; model\.d_head is 6 and there 5; leave"):
        built(trained, tmp_path / "new", "--model.n_layer=4", "--model.d_head=6")
    other = built(trained, tmp_path / "new", "--compat=tf").compat
    assert other.layer_norm_eps == COMPAT_PRESETS["tf"]["compat.layer_norm_eps"]


def test_a_kept_vocabulary_brings_its_tokenizer(trained, tmp_path):
    config = built(trained, tmp_path / "new", "--init_vocabulary=kept")
    assert config.data.tokenizer.kind is Tokenizer.WORD
    for words, named in (
        (["--data.tokenizer.vocab_file=words"], "vocab_file"),
        (["--init_from=none"], "give --init_from"),
    ):
        with pytest.raises(UserError, match=named):
            built(trained, tmp_path / "new", "--init_vocabulary=kept", *words)


def test_a_second_start_needs_the_workdir_alone(trained, tmp_path):
    """The folder of the weights may be gone: the same command means the same config."""
    first, workdir = built(trained, tmp_path / "new"), Workdir(tmp_path / "new")
    corpus = read_corpus(trained[1].data, "nowhere", str(trained[0]))
    workdir.create().record(first, TextInfo.of(corpus), warm_start={"sha256": "0"})
    (trained[0] / "run").rename(trained[0] / "gone")
    try:
        assert built(trained, tmp_path / "new") == first
        with pytest.raises(UserError, match=r"init_from is .*run, whose weights cannot be taken: .* holds no run"):
            built(trained, tmp_path / "another")
    finally:
        (trained[0] / "gone").rename(trained[0] / "run")
