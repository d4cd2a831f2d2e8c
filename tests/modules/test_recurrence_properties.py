"""Tests what the memory means for the model: segmentation, causality, reach, gradients, unfilled slots."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import nightly_but
from support.tiny import enable_x64
from txl_jax import memory as memory_lib
from txl_jax.config import AttentionWindow, CompatConfig, Encoding, MemoryStart, NormPlace

TEXT_LEN = 5  # Every segment length is a compilation.
ZEROS = CompatConfig(memory_start=MemoryStart.ZEROS)
# name: (model changes, compat, encode options, memory length)
SPLITS = {
    "post": ({}, CompatConfig(), {}, TEXT_LEN),
    "pre": ({"layer_norm": NormPlace.PRE}, CompatConfig(), {}, TEXT_LEN),
    "clamp": ({}, CompatConfig(), {"clamp_len": 3}, TEXT_LEN),
    # A window needs no more memory than its own width.
    "window": ({"untie_r": True}, CompatConfig(), {"same_length": True}, 3),
    "wider window": ({}, CompatConfig(same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE), {"same_length": True}, 3),
}


@functools.cache
def split_case(name: str):
    """(encode, variables, start of the memory, hidden states of the text read in one piece), in float64."""
    changes, compat, options, mem_len = SPLITS[name]
    model = tiny.make(compat=compat, dtype="float64", **changes)
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
        np.testing.assert_allclose(
            tiny.stream(encode, variables, tiny.text(TEXT_LEN), lengths, memory), whole, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("encoding", "options"),
    nightly_but(
        [(Encoding.RELATIVE, {"same_length": True}), *((encoding, {}) for encoding in Encoding)],
        itertools.product(Encoding, ({}, {"same_length": True}, {"clamp_len": 2})),
    ),
    ids=str,
)
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


def test_rows_of_a_batch_do_not_see_each_other():
    model, mem_len = tiny.make(), 3
    variables, encode = tiny.variables(model), tiny.encoder(model)
    tokens, memory = tiny.text(10), model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    changed = tokens.copy()
    changed[0] = (changed[0] + 1) % tiny.V
    before, after = (tiny.stream(encode, variables, text, [5, 5], memory) for text in (tokens, changed))
    np.testing.assert_array_equal(before[1:], after[1:])
    assert np.any(before[0] != after[0], axis=-1).all()


@pytest.mark.parametrize(
    ("window", "encoding"),
    nightly_but(
        [
            *((AttentionWindow.MEM_LEN, encoding) for encoding in Encoding),
            (AttentionWindow.MEM_LEN_PLUS_ONE, Encoding.RELATIVE),
        ],
        itertools.product(AttentionWindow, Encoding),
    ),
)
def test_same_length_sees_so_many_keys(window, encoding):
    """One layer: a token changes the states of its own position and of the n_key - 1 after it."""
    n_key = {AttentionWindow.MEM_LEN: 3, AttentionWindow.MEM_LEN_PLUS_ONE: 4}[window]
    model, changed_at = tiny.make(n_layer=1, encoding=encoding, compat=CompatConfig(same_length_window=window)), 2
    variables, encode = tiny.variables(model), tiny.encoder(model, same_length=True)
    memory, tokens = model.init_memory(batch_size=tiny.B, mem_len=3), tiny.text(10)
    changed = tokens.copy()
    changed[:, changed_at] = (changed[:, changed_at] + 1) % tiny.V
    before, after = (tiny.stream(encode, variables, text, [5, 5], memory) for text in (tokens, changed))
    expected = [changed_at <= t < changed_at + n_key for t in range(10)]
    np.testing.assert_array_equal(np.any(before != after, axis=-1), [expected] * tiny.B)


@pytest.mark.parametrize(
    ("norm", "mem_len"),
    nightly_but(
        [(NormPlace.POST, 0), (NormPlace.PRE, 4), (NormPlace.POST, 6)], itertools.product(NormPlace, (0, 3, 4, 6, 8))
    ),
)
def test_reach_in_whole_segments(norm, mem_len):
    """A segment depends on exactly N * ceil(M / L) segments before it, by the last token of the farthest.

    Each layer sees M positions further back from the first position of its own segment. So the last hop
    ends M positions before a segment's start, and where L does not divide M it covers only the end of the
    farthest segment: its first token reaches fewer segments.
    """
    segment_len, n_layer = 4, tiny.N
    last_reach = n_layer * math.ceil(mem_len / segment_len)
    first_reach = (n_layer - 1) * math.ceil(mem_len / segment_len) + mem_len // segment_len
    model = tiny.make(layer_norm=norm)
    variables, encode = tiny.variables(model), tiny.encoder(model)
    lengths = [segment_len] * (3 + last_reach + 2)
    tokens, memory = tiny.text(sum(lengths)), model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    before = tiny.stream(encode, variables, tokens, lengths, memory)
    perturbed_segment = 2
    for place, reach in ((0, first_reach), (segment_len - 1, last_reach)):
        changed = tokens.copy()
        changed[:, perturbed_segment * segment_len + place] += 1
        changed %= tiny.V
        after = tiny.stream(encode, variables, changed, lengths, memory)
        differs = np.any((before != after).reshape(tiny.B, len(lengths), -1), axis=2)
        expected = [0 <= s - perturbed_segment <= reach for s in range(len(lengths))]
        np.testing.assert_array_equal(differs, [expected] * tiny.B)


def gradient_through_memory(model) -> float:
    """Largest gradient of the second segment's loss with respect to the weights that read the first."""
    variables, tokens = tiny.variables(model), tiny.text(8)

    def second_loss(first_variables):
        memory = model.init_memory(batch_size=tiny.B, mem_len=4)
        options = {"clamp_len": None, "same_length": False, "deterministic": True}
        _, memory = model.apply(first_variables, tokens[:, :4], memory, **options)
        hidden, _ = model.apply(variables, tokens[:, 4:], memory, **options)
        return jnp.sum(hidden**2 * jnp.arange(tiny.D)[None, None])

    gradients = jax.jit(jax.grad(second_loss))(variables)
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))


