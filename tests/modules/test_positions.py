"""Tests of what an encoding declares, of distances beyond its table, and of a new encoding, which
only needs a line of the registry.

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
from txl_jax.config import CompatConfig, DType, Encoding, ShawTerms
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

L = 4
M = 10


CLAMPS = [*itertools.product([Encoding.SHAW, Encoding.AL_RFOU], [None, 2, 30])]
QUICK = [(Encoding.SHAW, None), (Encoding.AL_RFOU, 2)]


@pytest.mark.parametrize(("encoding", "clamp_len"), nightly_but(QUICK, CLAMPS))
def test_distances_beyond_the_table_or_the_clamp_share_the_last_one(encoding, clamp_len, x64):
    """A longer table with copies of the last row that counts gives the same.

    Clamps are at the last row of the short table, and far beyond it. The long table has a row for
    each of the distances 0 to 8, of a segment of 5 after a memory of 4.
    """
    short = tiny.make(encoding=encoding, num_positions=3, dtype=DType.FLOAT64)
    long = tiny.make(encoding=encoding, num_positions=9, dtype=DType.FLOAT64)
    variables = tiny.variables(short)
    # The short table ends with distance 2.
    last = 2 if clamp_len is None else min(clamp_len, 2)
    rows = np.minimum(np.arange(9), last)

    def lengthen(path, leaf):
        is_table = any(key.key == "positions" for key in path)
        return np.asarray(leaf)[:, rows] if is_table else leaf

    long_variables = jax.tree_util.tree_map_with_path(lengthen, variables)

    def states(model, variables, clamp_len):
        memory = model.init_memory(batch_size=tiny.B, mem_len=4)
        encode = tiny.encoder(model, clamp_len=clamp_len)
        return tiny.stream(encode, variables, tiny.text(10), [5, 5], memory)

    np.testing.assert_allclose(
        states(short, variables, clamp_len),
        states(long, long_variables, None),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("encoding", nightly_but([Encoding.RELATIVE, Encoding.VASWANI], Encoding))
def test_encodings_say_whether_they_generate_by_token(encoding, x64):
    """Single tokens give the states of a segment, or they do not, as the encoding declares."""
    model = tiny.make(encoding=encoding, dtype=DType.FLOAT64)
    variables = tiny.variables(model)
    encode = tiny.encoder(model)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)

    whole = tiny.stream(encode, variables, tiny.text(4), [4], memory)
    by_token = tiny.stream(encode, variables, tiny.text(4), [1, 1, 1, 1], memory)

    is_same = np.abs(whole - by_token).max() < 1e-12
    assert is_same == ENCODINGS[encoding].generates_by_token


def test_the_originals_number_per_distance_keeps_its_bits_at_inference():
    """A bfloat16 model adds it to the scores in float32, in training and with a cache."""
    original_terms = CompatConfig(shaw_terms=ShawTerms.ORIGINAL)
    model = tiny.make(encoding=Encoding.SHAW, dtype=DType.BFLOAT16, compat=original_terms)
    layers = tiny.variables(model)["params"]["stack"]["layers"]
    layer = jax.tree.map(lambda stacked: stacked[0], layers)
    scores = layer["attention"]["positions"]["score"]

    encoding = ENCODINGS[Encoding.SHAW](model.config)
    terms = encoding.decode_terms(layer, None, segment_len=2, capacity=1, clamp_len=None)

    expected = scores[jnp.array([2, 1, 0])].T * model.config.d_head**-0.5
    np.testing.assert_array_equal(terms.position_keys.score, expected)


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
    """A model whose encoding is `LogBias`.

    It takes the place of VASWANI in the registry, because `Encoding` has no name for it. Its
    parameters are VASWANI's.
    """
    monkeypatch.setitem(ENCODINGS, Encoding.VASWANI, LogBias)
    return tiny.make(encoding=Encoding.VASWANI, dtype=DType.FLOAT64)


def test_an_encoding_that_the_original_has_not_cannot_be_converted(model):
    params = tiny.variables(model)["params"]

    with pytest.raises(UserError, match=r"model\.encoding is vaswani"):
        original.from_flax(params, model.config)


@pytest.mark.parametrize("clamp_len", nightly_but([6], [None, 6, 2]))
def test_inference_in_segments_and_by_token_equals_training(model, clamp_len):
    """The ring of 12 slots goes round once, and is unrotated for single tokens at slot 8.

    10 slots are rounded up to 12, the next multiple of 4. After 20 tokens, slot 8 is the oldest.
    """
    variables = tiny.variables(model)
    lengths = [L] * 5 + [1] * 3
    text = tiny.text(sum(lengths))
    encode = tiny.encoder(model, clamp_len=clamp_len, same_length=True)
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    expected = tiny.stream(encode, variables, text, lengths, memory)

    params = tiny.prepared(
        model, variables, same_length=True, segment_len=L, mem_len=M, clamp_len=clamp_len
    )
    cache = forward.init_cache(params, batch_size=tiny.B, mem_len=M, segment_len=L)
    read = jax.jit(forward.forward)
    states = []
    start = 0
    for length in lengths:
        if start == 5 * L:
            params = params.for_single_tokens(mem_len=M)
            cache = cache_lib.unrotate(cache)
        hidden, cache = read(params, text[:, start : start + length], cache)
        states.append(hidden)
        start += length

    np.testing.assert_allclose(np.concatenate(states, axis=1), expected, rtol=0, atol=1e-12)
