"""Tests the model against the original's reference values: losses, hidden states, memories, gradients.

A difference here means that the mathematics of the model changed. Read tests/golden/README.md before
touching anything.
"""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.config import CompatConfig, DType, MemoryStart, ModelConfig, NormPlace
from txl_jax.interop import original
from txl_jax.modules.transformer_xl import TransformerXL

FOLDER = pathlib.Path(os.environ.get("TXL_GOLDEN_DIR") or pathlib.Path(__file__).parent / "golden")
FILES = sorted(FOLDER.glob("*.npz"))
TOLERANCE = 1e-9  # Of the largest entry of each tensor; float64 throughout.


def runs():
    """(file, start of the memory) for every run in the folder."""
    for file in FILES:
        for start in json.loads(str(np.load(file)["config_json"]))["initial_memory"]:
            yield pytest.param(file, start, id=f"{file.stem}-{start}")


def test_the_folder_holds_reference_values():
    assert FILES, f"no .npz file in {FOLDER}: nothing was compared"


@pytest.mark.parametrize(("file", "start"), list(runs()))
def test_golden(file, start, x64):
    arrays = dict(np.load(file))
    golden = json.loads(str(arrays["config_json"]))
    if golden["attn_type"] != 0:
        pytest.skip(f"attn_type {golden['attn_type']}: only relative attention (type 0) is built")
    if golden["ext_len"] > 0:
        pytest.skip(f"ext_len {golden['ext_len']}: no published run uses an extended context")
    config, compat = configs(golden, start)
    names = from_hugging_face if golden["library"] == "huggingface" else lambda tensors, _: tensors
    order = original.ClusterOrder(golden["cluster_order"])
    tensors = names(under(arrays, "param/"), golden)
    params = original.to_flax(tensors, config, vocab_size=golden["n_token"], cluster_order=order)

    prefix = "" if start == golden["initial_memory"][0] else f"{start}/"
    for k, found in enumerate(walk(params, arrays, golden, config, compat)):
        check_segment(found, k, arrays, golden, prefix)
        if k == golden["grad_segment"]:
            gradients = original.from_flax(found["gradients"], config, cluster_order=order)
            expected = names(under(arrays, f"{prefix}grad/"), golden)
            assert expected.keys() == set(tensors) - set(original.aliases(config))
            for name, value in expected.items():
                assert_close(gradients[name], value, f"gradient of {name}")


def configs(golden: dict, start: str) -> tuple[ModelConfig, CompatConfig]:
    """Our configuration of a golden model."""
    same = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "div_val", "tie_weight", "untie_r")
    model = ModelConfig(
        **{name: golden[name] for name in same},
        layer_norm=NormPlace.PRE if golden["pre_lnorm"] else NormPlace.POST,
        cutoffs=tuple(golden["cutoffs"]),
        tie_projs=tuple(golden["tie_projs"]),
        dropout=0.0,
        dtype=DType.FLOAT64,
    )
    model.validate()
    compat = CompatConfig(
        memory_start=MemoryStart.ZEROS if start == "zeros" else MemoryStart.MASKED,
        layer_norm_eps=golden["layer_norm_eps"],
        final_norm=False,
    )
    return model, compat


def walk(params, arrays, golden, config, compat):
    """Yields nll, hidden, memory after, and gradients of the mean nll, segment after segment."""
    model = TransformerXL(config, compat, golden["n_token"])
    lengths = {"clamp_len": max(golden["clamp_len"], 0), "same_length": golden["same_length"], "deterministic": True}

    def mean_nll(params, tokens, targets, memory):
        variables = {"params": params}
        hidden, memory = model.apply(variables, tokens, memory, **lengths, method=model.encode)
        nll = model.apply(variables, hidden, targets, method=model.nll)
        return nll.mean(), {"nll": nll, "hidden": hidden, "memory": memory}

    step = jax.jit(jax.value_and_grad(mean_nll, has_aux=True))
    memory = model.init_memory(batch_size=golden["bsz"], mem_len=golden["mem_len"])
    for k in range(len(golden["seg_lens"])):
        tokens, targets = (jnp.asarray(arrays[f"seg{k}/{name}"].T) for name in ("input", "target"))
        (_, found), gradients = step(params, tokens, targets, memory)
        memory = found["memory"]
        yield {**found, "gradients": gradients}


def check_segment(found: dict, k: int, arrays: dict, golden: dict, prefix: str) -> None:
    assert_close(found["nll"].T, arrays[f"{prefix}seg{k}/nll"], f"nll of segment {k}")
    assert_close(found["hidden"].swapaxes(0, 1), arrays[f"{prefix}seg{k}/hidden"], f"hidden states of segment {k}")
    memory = found["memory"]
    if golden["mem_len"] == 0:
        assert memory.hidden.size == 0
        return
    expected = arrays[f"{prefix}seg{k}/mems"][: golden["n_layer"]].swapaxes(1, 2)
    n_filled = expected.shape[2]
    np.testing.assert_array_equal(memory.valid, np.full(golden["bsz"], n_filled))
    assert_close(memory.hidden[:, :, memory.mem_len - n_filled :], expected, f"memory after segment {k}")


def assert_close(found, expected: np.ndarray, what: str) -> None:
    found = np.asarray(found)
    assert (found.dtype, expected.dtype) == (np.float64, np.float64), what
    assert found.shape == expected.shape, what
    worst, largest = np.abs(found - expected).max(), np.abs(expected).max()
    assert worst <= TOLERANCE * largest, f"{what}: off by {worst:.2e}, largest entry {largest:.2e}"


def under(arrays: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def from_hugging_face(tensors: dict, golden: dict) -> dict:
    """The original's names: no prefix, and u and v of all layers in one tensor."""
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for bias in ("r_w_bias", "r_r_bias"):
        layers = [tensors.pop(f"layers.{i}.dec_attn.{bias}", None) for i in range(golden["n_layer"])]
        if golden["untie_r"]:
            tensors[bias] = np.stack(layers)
    return tensors
