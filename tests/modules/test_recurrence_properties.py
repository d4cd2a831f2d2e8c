"""Tests what the memory means for the model: segmentation, causality, unfilled slots."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import nightly_but
from support.tiny import enable_x64
from txl_jax import memory as memory_lib
from txl_jax.config import AttentionWindow, CompatConfig, Encoding, NormPlace

TEXT_LEN = 5  # Every segment length is a compilation.
# name: (model changes, encode options, memory length)
WIDER = CompatConfig(same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE)
SPLITS = {
    "post": ({}, {}, TEXT_LEN),
    "pre": ({"layer_norm": NormPlace.PRE}, {}, TEXT_LEN),
    "clamp": ({}, {"clamp_len": 3}, TEXT_LEN),
    # A window needs no more memory than its own width.
    "window": ({"untie_r": True}, {"same_length": True}, 3),
    "wider window": ({"compat": WIDER}, {"same_length": True}, 3),
}


@functools.cache
def split_case(name: str):
    """(encode, variables, start of the memory, hidden states of the text read in one piece), in float64."""
    changes, options, mem_len = SPLITS[name]
    model = tiny.make(dtype="float64", **changes)
    variables, encode = tiny.variables(model), tiny.encoder(model, **options)
    memory = model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    return encode, variables, memory, tiny.stream(encode, variables, tiny.text(TEXT_LEN), [TEXT_LEN], memory)


@hypothesis.settings(max_examples=8)
@hypothesis.given(cuts=st.sets(st.integers(1, TEXT_LEN - 1), min_size=1))
@pytest.mark.parametrize("name", nightly_but(["pre", "window"], SPLITS))
def test_any_segmentation_gives_the_same_states(name, cuts):
    bounds = [0, *sorted(cuts), TEXT_LEN]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    with enable_x64(True):
        encode, variables, memory, whole = split_case(name)
        found = tiny.stream(encode, variables, tiny.text(TEXT_LEN), lengths, memory)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)


OPTIONS = [*itertools.product(Encoding, ({}, {"same_length": True}, {"clamp_len": 2}))]
QUICK = [*((encoding, {}) for encoding in Encoding), (Encoding.RELATIVE, {"same_length": True})]


@pytest.mark.parametrize(("encoding", "options"), nightly_but(QUICK, OPTIONS), ids=str)
def test_the_future_has_exactly_no_influence(options, encoding):
    model, segment_len, mem_len = tiny.make(encoding=encoding), 5, 3
    variables, encode = tiny.variables(model), tiny.encoder(model, **options)
    _, memory = encode(variables, tiny.text(segment_len, seed=1), model.init_memory(batch_size=tiny.B, mem_len=mem_len))
    tokens = tiny.text(segment_len)
    hidden, _ = encode(variables, tokens, memory)
    for t in range(segment_len):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % tiny.V
        other, _ = encode(variables, changed, memory)
        np.testing.assert_array_equal(other[:, :t], hidden[:, :t])
        assert np.all(np.any(other[:, t] != hidden[:, t], axis=-1))


@pytest.mark.parametrize(
    ("norm", "encoding"), nightly_but([(NormPlace.PRE, Encoding.RELATIVE)], itertools.product(NormPlace, Encoding))
)
def test_unfilled_slots_are_not_there(norm, encoding):
    """Whatever they hold, values and gradients are the same bits, and those of no memory at all."""
    model, mem_len = tiny.make(layer_norm=norm, encoding=encoding), 4
    variables, tokens = tiny.variables(model), tiny.text(3)
    empty = model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    states, noise = np.random.default_rng(5).normal(size=(2, *empty.hidden.shape)).astype(np.float32)
    filled = jnp.asarray([0, 1, mem_len], jnp.int32)
    slot_is_filled = jnp.arange(mem_len)[None, :] >= mem_len - filled[:, None]

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(variables, memory):
        hidden, _ = tiny.encoder(model)(variables, tokens, memory)
        return model.apply(variables, hidden, tokens, method=model.nll).sum(), hidden

    def read(garbage):
        hidden = jnp.where(slot_is_filled[None, :, :, None], states, garbage)
        return loss(variables, memory_lib.Memory(hidden=hidden, valid=filled))

    clean, noisy = read(0 * noise), read(100 * noise)
    tiny_run.assert_equal(noisy, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    (_, without_memory), _ = loss(variables, model.init_memory(batch_size=tiny.B, mem_len=0))
    np.testing.assert_allclose(clean[0][1][0], without_memory[0], rtol=0, atol=1e-5)
