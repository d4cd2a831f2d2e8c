"""Tests of the TensorFlow release's checkpoints: with a reader of the test's own, and with TensorFlow where it is."""

import dataclasses
import json
import pickle
import sys

import jax
import numpy as np
import pytest

from support import foreign, tiny
from support.cases import full_but
from support.foreign_tensorflow import variables_of, write_with_stub
from support.tensorflow_oracle import Oracle
from txl_jax.config import DType, EvalConfig
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves
from txl_jax.interop.formats import Format
from txl_jax.modules.transformer_xl import TransformerXL

CUTOFFS = foreign.CUTOFFS
# Projections of the whole table are shared by a full softmax there.
CONFIGS = {
    "full softmax": {},
    "d_embed": {"d_embed": 8, "tie_projs": (True,)},
    "div_val 1": {"cutoffs": CUTOFFS, "untie_r": True},
    "div_val 1, projections": {"cutoffs": CUTOFFS, "d_embed": 8, "tie_projs": (False, True, True)},
    "div_val 2, as WikiText-103": {"cutoffs": CUTOFFS, "div_val": 2, "tie_projs": (False, True, True), "untie_r": True},
    "div_val 2, as One Billion Word": {"cutoffs": CUTOFFS, "div_val": 2, "untie_r": True},
}
by_config = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)


def write_with_tensorflow(prefix, variables, monkeypatch):
    import tensorflow

    names, values = zip(*sorted(variables.items()), strict=True)
    tensorflow.raw_ops.SaveV2(
        prefix=str(prefix), tensor_names=list(names), shape_and_slices=[""] * len(names), tensors=list(values)
    )


with_tensorflow = pytest.param(write_with_tensorflow, id="TensorFlow", marks=pytest.mark.nightly(part="tensorflow"))
by_writer = pytest.mark.parametrize("write", [pytest.param(write_with_stub, id="stub"), with_tensorflow])


@by_config
@by_writer
def test_a_checkpoint(write, changes, tmp_path, monkeypatch):
    config, params = foreign.make("tf", **changes)
    write(tmp_path / "model.ckpt-3", variables_of(config, params), monkeypatch)
    found = formats.read(tmp_path / "model.ckpt-3")
    assert found.format is Format.TENSORFLOW
    foreign.check(found, config, params)
    assert found.compat == tiny.compat_config("tf") and found.compat.layer_norm_eps == 1e-12
    assert found.eval_config == EvalConfig()
    number = len(variables_of(config, params))
    assert f"{(number - 3) // 3 * 2 + 3} variables of the optimizer" in found.notes[-1]


@by_writer
def test_a_first_cluster_without_projections_gets_identities(write, tmp_path, monkeypatch):
    """As One Billion Word has it: proj_same_dim is off."""
    config, params = foreign.make("tf", **CONFIGS["div_val 2, as One Billion Word"])
    identity = np.eye(config.d_model, dtype=np.float32)
    params["embedding"]["projection_0"] = params["softmax"]["projection_0"] = identity
    write(tmp_path / "model.ckpt-3", variables_of(config, params, same_dim=False), monkeypatch)
    foreign.check(formats.read(tmp_path), config, params)


def test_the_published_layout(tmp_path, monkeypatch):
    """Folders "model" and "data"; the corpus gives vocabulary and lengths; "checkpoint" names one of two."""
    config, params = foreign.make("tf", untie_r=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    other = jax.tree.map(lambda value: value + 1, params)
    write_with_stub(tmp_path / "model" / "model.ckpt-0", variables_of(config, params), monkeypatch)
    write_with_stub(tmp_path / "model" / "model.ckpt-10", variables_of(config, other), monkeypatch)
    corpus = {"dataset": "wt103", "vocab": {"idx2sym": list(foreign.WORDS), "lower_case": False}}
    (tmp_path / "data" / "cache.pkl").write_bytes(pickle.dumps(corpus, 2))
    (tmp_path / "data" / "corpus-info.json").write_text(json.dumps({"dataset": "wt103", "vocab_size": foreign.V}))
    foreign.check(formats.read(tmp_path), config, other)
    (tmp_path / "model" / "checkpoint").write_text('model_checkpoint_path: "/old/place/model.ckpt-0"\n')
    found = formats.read(tmp_path)
    foreign.check(found, config, params)
    assert found.vocabulary is not None and found.vocabulary.size == foreign.V
    assert found.eval_config == EvalConfig(segment_len=128, mem_len=1600, clamp_len=1000, same_length=True)


def test_without_tensorflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"")
    with pytest.raises(UserError, match=r"txl_jax\[tensorflow\]"):
        formats.read(tmp_path)


@by_writer
def test_what_cannot_be_read_is_named(write, tmp_path, monkeypatch):
    config, params = foreign.make("tf")
    variables = variables_of(config, params) | {"transformer/layer_0/gate/kernel": np.zeros((2, 2))}
    write(tmp_path / "model.ckpt-0", variables, monkeypatch)
    with pytest.raises(UserError, match="transformer/layer_0/gate/kernel"):
        formats.read(tmp_path)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"hello")
    with pytest.raises(UserError, match="damaged or incomplete"):
        formats.read(tmp_path)


@pytest.mark.parametrize("changes", full_but([CONFIGS["div_val 2, as WikiText-103"]], CONFIGS.values()))
def test_the_release_gives_the_same_losses(changes, tmp_path, monkeypatch, x64):
    """Of three segments from a memory of zeros, in float64, by the release's model in numpy."""
    config, params = foreign.make("tf", **changes)
    variables = variables_of(config, params)
    write_with_stub(tmp_path / "model.ckpt-0", variables, monkeypatch)
    found = formats.read(tmp_path)
    tokens = tiny.text(3 * 4 + 1, rows=1)
    tokens[0, 2:6] = (0, 5, foreign.V - 1, 10)  # Each cluster.
    model = TransformerXL(dataclasses.replace(found.config, dtype=DType.FLOAT64), found.compat, found.vocab_size)
    read = {"params": jax.tree.map(np.float64, leaves.to_tree(found.params))}
    sizes = {"cutoffs": config.cutoffs, "vocab_size": foreign.V, "n_layer": config.n_layer, "mem_len": 5}
    for same_length in (False, True):
        lengths = {"clamp_len": 4, "same_length": same_length}
        encode, memory, losses = tiny.encoder(model, **lengths), model.init_memory(batch_size=1, mem_len=5), []
        for start in range(0, 12, 4):
            hidden, memory = encode(read, tokens[:, start : start + 4], memory)
            losses.append(model.apply(read, hidden, tokens[:, start + 1 : start + 5], method=model.nll)[0])
        expected = Oracle(variables, **sizes, **lengths).losses(tokens[0], 4)
        np.testing.assert_allclose(np.concatenate(losses), expected, rtol=1e-9)
