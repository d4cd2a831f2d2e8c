"""Tests of txl_jax.json, the settings next to weights in another format: what it has, and when it
is ignored.
"""

import json

import jax
import numpy as np
import pytest

from support import foreign, tiny
from txl_jax.config import ExperimentConfig, LineMark, MemoryStart, config_tree
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import formats, huggingface, leaves, original, own_settings, safetensors
from txl_jax.interop.original import Format
from txl_jax.interop.portable import ModelInfo

WRITE = {Format.HUGGINGFACE: huggingface.write, Format.ORIGINAL: original.write}
VOCABULARY = WordVocabulary(foreign.WORDS, LineMark.EOS)
OWN = {
    "model.compat.memory_start": MemoryStart.MASKED,
    "data.reset_at": "<eos>",
    "eval.temperature": 0.5,
}
OWN |= {"model.compat.final_norm": True, "train.mem_len": 11, "eval.batch_size": 3}


@pytest.fixture(params=WRITE)
def written(request, tmp_path):
    """(directory, format, config) of a model as a conversion writes it."""
    model, params = foreign.make("ours")
    config = config_tree.replace(ExperimentConfig(), {"model": model, "eval": foreign.LENGTHS})
    config = config_tree.replace(config, OWN)
    info = ModelInfo(
        config, VOCABULARY, 7, "a description", {"test": {"loss": 1.0, "perplexity": 2.0}}
    )
    WRITE[request.param](tmp_path, info, leaves.from_tree(params))
    own_settings.write(tmp_path, info, request.param)
    return tmp_path, request.param, config


def saved(folder, **changes):
    path = folder / own_settings.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_settings_come_back_and_there_are_no_parameters(written):
    folder, format, config = written
    found = formats.read(folder)
    assert found.info.config == config and found.info.vocabulary == VOCABULARY
    assert (found.info.step, found.info.description) == (7, "a description")
    assert found.info.scores == {"test": {"loss": 1.0, "perplexity": 2.0}}
    content = json.loads((folder / own_settings.NAME).read_text())
    assert content.keys() == {
        "txl_jax_settings",
        "description",
        "step",
        "config",
        "scores",
        "sha256",
    }
    assert content["config"].keys() == set(own_settings.names(format))
    # Neither what shapes the parameters nor what the other config.json says.
    assert not content["config"].keys() & {
        "model.n_layer",
        "model.cutoffs",
        "eval.mem_len",
        "eval.clamp_len",
    }
    assert ("eval.segment_len" in content["config"]) is (format is Format.HUGGINGFACE)


def test_what_the_other_config_says_is_read_from_there(written):
    folder, _, config = written
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mem_len": 4}))
    found = formats.read(folder).info.config
    assert found.eval.mem_len == 4
    assert config_tree.replace(found, {"eval.mem_len": config.eval.mem_len}) == config


def test_it_is_ignored_next_to_other_weights(written):
    folder, format, _ = written
    tensors = {
        name: np.array(leaf.read())
        for name, leaf in safetensors.read(folder / "model.safetensors").items()
    }
    next(value for value in tensors.values() if value.ndim == 2)[0, 0] += 1
    safetensors.write(
        folder / "model.safetensors", leaves.from_tree(tensors), metadata={"format": "pt"}
    )
    found = formats.read(folder)
    assert any("txl_jax.json is ignored" in note for note in found.notes)
    assert found.info.config.model.compat == tiny.compat_config(original.PRESETS[format])
    assert found.info.config.data.reset_at is None and found.info.step == 0
    (folder / own_settings.NAME).unlink()
    alone = formats.read(folder)
    assert alone.info.config == found.info.config and not any(
        "txl_jax.json" in note for note in alone.notes
    )


def test_documents_belong_to_the_vocabulary(written):
    folder, _, config = written
    (folder / "vocabulary.txt").unlink()
    words = list(foreign.WORDS)
    words[1:3] = words[2:0:-1]
    (folder / "vocab.txt").write_text("\n".join(words))
    found = formats.read(folder)
    assert any("data.reset_at of txl_jax.json is ignored" in note for note in found.notes)
    assert found.info.config == config_tree.replace(config, {"data.reset_at": None})


@pytest.mark.parametrize(
    "changes",
    [
        {"txl_jax_settings": 2},
        {"config": {"model.n_layer": 1 << 40}},
        {"config": {"data.file": "/etc/passwd"}},
        {"config": {"init_from": "/elsewhere"}},
        {"config": {"model.compat.memory_start": "ones"}},
        {"config": {"eval.temperature": -1}},
        {"config": {"model.compat.layer_norm_eps": "x"}},
        {"config": [1]},
        {"step": "x"},
        {"scores": {"test": {"loss": "x"}}},
        {"sha256": None},
    ],
    ids=str,
)
def test_what_is_no_such_file_is_one_error(changes, written):
    folder, _, _ = written
    saved(folder, **changes)
    with pytest.raises(UserError, match=r"txl_jax\.json") as raised:
        formats.read(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[" * 100_000, b"\xff", b'{"a": 1}', b"9" * 5000]
)
def test_other_content_is_one_error(content, written):
    folder, _, _ = written
    (folder / own_settings.NAME).write_bytes(content)
    with pytest.raises(UserError, match=r"txl_jax\.json"):
        formats.read(folder)


def test_parameters_are_those_of_the_weights(written):
    folder, _, config = written
    model = tiny.make()
    params = jax.tree.map(np.asarray, tiny.variables(model)["params"])
    foreign.check(formats.read(folder), config.model, params)
