"""Tests generation: seeds, greedy text on a ring against one pass, prompts of any length, and ends."""

import functools

import jax
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import DType, EvalConfig, GenerateConfig
from txl_jax.inference.generate import Generator

LENGTH = 11
PROMPT = np.random.default_rng(2).integers(tiny.V, size=6)


SPAN = EvalConfig(segment_len=3, mem_len=32, clamp_len=None, same_length=False)


@functools.cache
def sampled(*, seed: int = 5, samples: int = 1, block: int = 16) -> np.ndarray:
    config = GenerateConfig(length=LENGTH, samples=samples, seed=seed, top_k=None)
    blocks = list(tiny_run.generator(tiny.make(), SPAN).tokens(PROMPT, config, block=block))
    assert all(0 < tokens.shape[1] <= block for tokens in blocks)
    tokens = np.concatenate(blocks, axis=1)
    assert tokens.shape == (samples, LENGTH) and tokens.dtype == np.int32
    return tokens


@pytest.mark.full
def test_the_text_depends_on_the_seed_alone():
    """And not on the other samples, nor on how many tokens are written per call."""
    three = sampled(samples=3)
    assert np.array_equal(sampled(), three[:1]) and len({tuple(row) for row in three.tolist()}) == 3
    assert np.array_equal(sampled(), sampled(block=4))
    assert not np.array_equal(sampled(), sampled(seed=6))


@functools.cache
def ring(*, same_length: bool = False) -> Generator:
    """A generator with a short memory and segments of 3."""
    lengths = EvalConfig(segment_len=3, mem_len=7, clamp_len=5, same_length=same_length)
    return tiny_run.generator(tiny.make(dtype=DType.FLOAT64), lengths)


def continued(generator: Generator, prompt, *, length: int) -> list[int]:
    config = GenerateConfig(length=length, temperature=0)
    return np.concatenate(list(generator.tokens(prompt, config, block=8)), axis=1)[0].tolist()


def argmax_of_one_pass(tokens: list[int], window: int) -> list[int]:
    """The likeliest token after each position of a text read at once, where a query sees its last `window` keys."""
    padded = np.zeros((1, LONGEST), np.int32)  # One program for all; no position sees what follows it.
    padded[0, : len(tokens)] = tokens
    model = tiny.make(dtype=DType.FLOAT64)
    variables = {"params": tiny_run.params(model)}
    empty = model.init_memory(batch_size=1, mem_len=window)  # Whose length is the window; no slot is filled.
    hidden, _ = tiny.encoder(model, clamp_len=5, same_length=True)(variables, padded, empty)
    return np.argmax(model.apply(variables, hidden, method=model.log_probabilities)[0], axis=-1)[: len(tokens)].tolist()


TEXT = np.random.default_rng(2).integers(tiny.V, size=12).tolist()
LONGEST = 60


@pytest.mark.parametrize(("same_length", "window"), [(False, 8), (True, 7)])
def test_greedy_text_on_a_ring_is_that_of_one_pass_without_memory(same_length, window, x64):
    """Token for token, where the ring of 7 slots goes round eight times."""
    text = continued(ring(same_length=same_length), TEXT, length=45)
    assert len(set(text)) > 2
    assert text == argmax_of_one_pass(TEXT + text, window)[len(TEXT) - 1 : -1]
    assert text != argmax_of_one_pass(TEXT + text, window + 1)[len(TEXT) - 1 : -1]


@pytest.mark.parametrize("n", [1, 3, 4, 10])
def test_a_prompt_of_any_length_is_read(n, x64):
    """Shorter than a segment, whole segments, and both; beyond the ring's length."""
    text = continued(ring(), TEXT[:n], length=6)
    assert text == argmax_of_one_pass(TEXT[:n] + text, 8)[n - 1 : -1]


@pytest.mark.full
def test_a_sample_ends_with_its_stop_token_and_the_rest_go_on(x64):
    stop, generator = 5, tiny_run.generator(tiny.make(dtype=DType.FLOAT64), SPAN)
    config = GenerateConfig(length=60, samples=3, top_k=None, seed=3)
    blocks = (generator.tokens(PROMPT, config, stop_token=token, block=7) for token in (None, stop))
    free, stopped = (np.concatenate(list(each), axis=1) for each in blocks)
    ends = [row.index(stop) for row in free.tolist()]
    assert len(set(ends)) > 1 and max(ends) < 50
    assert stopped.shape[1] == max(ends) + 1
    for row, whole, end in zip(stopped.tolist(), free.tolist(), ends, strict=True):
        assert row[: end + 1] == whole[: end + 1] and set(row[end:]) == {stop}


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        next(tiny_run.generator(tiny.make(), SPAN).tokens(np.zeros(0, np.int32), GenerateConfig()))


def test_weights_for_single_tokens_share_arrays_with_those_for_segments():
    generator = tiny_run.generator(tiny.make(), SPAN)
    both = generator.for_segments, generator.for_tokens
    shared = [jax.tree.leaves((params.embed_and_norm, params.clusters)) for params in both]
    of_segment, of_token = ({leaf.unsafe_buffer_pointer() for leaf in leaves} for leaves in shared)
    assert of_segment == of_token
