"""Streaming evaluation: the model reads a text once, segment after segment, with its memory.

Every token but the first is scored exactly once (their order: `txl_jax.data.batches.segment_reader`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax import losses, recurrence
from txl_jax.config import EvalConfig
from txl_jax.data.batches.segment_reader import SegmentReader
from txl_jax.inference.scorer import make_scorer
from txl_jax.metrics import Totals
from txl_jax.modules.language_model import LanguageModel
from txl_jax.runtime import distributed
from txl_jax.segments import Segments


class Scores(NamedTuple):
    """Losses of S segments."""

    nats: jax.Array  # [S], summed over scored tokens.
    tokens: jax.Array  # [S], number of those.
    nll: jax.Array  # [S, B, L], nats of every position, scored or not.


# (weights, memory, segments) -> (memory, scores); weights and memory are the scorer's (`txl_jax.inference.scorer`).
EvalStep = Callable[[Any, Any, Segments], tuple[Any, Scores]]


def make_eval_step(model: LanguageModel, config: EvalConfig) -> EvalStep:
    """Returns a function that scores S segments, ready for `jax.jit` with the memory donated."""
    scorer = make_scorer(model, config)

    def eval_step(weights: Any, memory: Any, segments: Segments) -> tuple[Any, Scores]:
        def score(state: None, memory: Any, segment: Any) -> tuple[None, Any, Scores]:
            hidden, memory = scorer.forward(weights, memory, segment.inputs)
            nll = scorer.nll(weights, hidden, segment.targets)
            return state, memory, Scores(*losses.weighted_sum(nll, segment.weights), nll)

        reset = functools.partial(scorer.reset, weights)
        _, memory, scores = recurrence.scan_segments(score, None, memory, segments, reset=reset)
        return memory, scores

    return eval_step


def evaluate(
    eval_step: EvalStep,
    weights: Any,
    memory: Any,
    reader: SegmentReader,
    *,
    segments_per_call: int,
    place: Callable[[Segments], Segments],
    after_call: Callable[[int, Totals], None] = lambda segments, totals: None,
    keep: Callable[[int, np.ndarray], None] | None = None,
) -> Totals:
    """Scores the whole text of `reader`.

    Args:
      memory: any memory of the right shape; the reader's reset bits empty it first. It is donated.
      place: puts segments on the devices.
      after_call: called with the number of segments done and the totals up to there; may raise to stop.
      keep: called with the number of a call's first segment and its nats [S, B, L], scored or not.
    """
    totals = Totals()
    pending: tuple[int, Scores] | None = None

    def fetch(first: int, scores: Scores) -> Totals:
        if keep is not None:
            keep(first, distributed.to_host(scores.nll))
        nats, tokens = distributed.to_host(scores.nats), distributed.to_host(scores.tokens)
        # Summed on the host, in double precision.
        return Totals(nats.sum(dtype="float64").item(), tokens.sum(dtype="float64").item())

    for first in range(0, reader.n_segments, segments_per_call):
        segments = place(reader.segments(first, segments_per_call))
        memory, scores = eval_step(weights, memory, segments)
        if pending is not None:  # Fetched one call late, so that the device never waits for the host.
            totals += fetch(*pending)
            after_call(first, totals)
        pending = first, scores
    assert pending is not None, "a text has at least one segment"
    return totals + fetch(*pending)
