"""Tests of conversions from formats that are only read, and what is refused."""

import jax
import numpy as np
import pytest

import txl_jax
from support import foreign, torch_bytes
from txl_jax.config import LineMark
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.runs.convert import TargetFormat, convert


def test_a_module_that_the_pytorch_release_pickled(tmp_path):
    config, params = foreign.make("pytorch", cutoffs=foreign.CUTOFFS, div_val=2, tie_projs=(False, True, True))
    (tmp_path / "run").mkdir()
    torch_bytes.write_legacy(tmp_path / "run" / "model.pt", foreign.pickled_module(config, params))
    (tmp_path / "run" / "vocab.txt").write_text("\n".join(foreign.WORDS))
    lines: list[str] = []
    convert(tmp_path / "run", tmp_path / "converted", log=lines.append)
    assert any(line.startswith("verified") for line in lines)
    model = txl_jax.load(tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, model.params), params)
    assert np.isfinite(model.score(["the a , of @-@\nb c x\n"])[0].nats)
    assert model.vocabulary == WordVocabulary(foreign.WORDS, LineMark.EOS, False, "<unk>")


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
