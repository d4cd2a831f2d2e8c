"""Tests that a bias per distance, which no encoding of the project is, needs a file and a line of the registry only."""

import functools

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
from txl_jax.inference.prepare import prepare_params
from txl_jax.interop import original
from txl_jax.modules import positions as encodings
from txl_jax.modules.positions.encoding import DecodeTerms, PositionEncoding, PositionKeys, PositionTerms
from txl_jax.ops.attention import positions
from txl_jax.ops.attention.positions import table_length

L, M = 4, 10


class LogBias(PositionEncoding):
    """Scores fall with the logarithm of the distance, in each head by another factor. It has no parameters."""

    generates_by_token = True

    def shared_codes(self, n_keys, *, clamp_len, drop):
        """Returns the distances K - 1, .., 0: int [K]."""
        return positions.key_distances(n_keys, clamp_len=clamp_len)

    def position_terms(self, codes, parameters, projections, dtype):
        """Returns the biases [H, K], which are divided by sqrt(E) afterwards."""
        return PositionTerms(position_score=self._biases(codes) * self.config.d_head**0.5)

    def decode_terms(self, layer, shared, *, segment_len, capacity, clamp_len):
        """Computes the same biases for all P distances."""
        n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=clamp_len)
        score = self._biases(positions.key_distances(n_position))
        return DecodeTerms(position_keys=PositionKeys(bias=None, key=None, score=score))

    def _biases(self, distances):
        factors = jnp.arange(1, self.config.n_head + 1, dtype=jnp.dtype(self.config.dtype))
        return -factors[:, None] * jnp.log1p(distances.astype(factors.dtype))[None, :]


@pytest.fixture(name="model")
def _model(monkeypatch, x64):
    """A model whose encoding, under the name of another, is `LogBias`; its parameters are those of VASWANI."""
    monkeypatch.setitem(encodings.ENCODINGS, Encoding.VASWANI, LogBias)
    return tiny.make(encoding=Encoding.VASWANI, dtype=DType.FLOAT64)


@pytest.mark.parametrize("clamp_len", nightly_but([6], [None, 6, 2]))
def test_inference_in_segments_and_by_token_equals_training(model, clamp_len):
    """The ring of 12 slots goes round once, and is unrotated for single tokens at slot 8."""
    variables, n_token, lengths = tiny.variables(model), 5 * L, [L] * 5 + [1] * 3
    text = tiny.text(sum(lengths))
    encode = tiny.encoder(model, clamp_len=clamp_len, same_length=True)
    expected = tiny.stream(encode, variables, text, lengths, model.init_memory(batch_size=tiny.B, mem_len=M))

    lengths = {"window": M, "segment_len": L, "mem_len": M, "clamp_len": clamp_len}
    params = jax.jit(functools.partial(prepare_params, model=model, **lengths))(variables["params"])
    cache = forward.init_cache(params, batch_size=tiny.B, mem_len=M, segment_len=L)
    read = jax.jit(forward.forward)
    found = []
    for start in range(0, n_token, L):
        hidden, cache = read(params, text[:, start : start + L], cache)
        found.append(hidden)
    params, cache = params.for_single_tokens(mem_len=M), cache_lib.unrotate(cache)
    for i in range(n_token, n_token + 3):
        hidden, cache = read(params, text[:, i : i + 1], cache)
        found.append(hidden)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-12)


def test_it_is_not_written_as_a_model_of_the_original(model):
    with pytest.raises(UserError, match=r"model\.encoding is vaswani"):
        original.from_flax(tiny.variables(model)["params"], model.config)
