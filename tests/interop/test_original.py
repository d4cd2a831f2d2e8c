"""Tests of the original's weights: round trips, names of shared tensors, and refusals."""

import dataclasses
import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.config import CompatConfig, Encoding, ModelConfig, NormPlace, ShawTerms
from txl_jax.errors import UserError
from txl_jax.interop import original
from txl_jax.modules.transformer_xl import TransformerXL

V = 37
WITHOUT_FINAL_NORM = CompatConfig(final_norm=False, shaw_terms=ShawTerms.ORIGINAL)
SMALL = ModelConfig(n_layer=3, d_model=12, n_head=2, d_head=5, d_inner=18)
CONFIGS = {
    "full softmax": SMALL,
    "Shaw": dataclasses.replace(SMALL, encoding=Encoding.SHAW, num_positions=7),
    "Vaswani": dataclasses.replace(SMALL, encoding=Encoding.VASWANI),
    "Al-Rfou": dataclasses.replace(SMALL, encoding=Encoding.AL_RFOU, num_positions=7, d_head=6),
    "nothing tied": dataclasses.replace(SMALL, tie_weight=False),
    "u and v per layer": dataclasses.replace(SMALL, untie_r=True),
    "d_embed": dataclasses.replace(SMALL, d_embed=10),
    "d_embed, tied projection": dataclasses.replace(SMALL, d_embed=10, tie_projs=(True,)),
    "div_val 1": dataclasses.replace(SMALL, cutoffs=(9, 20), d_embed=10, tie_projs=(False, True, True)),
    "div_val 1, no projections": dataclasses.replace(SMALL, cutoffs=(9, 20), tie_projs=(False, True, True)),
    "div_val 2": dataclasses.replace(SMALL, cutoffs=(9, 20), div_val=2, tie_projs=(False, True, True)),
    "div_val 4, nothing tied": dataclasses.replace(SMALL, cutoffs=(9, 20), d_embed=16, div_val=4, tie_weight=False),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def random_params(config: ModelConfig, compat=WITHOUT_FINAL_NORM) -> dict:
    """The tree that the model's own `init` makes, with different numbers everywhere."""
    model = TransformerXL(config, compat, V)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    memory = jax.eval_shape(lambda: model.init_memory(batch_size=1, mem_len=0))
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens, memory))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)


@by_config
@pytest.mark.parametrize("order", original.ClusterOrder)
def test_params_survive_the_round_trip(config, order):
    params = random_params(config)
    tensors = original.from_flax(params, config, cluster_order=order)
    again = original.to_flax(tensors, config, vocab_size=V, cluster_order=order)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("encoding", Encoding)
def test_an_encoding_has_names_in_the_original_or_is_refused(encoding):
    table = {"num_positions": 7} if encoding.is_learned else {}
    config = dataclasses.replace(SMALL, encoding=encoding, d_head=6, **table)
    params = random_params(config)
    if encoding in {tested.encoding for tested in CONFIGS.values()}:
        again = original.to_flax(original.from_flax(params, config), config, vocab_size=V)
        assert jax.tree.structure(again) == jax.tree.structure(params)
    else:
        with pytest.raises(UserError, match=rf"\b{encoding}\b"):
            original.from_flax(params, config)


@pytest.mark.parametrize(
    "name", ["s09_adaptive_div1_wt103", "s13_adaptive_div4_wt103", "s15_not_tied", "s16_untie_r", "s18_vaswani"]
)
def test_the_originals_tensors_survive_the_round_trip(name):
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / f"{name}.npz") as arrays:
        golden = json.loads(str(arrays["config_json"]))
        tensors = {key.removeprefix("param/"): arrays[key] for key in arrays.files if key.startswith("param/")}
        tensors[original.FREQUENCIES] = arrays[f"buffer/{original.FREQUENCIES}"]
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in golden.items() if key in fields}
    config = ModelConfig(**values, encoding=Encoding.VASWANI if golden["attn_type"] == 2 else Encoding.RELATIVE)
    assert original.aliases(config) == golden["aliases"]
    params = original.to_flax(tensors, config, vocab_size=golden["n_token"])
    again = original.from_flax(params, config)
    assert again.keys() == tensors.keys()
    np.testing.assert_allclose(again.pop(original.FREQUENCIES), tensors.pop(original.FREQUENCIES), rtol=1e-15)
    for key, value in tensors.items():
        np.testing.assert_array_equal(again[key], value, err_msg=key)


