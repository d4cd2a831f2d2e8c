"""Checkpoints of the TensorFlow release, written from our own parameters without TensorFlow."""

import sys
import types

import numpy as np

from support import foreign


def variables_of(config, params, *, same_dim=True) -> dict[str, np.ndarray]:
    """The variables of the release, which has matrices as [in, out] like us, and one bias for each cluster."""
    layers, found = params["stack"]["layers"], {}
    heads = config.n_head * config.d_head
    for i in range(config.n_layer):
        attention = {name: np.asarray(value[i]) for name, value in layers["attention"].items()}
        qkv = [attention[name].reshape(config.d_model, heads) for name in ("query", "key", "value")]
        norm, feed, last = (layers[name] for name in ("attention_norm", "feed_forward", "feed_forward_norm"))
        found |= {
            f"layer_{i}/rel_attn/qkv/kernel": np.concatenate(qkv, 1),
            f"layer_{i}/rel_attn/r/kernel": attention["position_key"].reshape(config.d_model, heads),
            f"layer_{i}/rel_attn/o/kernel": attention["output"].reshape(heads, config.d_model),
            f"layer_{i}/rel_attn/LayerNorm/gamma": norm["scale"][i],
            f"layer_{i}/rel_attn/LayerNorm/beta": norm["bias"][i],
            f"layer_{i}/ff/layer_1/kernel": feed["inner_kernel"][i],
            f"layer_{i}/ff/layer_1/bias": feed["inner_bias"][i],
            f"layer_{i}/ff/layer_2/kernel": feed["outer_kernel"][i],
            f"layer_{i}/ff/layer_2/bias": feed["outer_bias"][i],
            f"layer_{i}/ff/LayerNorm/gamma": last["scale"][i],
            f"layer_{i}/ff/LayerNorm/beta": last["bias"][i],
        }
    biases = layers["biases"] if config.untie_r else params["stack"]["biases"]
    found |= {"r_w_bias": biases["content"], "r_r_bias": biases["position"]}
    bounds = [0, *config.cutoffs, foreign.V]
    softmax, several = params["softmax"], config.div_val > 1
    for c in range(config.n_cluster):
        embed = f"adaptive_embed/cutoff_{c}/" if several else "adaptive_embed/"
        if several or c == 0:
            found[f"{embed}lookup_table"] = params["embedding"][f"table_{c}"]
            if f"projection_{c}" in params["embedding"]:
                found[f"{embed}proj_W"] = params["embedding"][f"projection_{c}"]
        if f"projection_{c}" in softmax:
            found[f"adaptive_softmax/cutoff_{c}/proj"] = softmax[f"projection_{c}"]
        if config.cutoffs:
            found[f"adaptive_softmax/cutoff_{c}/b"] = softmax["bias"][bounds[c] : bounds[c + 1]]
    if config.cutoffs:
        found["adaptive_softmax/cutoff_0/cluster_W"] = softmax["tail_table"]
        found["adaptive_softmax/cutoff_0/cluster_b"] = softmax["tail_bias"]
    else:
        found["adaptive_softmax/bias"] = softmax["bias"]
    if not same_dim:
        del found["adaptive_embed/cutoff_0/proj_W"], found["adaptive_softmax/cutoff_0/proj"]
    moments = {f"{name}/{slot}": value for name, value in found.items() for slot in ("Adam", "Adam_1")}
    moments["r_w_bias/ExponentialMovingAverage"] = found["r_w_bias"]
    named = {f"transformer/{name}": np.ascontiguousarray(value) for name, value in (found | moments).items()}
    return named | {"global_step": np.int64(3), "beta1_power": np.float32(0.9)}


class DataLossError(Exception):
    """The error of the reader below."""


class Reader:
    """A checkpoint in an npz file that is called an index."""

    def __init__(self, prefix):
        try:
            with np.load(f"{prefix}.index") as arrays:
                self.arrays = dict(arrays)
        except (OSError, ValueError) as error:
            raise DataLossError from error

    def get_variable_to_shape_map(self):
        return {name.replace("|", "/"): list(value.shape) for name, value in self.arrays.items()}

    def get_tensor(self, name):
        return self.arrays[name.replace("/", "|")]


def write_with_stub(prefix, variables, monkeypatch):
    """Writes variables for a module of the test that takes TensorFlow's place."""
    with open(f"{prefix}.index", "wb") as file:
        np.savez(file, **{name.replace("/", "|"): value for name, value in variables.items()})
    stub = types.ModuleType("tensorflow")
    stub.train = types.SimpleNamespace(load_checkpoint=Reader)  # type: ignore[attr-defined]
    stub.errors = types.SimpleNamespace(OpError=DataLossError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", stub)
