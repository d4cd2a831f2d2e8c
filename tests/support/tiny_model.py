"""A `LanguageModel` without a run: drawn parameters, and one letter per token."""

import functools
from typing import Any

import numpy as np

from support import tiny, tiny_run
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.segments import evaluation_segments
from txl_jax.evaluation.streaming import evaluate
from txl_jax.trained_model import LanguageModel

VOCABULARY = ByteVocabulary(b"\n abcdefghijk")


@functools.cache
def make(**changes: Any) -> LanguageModel:
    """The model of `tiny_run` (L = 5, M = 9 in evaluation) with some settings changed.

    Models are kept, with their compiled functions.
    """
    assert VOCABULARY.size == tiny.V
    components = tiny_run.parts(**changes)
    return LanguageModel(components, VOCABULARY, tiny_run.params(components.model), step=7)


def documents(lengths: list[int], *, seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(tiny.V, size=length) for length in lengths]


def alone(model: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """The nats [T - 1] of one document, by evaluation in one stream."""
    components = model.components
    assert components.config.eval.batch_size == 1
    if len(tokens) < 2:
        return np.zeros(0)

    nats = np.zeros(len(tokens), np.promote_types(np.float32, components.config.model.dtype))
    weights = components.prepare_params(model.params)
    segment_len = components.config.eval.segment_len
    reader = evaluation_segments(np.asarray(tokens), batch_size=1, segment_len=segment_len)
    memory = components.init_memory(weights)
    evaluate(components.eval_step, weights, memory, reader, place=components.place, token_nats=nats)
    return nats[1:]
