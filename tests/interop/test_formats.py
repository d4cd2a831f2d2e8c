"""Tests of reading other implementations' files: the parameters that were written, and the inferred
configuration.
"""

import dataclasses
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from support import foreign, tiny, torch_bytes
from txl_jax.config import AttentionWindow, Encoding, EvalConfig
from txl_jax.data.id_tokens import IdVocabulary
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves, original, safetensors
from txl_jax.interop.original import Format

by_config = pytest.mark.parametrize("changes", foreign.CONFIGS.values(), ids=foreign.CONFIGS)


def write_safetensors(path, tensors):
    """Writes one name of each group of shared tensors, as transformers does."""
    first_names = {}
    for name, value in tensors.items():
        first_names.setdefault(id(value), name)
    kept = {name: np.asarray(tensors[name]) for name in first_names.values()}
    safetensors.write(path.with_name("model.safetensors"), leaves.from_tree(kept))


def has_words(vocabulary):
    """Returns whether a vocabulary is of `foreign.WORDS`."""
    return isinstance(vocabulary, WordVocabulary) and vocabulary.words == foreign.WORDS


@by_config
@pytest.mark.parametrize(
    "write", [torch_bytes.write_legacy, torch_bytes.write_zip, write_safetensors]
)
def test_a_directory_of_hugging_face(changes, write, tmp_path):
    config, params = foreign.make("hf", **changes)
    folder = foreign.huggingface_folder(tmp_path / "model", config, params, write=write)
    (folder / "vocab.txt").write_text("\n".join(foreign.WORDS))

    model = formats.read(folder)

    assert model.format is Format.HUGGINGFACE
    foreign.check(model, config, params)
    assert model.info.config.model.compat == tiny.compat_config("hf")
    assert model.info.config.eval == foreign.LENGTHS
    assert has_words(model.info.vocabulary)


@by_config
def test_a_config_is_inferred_without_a_config_file(changes, tmp_path):
    """All but the place of the norm, and cutoffs whose clusters have one width.

    Lengths of evaluation are in no tensor, so they are the defaults, with a note.
    """
    config, params = foreign.make("hf", **changes)
    folder = foreign.huggingface_folder(tmp_path / "model", config, params)
    facts = json.loads((folder / "config.json").read_text())
    needed = {name: facts[name] for name in ("pre_lnorm", "cutoffs")}
    (folder / "config.json").write_text(json.dumps(needed))

    model = formats.read(folder)

    foreign.check(model, config, params)
    assert model.info.config.eval == EvalConfig()
    assert any("not record lengths" in note for note in model.notes)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(dtype, tmp_path):
    """A model that was cast has its frequencies cast too, which are a constant."""

    def write(path, tensors):
        torch_bytes.write_zip(path, {name: value.astype(dtype) for name, value in tensors.items()})

    config, params = foreign.make("hf", untie_r=True)
    folder = foreign.huggingface_folder(tmp_path / "model", config, params, write=write)

    model = formats.read(folder)

    foreign.check(model, config, jax.tree.map(lambda value: value.astype(dtype), params))
    for path, leaf in model.leaves.items():
        assert leaf.dtype == np.dtype(dtype), path


# Hugging Face has none of these. The original cuts Al-Rfou's vectors, of size 6, into heads.
ENCODINGS = [{"encoding": Encoding.SHAW, "num_positions": 7}, {"encoding": Encoding.VASWANI}]
ENCODINGS += [{"encoding": Encoding.AL_RFOU, "num_positions": 7, "n_head": 2, "d_head": 3}]


@pytest.mark.parametrize("changes", [*foreign.CONFIGS.values(), *ENCODINGS], ids=str)
@torch_bytes.by_format
def test_a_pickled_module_of_the_original(changes, write, tmp_path):
    config, params = foreign.make("pytorch", **changes)
    path = write(tmp_path / "model.pt", foreign.pickled_module(config, params))

    model = formats.read(path)

    assert model.format is Format.ORIGINAL
    foreign.check(model, config, params)
    assert model.info.config.model.compat == tiny.compat_config("pytorch")
    # The module also keeps the length of its segments, 3.
    assert model.info.config.eval == dataclasses.replace(foreign.LENGTHS, segment_len=3)
    assert isinstance(model.info.vocabulary, IdVocabulary)