def test_types_are_kept():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(SMALL))
    tensors = original.from_flax(params, SMALL)
    assert {value.dtype for value in tensors.values()} == {np.dtype(jnp.bfloat16)}
    again = original.to_flax(
        {name: value.astype(np.float16) for name, value in tensors.items()} | {original.FREQUENCIES: frequencies()},
        SMALL,
        vocab_size=V,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {np.dtype(np.float16)}


def frequencies() -> np.ndarray:
    return (1 / 10000 ** (np.arange(0, 12, 2) / 12)).astype(np.float32)


def test_cluster_order_flips_the_tails_and_nothing_else():
    config = CONFIGS["div_val 2"]
    params = random_params(config)
    reverse = original.from_flax(params, config)
    forward = original.from_flax(params, config, cluster_order=original.ClusterOrder.FORWARD)
    np.testing.assert_array_equal(forward["crit.cluster_bias"], params["softmax"]["tail_bias"])
    for name in reverse:
        flipped = name in ("crit.cluster_weight", "crit.cluster_bias")
        np.testing.assert_array_equal(reverse[name][::-1] if flipped else reverse[name], forward[name], err_msg=name)


def test_a_missing_tensor_is_named():
    tensors = original.from_flax(random_params(SMALL), SMALL)
    del tensors["layers.1.dec_attn.r_net.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.dec_attn\.r_net\.weight\b[^\[]*\[10, 12\]"):
        original.to_flax(tensors, SMALL, vocab_size=V)


def test_an_extra_tensor_is_named():
    tensors = original.from_flax(random_params(SMALL), SMALL) | {"r_emb": np.zeros((3, 4))}
    with pytest.raises(ValueError, match=r"\br_emb\b.*\[3, 4\]"):
        original.to_flax(tensors, SMALL, vocab_size=V)


def test_a_wrong_shape_is_named():
    tensors = original.from_flax(random_params(SMALL), SMALL)
    tensors["layers.2.dec_attn.o_net.weight"] = np.zeros((10, 12))
    with pytest.raises(ValueError, match=r"layers\.2\.dec_attn\.o_net\.weight\b.*\[10, 12\].*\[12, 10\]"):
        original.to_flax(tensors, SMALL, vocab_size=V)


def test_a_wrong_vocabulary_is_named():
    tensors = original.from_flax(random_params(SMALL), SMALL)
    with pytest.raises(ValueError, match=r"emb_layers\.0\.weight\b.*\[37, 12\].*\[38, 12\]"):
        original.to_flax(tensors, SMALL, vocab_size=V + 1)


def test_shared_tensors_must_agree():
    tensors = original.from_flax(random_params(SMALL), SMALL)
    tensors["crit.out_layers.0.weight"] = tensors["crit.out_layers.0.weight"] + 1
    with pytest.raises(ValueError, match=r"crit\.out_layers\.0\.weight\b.*\bword_emb\.emb_layers\.0\.weight\b"):
        original.to_flax(tensors, SMALL, vocab_size=V)


def test_other_frequencies_are_refused():
    tensors = original.from_flax(random_params(SMALL), SMALL)
    tensors[original.FREQUENCIES] = 2 * frequencies()
    with pytest.raises(ValueError, match=r"\bpos_emb\.inv_freq\b.*\[6\].*\[6\]"):
        original.to_flax(tensors, SMALL, vocab_size=V)


def test_the_final_norm_has_no_name():
    config = dataclasses.replace(SMALL, layer_norm=NormPlace.PRE)
    with pytest.raises(ValueError, match=r"\bcompat\.final_norm\b"):
        original.from_flax(random_params(config, CompatConfig(final_norm=True)), config)


def test_tied_positions_have_no_names():
    config = dataclasses.replace(SMALL, tie_positions=True)
    with pytest.raises(ValueError, match=r"\bmodel\.tie_positions\b"):
        original.from_flax(random_params(config), config)


@pytest.mark.parametrize(("made_as", "read_as"), [("nothing tied", "full softmax"), ("full softmax", "nothing tied")])
def test_params_of_another_config_are_refused(made_as, read_as):
    with pytest.raises(ValueError, match=r"\bsoftmax/table_0\b.*\[37, 12\]"):
        original.from_flax(random_params(CONFIGS[made_as]), CONFIGS[read_as])
