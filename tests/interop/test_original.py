"""Tests of weights by the original's and Hugging Face's names: round trips, lazy reading, shared names, refusals."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import ROOT, foreign, tiny
from support.tiny_run import assert_equal
from txl_jax.config import Encoding, ModelConfig, NormPlace
from txl_jax.interop import huggingface, leaves, original
from txl_jax.interop.leaves import Renamed

CONFIGS = foreign.CONFIGS | {
    "Shaw": {"encoding": Encoding.SHAW, "num_positions": 7},
    "Vaswani": {"encoding": Encoding.VASWANI},
    "Al-Rfou": {"encoding": Encoding.AL_RFOU, "num_positions": 7, "n_head": 2, "d_head": 3},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("order", original.ClusterOrder)
def test_params_survive_the_round_trip(changes, order):
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config, cluster_order=order)
    assert_equal(original.to_flax(tensors, config, vocab_size=tiny.V, cluster_order=order), params)


GOLDEN = ["s09_adaptive_div1_wt103", "s13_adaptive_div4_wt103", "s15_not_tied", "s16_untie_r", "s18_vaswani"]


@pytest.mark.parametrize("name", [*GOLDEN, "s25_hf_zeros", "s26_hf_empty"])
def test_golden_tensors_survive_the_round_trip(name):
    names, prefix = (huggingface, "transformer.") if "_hf_" in name else (original, "")
    frequencies = prefix + original.FREQUENCIES
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as arrays:
        golden = json.loads(str(arrays["config_json"]))
        tensors = {key.removeprefix("param/"): arrays[key] for key in arrays.files if key.startswith("param/")}
        tensors[frequencies] = arrays[f"buffer/{frequencies}"]
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in golden.items() if key in fields}
    config = ModelConfig(**values, encoding=Encoding.VASWANI if golden.get("attn_type") == 2 else Encoding.RELATIVE)
    assert names.aliases(config) == golden["aliases"]
    again = names.from_flax(names.to_flax(tensors, config, vocab_size=golden["n_token"]), config)
    assert again.keys() == tensors.keys()
    np.testing.assert_allclose(again.pop(frequencies), tensors.pop(frequencies), rtol=1e-15)
    for key, value in tensors.items():
        np.testing.assert_array_equal(again[key], value, err_msg=key)


def test_types_are_kept():
    config, params = foreign.make("pytorch")
    tensors = original.from_flax(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), config)
    assert {value.dtype for value in tensors.values()} == {np.dtype(jnp.bfloat16)}


LAZY = CONFIGS["div_val 2"] | {"d_embed": 8}


class Counted(dict):
    """Tensors by name that count how often each is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reads = []

    def __getitem__(self, name):
        self.reads.append(name)
        return super().__getitem__(name)


def test_a_parameter_reads_its_own_tensors_alone():
    config, params = foreign.make("hf", **LAZY)
    tensors = Counted(huggingface.from_flax(params, config))
    found = huggingface.to_leaves(tensors, config, vocab_size=tiny.V)
    tensors.reads.clear()
    norm = found["stack/layers/attention_norm/scale"]
    np.testing.assert_array_equal(norm.read(), params["stack"]["layers"]["attention_norm"]["scale"])
    names = [f"transformer.layers.{layer}.dec_attn.layer_norm.weight" for layer in range(tiny.N)]
    assert tensors.reads == names
    tensors.reads.clear()
    np.testing.assert_array_equal(norm.part(1), norm.read()[1])
    assert tensors.reads == [names[1], *names]


def test_leaves_are_the_tree_and_can_be_of_another_type():
    _, params = foreign.make("pytorch", **LAZY)
    found = leaves.from_tree(params)
    assert_equal(leaves.to_tree(found), params)
    half = leaves.as_type(found, np.dtype(np.float16))["softmax/bias"]
    assert half.dtype == half.read().dtype == half.part(slice(2)).dtype == np.float16


def test_shared_tensors_get_their_second_names_back():
    config = tiny.model_config(**LAZY | {"untie_r": False})
    shared = original.aliases(config) | {"u": "w"}
    found = original.fill_shared({"crit.out_layers.1.weight": np.ones(2), "w": np.zeros(3)}, shared)
    assert set(found) == {"crit.out_layers.1.weight", "word_emb.emb_layers.1.weight", "u", "w"} and len(found) == 4
    assert found["word_emb.emb_layers.1.weight"] is found["crit.out_layers.1.weight"] and found["u"] is found["w"]


def test_renamed_tensors_and_added_ones():
    found = Renamed({"a": np.zeros(1), "b": np.ones(1)}, {"c": "b"}, {"d": np.full(1, 2.0)})
    assert list(found) == ["c", "d"] and len(found) == 2 and "a" not in found
    assert [found[name][0] for name in found] == [1, 2]


def frequencies() -> np.ndarray:
    return (1 / 10000 ** (np.arange(0, tiny.D, 2) / tiny.D)).astype(np.float32)


def test_cluster_order_flips_the_tails_and_nothing_else():
    config, params = foreign.make("pytorch", **CONFIGS["div_val 2"])
    reverse = original.from_flax(params, config)
    forward = original.from_flax(params, config, cluster_order=original.ClusterOrder.FORWARD)
    np.testing.assert_array_equal(forward["crit.cluster_bias"], params["softmax"]["tail_bias"])
    for name in reverse:
        flipped = name in ("crit.cluster_weight", "crit.cluster_bias")
        np.testing.assert_array_equal(reverse[name][::-1] if flipped else reverse[name], forward[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("layers.1.dec_attn.r_net.weight", None, r"[^\[]*\[20, 6\]"),
        ("r_emb", np.zeros((3, 4)), r".*\[3, 4\]"),
        ("layers.1.dec_attn.o_net.weight", np.zeros((20, 6)), r".*\[20, 6\].*\[6, 20\]"),
        ("word_emb.emb_layers.0.weight", np.zeros((14, 6)), r".*\[14, 6\].*\[13, 6\]"),
        ("crit.out_layers.0.weight", np.zeros((13, 6)), r".*\bword_emb\.emb_layers\.0\.weight\b"),  # They share one.
        (original.FREQUENCIES, 2 * frequencies(), r".*\[3\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, change, named):
    config, params = foreign.make("pytorch")
    tensors = original.from_flax(params, config) | {name: change}
    tensors = {key: value for key, value in tensors.items() if value is not None}
    with pytest.raises(ValueError, match=rf"{re.escape(name)}\b{named}"):
        original.to_flax(tensors, config, vocab_size=tiny.V)


@pytest.mark.parametrize("names", [original, huggingface])
@pytest.mark.parametrize(
    ("changes", "final_norm", "named"),
    [
        ({"layer_norm": NormPlace.PRE}, True, r"\bcompat\.final_norm\b"),
        ({"tie_positions": True}, False, r"\bmodel\.tie_positions\b"),
    ],
)
def test_what_has_no_names_is_refused(names, changes, final_norm, named):
    compat = dataclasses.replace(tiny.compat_config("pytorch"), final_norm=final_norm)
    model = tiny.make(compat=compat, **changes)
    with pytest.raises(ValueError, match=named):
        names.from_flax(tiny.variables(model)["params"], model.config)
