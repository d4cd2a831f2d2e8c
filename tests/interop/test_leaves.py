"""Tests of parameters that are read one at a time."""

import jax
import numpy as np

from support import tiny
from support.checkpoints import assert_same
from txl_jax.interop import huggingface, leaves, original
from txl_jax.interop.leaves import Renamed

CHANGES = {"cutoffs": (4, 9), "d_embed": 8, "div_val": 2, "tie_projs": (False, True, True), "untie_r": True}


class Counted(dict):
    """Tensors by name that count how often each is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reads = []

    def __getitem__(self, name):
        self.reads.append(name)
        return super().__getitem__(name)


def test_a_parameter_reads_its_own_tensors_alone():
    model = tiny.make(compat=tiny.compat_config("hf"), **CHANGES)
    params = jax.tree.map(np.asarray, tiny.variables(model)["params"])
    tensors = Counted(huggingface.from_flax(params, model.config))
    found = huggingface.to_leaves(tensors, model.config, vocab_size=tiny.V)
    tensors.reads.clear()
    norm = found["stack/layers/attention_norm/scale"]
    np.testing.assert_array_equal(norm.read(), params["stack"]["layers"]["attention_norm"]["scale"])
    names = [f"transformer.layers.{layer}.dec_attn.layer_norm.weight" for layer in range(tiny.N)]
    assert tensors.reads == names
    tensors.reads.clear()
    np.testing.assert_array_equal(norm.part(1), norm.read()[1])
    assert tensors.reads == [names[1], *names]


def test_leaves_are_the_tree_and_can_be_of_another_type():
    model = tiny.make(**CHANGES)
    params = jax.tree.map(np.asarray, tiny.variables(model)["params"])
    found = leaves.from_tree(params)
    assert_same(leaves.to_tree(found), params)
    assert leaves.num_bytes(found) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    half = leaves.as_type(found, np.dtype(np.float16))["softmax/bias"]
    assert half.dtype == half.read().dtype == half.part(slice(2)).dtype == np.float16


def test_shared_tensors_get_their_second_names_back():
    config = tiny.model_config(**CHANGES | {"untie_r": False})
    shared = original.aliases(config) | {"u": "w"}
    found = original.fill_shared({"crit.out_layers.1.weight": np.ones(2), "w": np.zeros(3)}, shared)
    assert set(found) == {"crit.out_layers.1.weight", "word_emb.emb_layers.1.weight", "u", "w"} and len(found) == 4
    assert found["word_emb.emb_layers.1.weight"] is found["crit.out_layers.1.weight"] and found["u"] is found["w"]


def test_renamed_tensors_and_added_ones():
    found = Renamed({"a": np.zeros(1), "b": np.ones(1)}, {"c": "b"}, {"d": np.full(1, 2.0)})
    assert list(found) == ["c", "d"] and len(found) == 2 and "a" not in found
    assert [found[name][0] for name in found] == [1, 2]
