"""Tests what an encoding declares, and distances beyond its table.

Values and gradients are compared with the original's in tests/test_golden.py, inference with training in
tests/inference/test_forward.py, and parameters are in tests/modules/test_parameters.py.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from support import tiny
from support.cases import nightly_but
from txl_jax.config import DType, Encoding
from txl_jax.inference.prepare import prepare_params
from txl_jax.modules.positions import ENCODINGS

L, M = 5, 4


@pytest.mark.parametrize(
    ("encoding", "clamp_len"),
    nightly_but(
        [(Encoding.SHAW, None), (Encoding.AL_RFOU, 2)],
        itertools.product([Encoding.SHAW, Encoding.AL_RFOU], [None, 2, 30]),
    ),
)
def test_distances_beyond_the_table_or_the_clamp_share_the_last_one(encoding, clamp_len, x64):
    """A table that goes on with copies of the last row that counts gives the same."""
    short, long = (tiny.make(encoding=encoding, num_positions=n, dtype=DType.FLOAT64) for n in (3, L + M))
    variables, last = tiny.variables(short), min(clamp_len or 2, 2)

    def lengthen(path, leaf):
        if "positions" not in [key.key for key in path]:
            return leaf
        return leaf[:, np.minimum(np.arange(L + M), last)]

    longer = jax.tree_util.tree_map_with_path(lengthen, variables)
    text, memory = tiny.text(2 * L), short.init_memory(batch_size=tiny.B, mem_len=M)
    found = tiny.stream(tiny.encoder(short, clamp_len=clamp_len), variables, text, [L, L], memory)
    expected = tiny.stream(tiny.encoder(long), longer, text, [L, L], memory)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", nightly_but([Encoding.RELATIVE, Encoding.VASWANI], Encoding))
def test_encodings_say_what_they_can_do(encoding, x64):
    """Single tokens give the states of a segment or not, and position keys are a third product of query and key."""
    model = tiny.make(encoding=encoding, dtype=DType.FLOAT64)
    variables, encode, text = tiny.variables(model), tiny.encoder(model), tiny.text(4)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)
    whole, one_by_one = (tiny.stream(encode, variables, text, lengths, memory) for lengths in ([4], [1] * 4))
    assert (np.abs(whole - one_by_one).max() < 1e-12) == ENCODINGS[encoding].generates_by_token

    prepare = functools.partial(prepare_params, model=model, segment_len=2, mem_len=4, clamp_len=None)
    keys = jax.eval_shape(lambda: prepare(variables["params"])).layers[0].position_keys
    has_keys = keys is not None and keys.key is not None
    assert ENCODINGS[encoding].products_per_key == (3 if has_keys else 2)
