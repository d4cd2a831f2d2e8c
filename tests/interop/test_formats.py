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
    first = {id(value): name for name, value in reversed(tensors.items())}
    kept = {name: np.asarray(tensors[name]) for name in first.values()}
    safetensors.write(path.with_name("model.safetensors"), leaves.from_tree(kept))


@by_config
@pytest.mark.parametrize(
    "write", [torch_bytes.write_legacy, torch_bytes.write_zip, write_safetensors]
)
def test_a_folder_of_hugging_face(changes, write, tmp_path):
    config, params = foreign.make("hf", **changes)
    folder = foreign.huggingface_folder(tmp_path / "model", config, params, write=write)
    (folder / "vocab.txt").write_text("\n".join(foreign.WORDS))
    found = formats.read(folder)
    foreign.check(found, config, params)
    assert (
        found.format is Format.HUGGINGFACE
        and found.info.config.model.compat == tiny.compat_config("hf")
    )
    assert found.info.config.eval == foreign.LENGTHS
    assert (
        isinstance(found.info.vocabulary, WordVocabulary)
        and found.info.vocabulary.words == foreign.WORDS
    )


@by_config
def test_a_config_is_inferred_without_a_config_file(changes, tmp_path):
    """All but the place of the norm, and cutoffs whose clusters have one width."""
    config, params = foreign.make("hf", **changes)
    folder = foreign.huggingface_folder(tmp_path / "model", config, params)
    facts = json.loads((folder / "config.json").read_text())
    needed = {name: facts[name] for name in ("pre_lnorm", "cutoffs")}
    (folder / "config.json").write_text(json.dumps(needed))
    found = formats.read(folder)
    foreign.check(found, config, params)
    assert found.info.config.eval == EvalConfig()
    assert any("not record lengths" in note for note in found.notes)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(dtype, tmp_path):
    """A model that was cast has its frequencies cast too, which are a constant."""

    def write(path, tensors):
        torch_bytes.write_zip(path, {name: value.astype(dtype) for name, value in tensors.items()})

    config, params = foreign.make("hf", untie_r=True)
    found = formats.read(
        foreign.huggingface_folder(tmp_path / "model", config, params, write=write)
    )
    foreign.check(found, config, jax.tree.map(lambda value: value.astype(dtype), params))
    assert {leaf.dtype for leaf in found.leaves.values()} == {np.dtype(dtype)}


# Hugging Face has none of these.
ENCODINGS = [{"encoding": Encoding.SHAW, "num_positions": 7}, {"encoding": Encoding.VASWANI}]
ENCODINGS += [{"encoding": Encoding.AL_RFOU, "num_positions": 7, "n_head": 2, "d_head": 3}]


@pytest.mark.parametrize("changes", [*foreign.CONFIGS.values(), *ENCODINGS], ids=str)
@torch_bytes.by_format
def test_a_pickled_module_of_the_original(changes, write, tmp_path):
    config, params = foreign.make("pytorch", **changes)
    path = write(tmp_path / "model.pt", foreign.pickled_module(config, params))
    found = formats.read(path)
    assert found.format is Format.ORIGINAL
    foreign.check(found, config, params)
    assert found.info.config.model.compat == tiny.compat_config("pytorch")
    assert isinstance(found.info.vocabulary, IdVocabulary)
    assert found.info.config.eval == dataclasses.replace(foreign.LENGTHS, segment_len=3)


@by_config
def test_a_state_dict_of_the_original_with_a_config_file(changes, tmp_path):
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config)
    torch_bytes.write_zip(tmp_path / "weights.pt", {"state_dict": tensors, "epoch": 3})
    (tmp_path / "config.json").write_text(json.dumps(foreign.facts_of(config)))
    foreign.check(formats.read(tmp_path), config, params)
    write_safetensors(tmp_path / "weights.pt", tensors)  # Now preferred.
    foreign.check(formats.read(tmp_path), config, params)


# Its u and v are shared by all layers.
NVIDIA = {
    name: {k: v for k, v in changes.items() if k != "untie_r"}
    for name, changes in foreign.CONFIGS.items()
}


@pytest.mark.parametrize("changes", NVIDIA.values(), ids=NVIDIA)
def test_a_checkpoint_of_nvidia(changes, tmp_path):
    config, params = foreign.make("pytorch", **changes)
    torch_bytes.write_zip(
        tmp_path / "checkpoint_best.pt", foreign.nvidia_checkpoint(config, params)
    )
    found = formats.read(tmp_path)
    assert found.format is Format.NVIDIA
    foreign.check(found, config, params)
    compat = dataclasses.replace(
        tiny.compat_config("pytorch"), same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE
    )
    assert found.info.config.model.compat == compat
    assert found.info.config.eval == dataclasses.replace(foreign.LENGTHS, segment_len=3)
    assert (
        isinstance(found.info.vocabulary, WordVocabulary)
        and found.info.vocabulary.words == foreign.WORDS
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 10**12}, r"layers\.2\.\S+ .*\[60, 6\]"),
        ({"vocab_size": 14}, r"word_emb\.emb_layers\.0\.weight .*\[13, 6\].*\[14, 6\]"),
        ({"tie_word_embeddings": False}, None),
        ({"cutoffs": [7, 3]}, r"model\.cutoffs"),
        ({"cutoffs": list(range(1, 1002)), "div_val": 1 << 60}, r"^\S+: cutoffs is"),
        ({"n_head": "4"}, "n_head is '4'"),
        ({"n_head": 3}, r"\[\S+ 5\]"),
        ({"untie_r": True}, r"r_w_bias"),
        ({"mem_len": -1}, "mem_len is -1"),
        ({"layer_norm_epsilon": 1e-6}, None),
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_tensors(change, message, tmp_path):
    folder = foreign.huggingface_folder(tmp_path / "model", *foreign.make("hf"))
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | change))
    if message is None:
        assert formats.read(folder).info.config.model.compat.layer_norm_eps == change.get(
            "layer_norm_epsilon", 1e-5
        )
        return
    with pytest.raises(UserError, match=message) as caught:
        formats.read(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_cutoffs_that_no_shape_gives_are_asked_for(tmp_path):
    config, params = foreign.make("hf", cutoffs=foreign.CUTOFFS)
    tensors = original.from_flax(params, config, format=Format.HUGGINGFACE)
    path = torch_bytes.write_zip(tmp_path / "pytorch_model.bin", tensors)
    with pytest.raises(UserError, match=r"crit\.cluster_weight has shape \[2, 6\].*cutoffs"):
        formats.read(path)


def test_what_holds_no_weights(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=re.escape(str(path))):
            formats.read(path)
    safetensors.write(
        tmp_path / "model.safetensors", leaves.from_tree({"stack": {"a": np.zeros(3)}})
    )
    with pytest.raises(UserError, match=r"stack/a"):
        formats.read(tmp_path)
    gpt2 = torch_bytes.write_zip(
        tmp_path / "gpt2.bin", {"transformer.h.0.ln_1.weight": np.zeros(3, np.float32)}
    )
    with pytest.raises(UserError, match=r"transformer\.h\.0\.ln_1\.weight"):
        formats.read(gpt2)
