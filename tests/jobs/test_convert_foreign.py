"""Tests of conversions from formats that are only read: pickled modules, NVIDIA's and TensorFlow's checkpoints."""

import pickle

import jax
import numpy as np
import pytest

import txl_jax
from support import foreign, foreign_tensorflow, torch_bytes
from txl_jax.config import AttentionWindow, LineMark, MemoryStart
from txl_jax.data.tokens.word_vocabulary import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.jobs.convert import TargetFormat, convert

CHANGES = {"cutoffs": foreign.CUTOFFS, "div_val": 2, "tie_projs": (False, True, True)}
TEXT = "the a , of @-@\nb c x\n"


def converted(source, tmp_path, params, **options):
    """The converted model, whose parameters are those that were written."""
    lines: list[str] = []
    convert(source, tmp_path / "converted", log=lines.append, **options)
    assert any(line.startswith("verified") for line in lines)
    model = txl_jax.load(tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, model.params), params)
    assert np.isfinite(model.score([TEXT])[0].nats)
    return model


def test_a_module_that_the_pytorch_release_pickled(tmp_path):
    config, params = foreign.make("pytorch", **CHANGES)
    (tmp_path / "run").mkdir()
    torch_bytes.write_legacy(tmp_path / "run" / "model.pt", foreign.pickled_module(config, params))
    (tmp_path / "run" / "vocab.txt").write_text("\n".join(foreign.WORDS))
    model = converted(tmp_path / "run", tmp_path, params)
    assert model.vocabulary == WordVocabulary(foreign.WORDS, LineMark.EOS, False, "<unk>")


@pytest.mark.full
def test_a_checkpoint_of_nvidia(tmp_path):
    config, params = foreign.make("pytorch", **CHANGES)
    path = torch_bytes.write_zip(tmp_path / "checkpoint_best.pt", foreign.nvidia_checkpoint(config, params))
    model = converted(path, tmp_path, params)
    assert model.config.compat.same_length_window is AttentionWindow.MEM_LEN_PLUS_ONE
    assert model.vocabulary.size == foreign.V and model.config.eval.mem_len == foreign.LENGTHS.mem_len


@pytest.mark.full
@pytest.mark.parametrize("place", ["", "model/model.ckpt-0"])
def test_a_published_checkpoint_of_tensorflow(place, tmp_path, monkeypatch):
    config, params = foreign.make("tf", untie_r=True, **CHANGES)
    for name in ("model", "data"):
        (tmp_path / "tf" / name).mkdir(parents=True)
    variables = foreign_tensorflow.variables_of(config, params)
    foreign_tensorflow.write_with_stub(tmp_path / "tf" / "model" / "model.ckpt-0", variables, monkeypatch)
    corpus = {"dataset": "wt103", "vocab": {"idx2sym": list(foreign.WORDS)}}
    (tmp_path / "tf" / "data" / "cache.pkl").write_bytes(pickle.dumps(corpus, 2))
    model = converted(tmp_path / "tf" / place, tmp_path, params)
    assert model.config.compat.memory_start is MemoryStart.ZEROS and model.config.compat.layer_norm_eps == 1e-12
    assert model.vocabulary.size == foreign.V


def test_a_file_that_would_run_something_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harm = torch_bytes.Call(torch_bytes.Name("posix", "system"), ("touch marker",))
    (tmp_path / "run").mkdir()
    torch_bytes.write_legacy(tmp_path / "run" / "model.pt", {"a": harm})
    with pytest.raises(UserError, match=r"model\.pt: its pickle names posix\.system"):
        convert(tmp_path / "run", tmp_path / "converted", to_format=TargetFormat.ORIGINAL, log=lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_words_that_are_not_as_many_as_the_weights_are_refused(tmp_path):
    config, params = foreign.make("hf", **foreign.CONFIGS["div_val 2"])
    source = foreign.huggingface_folder(tmp_path / "theirs", config, params)
    (source / "vocab.txt").write_text("\n".join(foreign.WORDS[:-1]))
    for options, named in (({}, r"vocab\.txt"), ({"from_format": "nvidia"}, "nvidia")):
        with pytest.raises(UserError, match=named):
            convert(source, tmp_path / "out" / "new", log=lambda line: None, **options)
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
