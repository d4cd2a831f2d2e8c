"""Tests of names of tensors behind what wrappers and frameworks put before and into them, in every
kind of file.
"""

import json

import numpy as np
import pytest

from support import foreign, torch_bytes
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves, names, original, safetensors
from txl_jax.interop.original import Format

WRAPPED = {
    "as it is": lambda name: name,
    "DataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "each layer": lambda name: name.replace("layers.0.", "layers.0._orig_mod.").replace(
        "layers.1.", "layers.1.module."
    ),
    "checkpoints of activations": lambda name: name.replace(
        "dec_attn.", "dec_attn._checkpoint_wrapped_module."
    ),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "Lightning": lambda name: f"model.{name}",
    "fairseq": lambda name: f"decoder.model.{name}",
    "a deep attribute": lambda name: f"net.module.lm._orig_mod.{name}",
    "the attribute transformer": lambda name: f"transformer.{name}",
}


def write_safetensors(path, tensors):
    path = path.with_name("model.safetensors")
    distinct = {id(value): name for name, value in reversed(tensors.items())}
    safetensors.write(
        path, leaves.from_tree({name: np.asarray(tensors[name]) for name in distinct.values()})
    )
    return path


def write_lightning(path, tensors):
    return torch_bytes.write_zip(path.with_name("last.ckpt"), {"epoch": 3, "state_dict": tensors})


def write_fairseq(path, tensors):
    return torch_bytes.write_legacy(
        path.with_name("checkpoint_best.pt"), {"args": None, "model": tensors}
    )


@pytest.mark.parametrize(
    "write", [write_safetensors, write_lightning, write_fairseq, torch_bytes.write_legacy]
)
@pytest.mark.parametrize("format", [Format.ORIGINAL, Format.HUGGINGFACE])
@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_model_behind_other_names_is_the_same(write, format, wrapped, tmp_path):
    config, params = foreign.make(original.PRESETS[format], **foreign.CONFIGS["div_val 2"])
    tensors = original.from_flax(params, config, format=format)
    path = write(tmp_path / "model.pt", {wrapped(name): array for name, array in tensors.items()})
    (tmp_path / "config.json").write_text(
        json.dumps({"pre_lnorm": False, "cutoffs": list(config.cutoffs)})
    )
    for source in (path, tmp_path):
        found = formats.read(source)
        assert found.format is format
        foreign.check(found, config, params)


def test_what_has_another_prefix_is_omitted_with_a_note():
    leaf = leaves.leaf_of(np.zeros(2))
    own = {"word_emb.emb_layers.0.weight": leaf, "crit.out_layers.0.bias": leaf}
    given = {"loss.weight": leaf, **{f"model.{name}": value for name, value in own.items()}}
    found = names.known(given)
    assert found.tensors == own and found.is_recognized and not found.has_transformer
    assert any("'model.'" in note for note in found.notes) and any(
        "loss.weight" in note for note in found.notes
    )
    # An average of the weights under another name.
    both = given | {f"ema.{name}": value for name, value in own.items()}
    found = names.known(both)
    assert found.tensors == own and any("'ema.'" in note for note in found.notes)
    assert names.known(own).notes == [] and names.known(own).tensors == own


def test_two_tensors_of_one_name_are_an_error():
    first, second = (leaves.leaf_of(np.zeros(2)) for _ in range(2))
    with pytest.raises(UserError, match=r" word_emb\.emb_layers\.0\.weight "):
        names.known(
            {"word_emb.emb_layers.0.weight": first, "module.word_emb.emb_layers.0.weight": second}
        )
    assert names.known(
        {"word_emb.emb_layers.0.weight": first, "module.word_emb.emb_layers.0.weight": first}
    )


def test_other_models_are_not_recognized():
    leaf = leaves.leaf_of(np.zeros(2))
    for name in (
        "h.0.ln.weight",
        "my_word_emb.emb_layers.0.weight",
        "word_emb.emb_layers.0.weight.x",
    ):
        assert not names.known({name: leaf}).is_recognized
