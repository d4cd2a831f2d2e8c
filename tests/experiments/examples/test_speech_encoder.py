"""Tests of the speech encoder: what padding and the future change, and what each encoder learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.examples import speech_encoder
from experiments.examples.speech_encoder import KINDS, Encoder


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
def test_neither_padding_nor_a_hidden_future_changes_a_frame(causal):
    encoder, rng = Encoder(width=16, causal=causal), np.random.default_rng(0)
    frames = jnp.asarray(rng.normal(size=(2, 24, speech_encoder.BANDS)), jnp.float32)
    lengths = jnp.asarray([24, 15])
    params = encoder.init(jax.random.key(0), frames, lengths)
    apply = jax.jit(encoder.apply)
    found = apply(params, frames, lengths)
    padding = apply(params, frames.at[1, 15:].set(9.0), lengths)
    np.testing.assert_allclose(padding[1, :15], found[1, :15], rtol=0, atol=1e-5)
    future = apply(params, frames.at[0, 20:].set(9.0), lengths)
    changed = np.abs(np.asarray(future[0, :20] - found[0, :20])).max()
    assert changed < 1e-5 if causal else changed > 1e-3


@pytest.mark.nightly(part="long")
def test_only_an_encoder_of_both_sides_names_the_next_syllable():
    curves = [speech_encoder.train(causal=causal, updates=100, seed=1, log=print) for causal in (False, True)]
    assert np.mean(curves[0][-3:]) > 0.85
    assert np.mean(curves[1][-3:]) == pytest.approx(1 / KINDS, abs=0.015)
