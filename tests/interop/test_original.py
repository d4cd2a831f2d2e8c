"""Tests of weights by the original's and Hugging Face's names: shared names, refusals.

`test_formats.py` has the round trips of all kinds of models, `test_golden.py` the releases' own tensors.
"""

import dataclasses
import functools
import re

import numpy as np
import pytest

from support import foreign, tiny
from txl_jax.config import Encoding, EvalConfig, NormPlace
from txl_jax.errors import UserError
from txl_jax.interop import huggingface, leaves, original
from txl_jax.interop.original import Format


@pytest.mark.parametrize("encoding", [Encoding.SHAW, Encoding.VASWANI, Encoding.AL_RFOU])
def test_other_encodings_have_no_names_in_hugging_face(encoding):
    config, params = foreign.make("pytorch", encoding=encoding, num_positions=7, n_head=2, d_head=3)
    for convert in (original.from_flax, functools.partial(original.to_flax, vocab_size=tiny.V)):
        with pytest.raises(UserError, match=rf"\bmodel\.encoding is {encoding}\b"):
            convert(params, config, format=Format.HUGGINGFACE)


def test_hugging_faces_class_draws_weights_as_ours_without_dropout_and_generation_stops_at_no_token():
    """`test_formats.py` reads the other arguments."""
    expected = {"init_std": 0.4, "proj_init_std": 0.4, "dropout": 0.0, "dropatt": 0.0, "eos_token_id": None}
    assert expected.items() <= huggingface.config_of(tiny.CONFIG, EvalConfig(), vocab_size=tiny.V).items()


def test_leaves_can_be_of_another_type():
    _, params = foreign.make("pytorch")
    half = leaves.as_type(leaves.from_tree(params), np.dtype(np.float16))["softmax/bias"]
    assert half.dtype == half.read().dtype == half.part(slice(2)).dtype == np.float16


TWICE = (2 / 10000 ** (np.arange(0, tiny.D, 2) / tiny.D)).astype(np.float32)
U1 = "transformer.layers.1.dec_attn.r_w_bias"
SHARED = "transformer.r_w_bias"


@pytest.mark.parametrize(
    ("format", "changes", "name", "value", "named"),
    [
        (Format.ORIGINAL, {}, "layers.1.dec_attn.r_net.weight", None, r"[^\[]*\[20, 6\]"),
        (Format.ORIGINAL, {}, "r_emb", np.zeros((3, 4)), r".*\[3, 4\]"),
        (Format.ORIGINAL, {}, "layers.1.dec_attn.o_net.weight", np.zeros((20, 6)), r".*\[20, 6\].*\[6, 20\]"),
        # They share one.
        (Format.ORIGINAL, {}, "crit.out_layers.0.weight", np.zeros((13, 6)), r".*\bword_emb\.emb_layers\.0\.weight\b"),
        (Format.ORIGINAL, {}, original.FREQUENCIES, TWICE, r".*\[3\]"),
        (Format.HUGGINGFACE, {}, U1, np.ones((4, 5)), rf".*{SHARED}\b.*\bmodel\.untie_r\b"),
        (Format.HUGGINGFACE, {"untie_r": True}, SHARED, np.zeros((4, 5)), r".*\bmodel\.untie_r\b"),
        (Format.HUGGINGFACE, {}, "transformer.crit.out_layers.0.bias", np.zeros(13), r".*expected no such tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(format, changes, name, value, named):
    """`value` replaces or adds the tensor, or None takes it away."""
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config, format=format) | {name: value}
    tensors = {key: value for key, value in tensors.items() if value is not None}
    with pytest.raises(UserError, match=rf" {re.escape(name)}\b{named}"):
        original.to_flax(tensors, config, vocab_size=tiny.V, format=format)


@pytest.mark.parametrize("format", [Format.ORIGINAL, Format.HUGGINGFACE])
@pytest.mark.parametrize(
    ("changes", "final_norm", "named"),
    [
        ({"layer_norm": NormPlace.PRE}, True, r"\bcompat\.final_norm\b"),
        ({"tie_positions": True}, False, r"\bmodel\.tie_positions\b"),
    ],
)
def test_a_model_that_an_implementation_lacks_is_refused(format, changes, final_norm, named):
    compat = dataclasses.replace(tiny.compat_config("pytorch"), final_norm=final_norm)
    model = tiny.make(compat=compat, **changes)
    with pytest.raises(UserError, match=named):
        original.from_flax(tiny.variables(model)["params"], model.config, format=format)