@by_config
def test_a_state_dict_of_the_original_with_a_config_file(changes, tmp_path):
    """A safetensors file is preferred."""
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config)
    (tmp_path / "config.json").write_text(json.dumps(foreign.facts_of(config)))

    torch_bytes.write_zip(tmp_path / "weights.pt", {"state_dict": tensors, "epoch": 3})
    foreign.check(formats.read(tmp_path), config, params)

    write_safetensors(tmp_path / "weights.pt", tensors)
    foreign.check(formats.read(tmp_path), config, params)


@by_config
def test_a_checkpoint_of_nvidia(changes, tmp_path):
    """Its u and v are shared by all layers. It has the segments' length too, 3."""
    config, params = foreign.make("pytorch", **changes | {"untie_r": False})
    checkpoint = foreign.nvidia_checkpoint(config, params)
    torch_bytes.write_zip(tmp_path / "checkpoint_best.pt", checkpoint)

    model = formats.read(tmp_path)

    assert model.format is Format.NVIDIA
    foreign.check(model, config, params)
    compat = tiny.compat_config("pytorch")
    assert model.info.config.model.compat == dataclasses.replace(
        compat, same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE
    )
    assert model.info.config.eval == dataclasses.replace(foreign.LENGTHS, segment_len=3)
    assert has_words(model.info.vocabulary)


def folder_with_config(path, change):
    """A model's directory, with another value of a setting in its config.json."""
    folder = foreign.huggingface_folder(path, *foreign.make("hf"))
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | change))
    return folder


# The model has 2 layers of 4 heads of size 5, a model size of 6, and 13 tokens. The first matrix of
# a layer has 60 rows, for queries, keys and values of all heads.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 10**12}, r"layers\.2\.\S+ .*\[60, 6\]"),
        ({"vocab_size": 14}, r"word_emb\.emb_layers\.0\.weight .*\[13, 6\].*\[14, 6\]"),
        ({"cutoffs": [7, 3]}, r"model\.cutoffs"),
        ({"cutoffs": list(range(1, 1002)), "div_val": 1 << 60}, r"^\S+: cutoffs must\b.*\[1, 2, "),
        ({"n_head": "4"}, r"n_head must\b.* '4'"),
        ({"n_head": 3}, r"\[\S+ 5\]"),
        ({"untie_r": True}, r"r_w_bias"),
        ({"mem_len": -1}, r"mem_len must\b.* -1\b"),
    ],
    ids=[
        "n_layer",
        "vocab_size",
        "cutoffs",
        "many cutoffs",
        "text",
        "n_head",
        "untie_r",
        "mem_len",
    ],
)
def test_a_config_that_contradicts_the_tensors(change, message, tmp_path):
    folder = folder_with_config(tmp_path / "model", change)
    with pytest.raises(UserError, match=message) as caught:
        formats.read(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "tie_weight", "epsilon"),
    [
        ({"tie_word_embeddings": False}, False, 1e-5),
        ({"layer_norm_epsilon": 1e-6}, True, 1e-6),
    ],
    ids=["tie_word_embeddings", "layer_norm_epsilon"],
)
def test_a_config_may_set_what_the_tensors_leave_open(change, tie_weight, epsilon, tmp_path):
    """Tables that are equal may be tied or not, and no tensor has the layer norm's epsilon."""
    folder = folder_with_config(tmp_path / "model", change)
    model = formats.read(folder).info.config.model
    assert model.tie_weight is tie_weight
    assert model.compat.layer_norm_eps == epsilon


def test_cutoffs_that_no_shape_gives_are_asked_for(tmp_path):
    """All clusters have one table, and there is no config.json. Only their number, 2 besides the
    head, is in a shape.
    """
    config, params = foreign.make("hf", cutoffs=foreign.CUTOFFS)
    tensors = original.from_flax(params, config, format=Format.HUGGINGFACE)
    path = torch_bytes.write_zip(tmp_path / "pytorch_model.bin", tensors)
    with pytest.raises(UserError, match=r"crit\.cluster_weight has shape \[2, 6\].*cutoffs"):
        formats.read(path)


@pytest.mark.parametrize("name", [".", "nothing"])
def test_a_directory_without_weights_is_named(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(UserError, match=re.escape(str(path))):
        formats.read(path)


def test_tensors_of_another_model_are_named(tmp_path):
    stack = leaves.from_tree({"stack": {"a": np.zeros(3)}})
    safetensors.write(tmp_path / "model.safetensors", stack)
    with pytest.raises(UserError, match=r"stack/a"):
        formats.read(tmp_path)

    gpt2 = {"transformer.h.0.ln_1.weight": np.zeros(3, np.float32)}
    path = torch_bytes.write_zip(tmp_path / "gpt2.bin", gpt2)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.ln_1\.weight"):
        formats.read(path)
