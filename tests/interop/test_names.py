"""Tests of tensor names with what wrappers and frameworks put before and into them, in every kind
of file.
"""

import json

import numpy as np
import pytest

from support import foreign, torch_bytes
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves, names, original, safetensors
from txl_jax.interop.original import Format


def wrapped_layers(name):
    """Each layer has a wrapper of its own."""
    name = name.replace("layers.0.", "layers.0._orig_mod.")
    return name.replace("layers.1.", "layers.1.module.")


def wrapped_attention(name):
    """The attention is computed again for gradients."""
    return name.replace("dec_attn.", "dec_attn._checkpoint_wrapped_module.")


# What a wrapper makes of a name, where `{}` is the name.
PREFIXES = {
    "as it is": "{}",
    "DataParallel": "module.{}",
    "torch.compile": "_orig_mod.{}",
    "both": "module._orig_mod.{}",
    "FSDP": "_fsdp_wrapped_module.{}",
    "Lightning": "model.{}",
    "fairseq": "decoder.model.{}",
    "a deep attribute": "net.module.lm._orig_mod.{}",
    "the attribute transformer": "transformer.{}",
}
WRAPPED = {name: pattern.format for name, pattern in PREFIXES.items()}
WRAPPED |= {"each layer": wrapped_layers, "checkpoints of activations": wrapped_attention}


def write_safetensors(path, tensors):
    """Writes one name of each group of shared tensors."""
    path = path.with_name("model.safetensors")
    first_names = {}
    for name, value in tensors.items():
        first_names.setdefault(id(value), name)
    kept = {name: np.asarray(tensors[name]) for name in first_names.values()}
    safetensors.write(path, leaves.from_tree(kept))
    return path


def write_lightning(path, tensors):
    return torch_bytes.write_zip(path.with_name("last.ckpt"), {"epoch": 3, "state_dict": tensors})


def write_fairseq(path, tensors):
    path = path.with_name("checkpoint_best.pt")
    return torch_bytes.write_legacy(path, {"args": None, "model": tensors})


@pytest.mark.parametrize(
    "write", [write_safetensors, write_lightning, write_fairseq, torch_bytes.write_legacy]
)
@pytest.mark.parametrize("format", [Format.ORIGINAL, Format.HUGGINGFACE])
@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_model_behind_other_names_is_the_same(write, format, wrapped, tmp_path):
    config, params = foreign.make(original.PRESETS[format], **foreign.CONFIGS["div_val 2"])
    tensors = original.from_flax(params, config, format=format)
    renamed = {wrapped(name): array for name, array in tensors.items()}
    path = write(tmp_path / "model.pt", renamed)
    # Settings that shapes do not always show.
    facts = {"pre_lnorm": False, "cutoffs": list(config.cutoffs)}
    (tmp_path / "config.json").write_text(json.dumps(facts))

    for source in (path, tmp_path):
        model = formats.read(source)
        assert model.format is format, source
        foreign.check(model, config, params)


LEAF = leaves.leaf_of(np.zeros(2))


def has_note(known, text):
    """Returns whether a note of `names.known` contains a text."""
    return any(text in note for note in known.notes)


def test_tensors_with_another_prefix_are_omitted_with_a_note():
    expected = {"word_emb.emb_layers.0.weight": LEAF, "crit.out_layers.0.bias": LEAF}
    tensors = {"loss.weight": LEAF}
    for name, leaf in expected.items():
        tensors[f"model.{name}"] = leaf

    known = names.known(tensors)
    assert known.tensors == expected
    assert known.is_recognized
    assert not known.has_transformer
    assert has_note(known, "'model.'")
    assert has_note(known, "loss.weight")

    # An average of the weights under another name is omitted too.
    average = {f"ema.{name}": leaf for name, leaf in expected.items()}
    known = names.known(tensors | average)
    assert known.tensors == expected
    assert has_note(known, "'ema.'")


def test_tensors_without_a_prefix_have_no_note():
    tensors = {"word_emb.emb_layers.0.weight": LEAF, "crit.out_layers.0.bias": LEAF}
    known = names.known(tensors)
    assert known.tensors == tensors
    assert known.notes == []


def test_two_tensors_of_one_name_are_an_error():
    """The same tensor under two names is not."""
    name = "word_emb.emb_layers.0.weight"
    other_leaf = leaves.leaf_of(np.zeros(2))
    with pytest.raises(UserError, match=r" word_emb\.emb_layers\.0\.weight "):
        names.known({name: LEAF, f"module.{name}": other_leaf})

    assert names.known({name: LEAF, f"module.{name}": LEAF})


@pytest.mark.parametrize(
    "name",
    ["h.0.ln.weight", "my_word_emb.emb_layers.0.weight", "word_emb.emb_layers.0.weight.x"],
)
def test_other_models_are_not_recognized(name):
    assert not names.known({name: LEAF}).is_recognized