def test_no_gradient_passes_through_the_memory(monkeypatch):
    model = tiny.make()
    assert gradient_through_memory(model) == 0
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)  # Only `memory.update` uses it from there.
    assert gradient_through_memory(model) > 0.1


@pytest.mark.parametrize(
    ("norm", "encoding"), nightly_but([(NormPlace.PRE, Encoding.RELATIVE)], itertools.product(NormPlace, Encoding))
)
def test_unfilled_slots_are_not_there(norm, encoding):
    """Whatever they hold, values and gradients are the same bits, and those of no memory at all."""
    model, mem_len = tiny.make(layer_norm=norm, encoding=encoding), 4
    variables, tokens = tiny.variables(model), tiny.text(3)
    empty = model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    noise = 100 * jax.random.normal(jax.random.key(5), empty.hidden.shape)
    filled = jnp.asarray([0, 1, mem_len], jnp.int32)
    slot_is_filled = jnp.arange(mem_len)[None, :] >= mem_len - filled[:, None]
    states = jax.random.normal(jax.random.key(6), empty.hidden.shape)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(variables, memory):
        hidden, _ = tiny.encoder(model)(variables, tokens, memory)
        nll = model.apply(variables, hidden, tokens, method=model.nll)
        return nll.sum(), hidden

    def read(garbage):
        hidden = jnp.where(slot_is_filled[None, :, :, None], states, garbage)
        return loss(variables, memory_lib.Memory(hidden=hidden, valid=filled))

    clean, noisy = read(jnp.zeros_like(noise)), read(noise)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(noisy), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    (_, without_memory), _ = loss(variables, model.init_memory(batch_size=tiny.B, mem_len=0))
    np.testing.assert_allclose(clean[0][1][0], without_memory[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("compat", [CompatConfig(), ZEROS], ids=["masked", "zeros"])
def test_reset_rows_start_afresh_and_the_others_go_on(compat):
    model = tiny.make(compat=compat)
    variables, encode, tokens = tiny.variables(model), tiny.encoder(model), tiny.text(8)
    fresh = model.init_memory(batch_size=tiny.B, mem_len=6)
    _, used = encode(variables, tokens[:, :4], fresh)
    reset = memory_lib.reset(used, jnp.asarray([False, True, False]), compat.memory_start)
    after_reset, _ = encode(variables, tokens[:, 4:], reset)
    np.testing.assert_array_equal(after_reset[1], encode(variables, tokens[:, 4:], fresh)[0][1])
    going_on = encode(variables, tokens[:, 4:], used)[0]
    np.testing.assert_array_equal(after_reset[jnp.asarray([0, 2])], going_on[jnp.asarray([0, 2])])
    assert np.abs(after_reset[1] - going_on[1]).max() > 0.01
