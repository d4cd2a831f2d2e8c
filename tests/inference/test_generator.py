"""Tests generation: greedy text on a ring against one pass, and prompts of any length."""

import jax
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import DType, EvalConfig, GenerateConfig

SPAN = EvalConfig(segment_len=3, mem_len=32, clamp_len=None, same_length=False)
TEXT = np.random.default_rng(2).integers(tiny.V, size=12).tolist()
LONGEST = 60


def argmax_of_one_pass(tokens: list[int], window: int) -> list[int]:
    """The likeliest token after each position of a text read at once, where a query sees its last `window` keys."""
    padded = np.zeros((1, LONGEST), np.int32)  # One program for all; no position sees what follows it.
    padded[0, : len(tokens)] = tokens
    model = tiny.make(dtype=DType.FLOAT64)
    variables = {"params": tiny_run.params(model)}
    empty = model.init_memory(batch_size=1, mem_len=window)  # Whose length is the window; no slot is filled.
    hidden, _ = tiny.encoder(model, clamp_len=5, same_length=True)(variables, padded, empty)
    return np.argmax(model.apply(variables, hidden, method=model.log_probabilities)[0], axis=-1)[: len(tokens)].tolist()


@pytest.mark.parametrize(
    ("n", "length", "same_length", "window"),
    [(12, 45, False, 8), (12, 45, True, 7), *((n, 6, False, 8) for n in (1, 3, 4, 10))],
)
def test_greedy_text_on_a_ring_is_that_of_one_pass_without_memory(n, length, same_length, window, x64):
    """Token for token, where the ring of 7 slots goes round eight times, and after prompts of any length.

    Shorter than a segment, whole segments, and both; beyond the ring's length.
    """
    prompt, lengths = TEXT[:n], EvalConfig(segment_len=3, mem_len=7, clamp_len=5, same_length=same_length)
    generator = tiny_run.generator(tiny.make(dtype=DType.FLOAT64), lengths)
    blocks = generator.tokens(prompt, GenerateConfig(length=length, temperature=0), block=8)
    text = np.concatenate(list(blocks), axis=1)[0].tolist()
    assert text == argmax_of_one_pass(prompt + text, window)[n - 1 : -1]
    if length == 45:
        assert len(set(text)) > 2 and text != argmax_of_one_pass(prompt + text, window + 1)[n - 1 : -1]


def test_weights_for_single_tokens_share_arrays_with_those_for_segments():
    generator = tiny_run.generator(tiny.make(), SPAN)
    both = generator.for_segments, generator.for_tokens
    shared = [jax.tree.leaves((params.embed_and_norm, params.clusters)) for params in both]
    of_segment, of_token = ({leaf.unsafe_buffer_pointer() for leaf in leaves} for leaves in shared)
    assert of_segment == of_token
