"""Tests of txl_jax.json, the settings next to weights in another format: its content, and when it
is ignored.
"""

import json
from pathlib import Path
from typing import NamedTuple

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
# Settings that txl_jax.json keeps. Without it a model in Hugging Face's format would have others,
# and a model in the original's too, except for memory_start.
OWN = {
    "model.compat.memory_start": MemoryStart.MASKED,
    "model.compat.final_norm": True,
    "train.mem_len": 11,
    "data.reset_at": "<eos>",
    "eval.temperature": 0.5,
    "eval.batch_size": 3,
}
SCORES = {"test": {"loss": 1.0, "perplexity": 2.0}}


class Written(NamedTuple):
    """A model as a conversion writes it."""

    folder: Path
    format: Format
    config: ExperimentConfig
    params: dict


@pytest.fixture(params=WRITE)
def written(request, tmp_path):
    model, params = foreign.make("ours")
    config = config_tree.replace(ExperimentConfig(), {"model": model, "eval": foreign.LENGTHS})
    config = config_tree.replace(config, OWN)
    info = ModelInfo(config, VOCABULARY, 7, "a description", SCORES)
    WRITE[request.param](tmp_path, info, leaves.from_tree(params))
    own_settings.write(tmp_path, info, request.param)
    return Written(tmp_path, request.param, config, params)


def update_json(path, **changes):
    """Changes some fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def has_note(model, text):
    """Returns whether a note of a model that was read contains a text."""
    return any(text in note for note in model.notes)


def test_settings_come_back(written):
    info = formats.read(written.folder).info
    assert info.config == written.config
    assert info.vocabulary == VOCABULARY
    assert info.step == 7
    assert info.description == "a description"
    assert info.scores == SCORES


def test_the_file_has_neither_what_shapes_parameters_nor_what_the_other_config_says(written):
    content = json.loads((written.folder / own_settings.NAME).read_text())
    assert content.keys() == {
        "txl_jax_settings",
        "description",
        "step",
        "config",
        "scores",
        "sha256",
    }
    settings = content["config"].keys()
    assert settings == set(own_settings.names(written.format))
    assert "model.n_layer" not in settings
    assert "model.cutoffs" not in settings
    assert "eval.mem_len" not in settings
    assert "eval.clamp_len" not in settings
    # Hugging Face's config has no segment length.
    assert ("eval.segment_len" in settings) is (written.format is Format.HUGGINGFACE)


def test_what_the_other_config_says_is_read_from_there(written):
    update_json(written.folder / "config.json", mem_len=4)
    config = formats.read(written.folder).info.config
    assert config == config_tree.replace(written.config, {"eval.mem_len": 4})


def change_a_weight(path):
    """Adds 1 to an element of the first matrix of a file."""
    tensors = {}
    for name, leaf in safetensors.read(path).items():
        tensors[name] = np.array(leaf.read())
    matrix = next(value for value in tensors.values() if value.ndim == 2)
    matrix[0, 0] += 1
    safetensors.write(path, leaves.from_tree(tensors), metadata={"format": "pt"})


def test_it_is_ignored_next_to_other_weights(written):
    """The model is read as if the file were missing, but with a note."""
    change_a_weight(written.folder / "model.safetensors")

    model = formats.read(written.folder)
    preset = original.PRESETS[written.format]
    assert has_note(model, "txl_jax.json is ignored")
    assert model.info.config.model.compat == tiny.compat_config(preset)
    assert model.info.config.data.reset_at is None
    assert model.info.step == 0

    (written.folder / own_settings.NAME).unlink()
    without = formats.read(written.folder)
    assert without.info.config == model.info.config
    assert not has_note(without, "txl_jax.json")


def test_documents_belong_to_the_vocabulary(written):
    """The end of documents is ignored if the words have another order.

    vocabulary.txt is ours. Without it the words are read from vocab.txt, as others write it.
    """
    (written.folder / "vocabulary.txt").unlink()
    words = list(foreign.WORDS)
    words[1:3] = [words[2], words[1]]
    (written.folder / "vocab.txt").write_text("\n".join(words))

    model = formats.read(written.folder)
    assert has_note(model, "data.reset_at of txl_jax.json is ignored")
    assert model.info.config == config_tree.replace(written.config, {"data.reset_at": None})


# Another version, settings that the file must not have, values that are not legal, and fields of
# another type.
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
def test_a_field_with_another_value_is_an_error_that_names_the_file(changes, written):
    path = written.folder / own_settings.NAME
    if isinstance(changes.get("config"), dict):
        # All other settings stay, so that only the changed one can be the error.
        settings = json.loads(path.read_text())["config"]
        changes = {"config": settings | changes["config"]}
    update_json(path, **changes)

    with pytest.raises(UserError, match=r"txl_jax\.json") as raised:
        formats.read(written.folder)
    assert "\n" not in str(raised.value), "an error is one line"


# Lists that nest too deep for Python, and an integer of more digits than it converts, are errors of
# their own types.
@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[" * 100_000, b"\xff", b'{"a": 1}', b"9" * 5000],
    ids=["empty", "null", "deep", "not UTF-8", "another object", "a long number"],
)
def test_other_content_is_an_error_that_names_the_file(content, written):
    (written.folder / own_settings.NAME).write_bytes(content)
    with pytest.raises(UserError, match=r"txl_jax\.json"):
        formats.read(written.folder)


def test_parameters_are_those_of_the_weights(written):
    foreign.check(formats.read(written.folder), written.config.model, written.params)
