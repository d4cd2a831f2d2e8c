"""Tests what an encoding declares, distances beyond its table, and that a new one needs a line of
the registry only.

Values and gradients are compared with the original's in tests/test_golden.py, inference with
training in tests/inference/test_forward.py, and parameters are in
tests/modules/test_transformer_xl.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import nightly_but
from txl_jax.config import DType, Encoding
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.interop import original
from txl_jax.modules.positions import ENCODINGS
from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    PositionEncoding,
    PositionKeys,
    PositionTerms,
)
from txl_jax.ops.attention.distances import key_distances, table_length

L, M = 4, 10


CLAMPS = [*itertools.product([Encoding.SHAW, Encoding.AL_RFOU], [None, 2, 30])]


@pytest.mark.parametrize(("encoding", "clamp_len"), nightly_but([CLAMPS[0], CLAMPS[4]], CLAMPS))
def test_distances_beyond_the_table_or_the_clamp_share_the_last_one(encoding, clamp_len, x64):
    """A table that goes on with copies of the last row that counts gives the same."""
    short, long = (
        tiny.make(encoding=encoding, num_positions=n, dtype=DType.FLOAT64) for n in (3, 9)
    )
    variables, last = tiny.variables(short), min(clamp_len or 2, 2)

    def lengthen(path, leaf):
        if "positions" not in [key.key for key in path]:
            return leaf
        return leaf[:, np.minimum(np.arange(9), last)]

    longer = jax.tree_util.tree_map_with_path(lengthen, variables)
    text, memory = tiny.text(10), short.init_memory(batch_size=tiny.B, mem_len=4)
    found = tiny.stream(tiny.encoder(short, clamp_len=clamp_len), variables, text, [5, 5], memory)
    expected = tiny.stream(tiny.encoder(long), longer, text, [5, 5], memory)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", nightly_but([Encoding.RELATIVE, Encoding.VASWANI], Encoding))
def test_encodings_say_what_they_can_do(encoding, x64):
    """Single tokens give the states of a segment or not."""
    model = tiny.make(encoding=encoding, dtype=DType.FLOAT64)
    variables, encode, text = tiny.variables(model), tiny.encoder(model), tiny.text(4)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)
    whole, one_by_one = (
        tiny.stream(encode, variables, text, lengths, memory) for lengths in ([4], [1] * 4)
    )
    assert (np.abs(whole - one_by_one).max() < 1e-12) == ENCODINGS[encoding].generates_by_token


# A bias per distance, which no encoding of the project is


class LogBias(PositionEncoding):
    """Scores fall with the logarithm of the distance, in each head by another factor.

    It has no parameters.
    """

    generates_by_token = True

    def shared_codes(self, n_keys, *, clamp_len, drop):
        """Returns the distances K - 1, .., 0: int [K]."""
        return key_distances(n_keys, clamp_len=clamp_len)

    def position_terms(self, codes, parameters, projections, dtype):
        """Returns the biases [H, K], which are divided by sqrt(E) afterwards."""
        return PositionTerms(position_score=self._biases(codes) * self.config.d_head**0.5)

    def decode_terms(self, layer, shared, *, segment_len, capacity, clamp_len):
        n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=clamp_len)
        score = self._biases(key_distances(n_position))
        return DecodeTerms(position_keys=PositionKeys(bias=None, key=None, score=score))

    def _biases(self, distances):
        factors = jnp.arange(1, self.config.n_head + 1, dtype=jnp.dtype(self.config.dtype))
        return -factors[:, None] * jnp.log1p(distances.astype(factors.dtype))[None, :]


@pytest.fixture(name="model")
def _model(monkeypatch, x64):
    """A model whose encoding, under the name of another, is `LogBias`; its parameters are those of
    VASWANI.
    """
    monkeypatch.setitem(ENCODINGS, Encoding.VASWANI, LogBias)
    return tiny.make(encoding=Encoding.VASWANI, dtype=DType.FLOAT64)


@pytest.mark.parametrize("clamp_len", nightly_but([6], [None, 6, 2]))
def test_inference_in_segments_and_by_token_equals_training(model, clamp_len):
    """The ring of 12 slots goes round once, and is unrotated for single tokens at slot 8."""
    variables, lengths = tiny.variables(model), [L] * 5 + [1] * 3
    text = tiny.text(sum(lengths))
    encode = tiny.encoder(model, clamp_len=clamp_len, same_length=True)
    expected = tiny.stream(
        encode, variables, text, lengths, model.init_memory(batch_size=tiny.B, mem_len=M)
    )

    params = tiny.prepared(
        model, variables, same_length=True, segment_len=L, mem_len=M, clamp_len=clamp_len
    )
    cache = forward.init_cache(params, batch_size=tiny.B, mem_len=M, segment_len=L)
    read, found, start = jax.jit(forward.forward), [], 0
    for length in lengths:
        if start == 5 * L:
            params, cache = params.for_single_tokens(mem_len=M), cache_lib.unrotate(cache)
        hidden, cache = read(params, text[:, start : start + length], cache)
        found.append(hidden)
        start += length
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-12)
    with pytest.raises(UserError, match=r"model\.encoding is vaswani"):
        original.from_flax(variables["params"], model.config)
