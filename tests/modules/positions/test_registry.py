"""Tests that each encoding has its object, and that no other file asks which encoding a model has."""

import functools
import re

import jax
import numpy as np
import pytest

from support import ROOT, tiny
from txl_jax.config import DType, Encoding, ModelConfig
from txl_jax.inference import forward
from txl_jax.modules.positions import ENCODINGS, encoding_of

PACKAGE = ROOT / "txl_jax"
# The paper's tables have rows of encodings, one file infers them from tensors, and one times relative attention.
MAY_NAME_ENCODINGS = ("config/", "modules/positions/", "paper/", "interop/infer_config.py", "bench/attention_cases.py")


def test_each_encoding_has_an_object_of_its_own():
    assert set(ENCODINGS) == set(Encoding)
    assert len(set(ENCODINGS.values())) == len(Encoding)
    for encoding in Encoding:
        assert type(encoding_of(ModelConfig(encoding=encoding))) is ENCODINGS[encoding]


@pytest.mark.parametrize("encoding", Encoding)
def test_text_is_generated_by_token_where_tokens_one_by_one_give_the_states_of_a_segment(encoding, x64):
    model = tiny.make(encoding=encoding, dtype=DType.FLOAT64)
    variables, encode, text = tiny.variables(model), tiny.encoder(model), tiny.text(4)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)
    whole, one_by_one = (tiny.stream(encode, variables, text, lengths, memory) for lengths in ([4], [1] * 4))
    assert (np.abs(whole - one_by_one).max() < 1e-12) == ENCODINGS[encoding].generates_by_token


@pytest.mark.parametrize("encoding", Encoding)
def test_position_keys_are_the_third_product_of_query_and_key(encoding):
    model = tiny.make(encoding=encoding)
    lengths = {"segment_len": 2, "mem_len": 4, "clamp_len": None}
    prepare = functools.partial(forward.prepare_params, model=model, **lengths)
    keys = jax.eval_shape(lambda: prepare(tiny.variables(model)["params"])).layers[0].position_keys
    has_keys = keys is not None and keys.key is not None
    assert ENCODINGS[encoding].products_per_key == (3 if has_keys else 2)


def test_no_other_file_names_an_encoding():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(MAY_NAME_ENCODINGS):
            assert not re.search(r"\bEncoding\.[A-Z]|\bis_learned\b", path.read_text()), name
