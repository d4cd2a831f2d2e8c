"""Streaming evaluation: the model reads a text once, segment after segment, with its memory.

Every token but the first is scored exactly once (their order: `txl_jax.data.segments`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import recurrence
from txl_jax.config import EvalConfig
from txl_jax.data.segments import SegmentReader
from txl_jax.inference.scorer import make_scorer
from txl_jax.metrics import Totals
from txl_jax.modules import AnyModel
from txl_jax.recurrence import Segments
from txl_jax.runtime import distributed


class SegmentLosses(NamedTuple):
    """Losses of S segments."""

    nats: jax.Array  # [S], summed over scored tokens.
    tokens: jax.Array  # [S], number of those.
    nll: jax.Array  # [S, B, L], nats of every position, scored or not.


SEGMENTS_PER_CALL = 8  # S, of every evaluation. It also decides which tails are scored together.
_SCORED_TOGETHER = 1024  # Positions.

# (weights, memory, segments) -> (memory, scores); weights and memory are the scorer's
# (`txl_jax.inference.scorer`).
EvalStep = Callable[[Any, Any, Segments], tuple[Any, SegmentLosses]]


def make_eval_step(model: AnyModel, config: EvalConfig) -> EvalStep:
    """Returns a function that scores S segments, ready for `jax.jit` with the memory donated."""
    scorer = make_scorer(model, config)

    def eval_step(weights: Any, memory: Any, segments: Segments) -> tuple[Any, SegmentLosses]:
        targets = jnp.asarray(segments.targets)
        weight = jnp.asarray(segments.weights) * (targets >= 0)  # Ignored targets do not count.
        n_segment, *shape = targets.shape
        n_together = _segments_together(n_segment, shape, n_tail=len(model.config.cutoffs))

        def score(state: None, memory: Any, segment: Any) -> tuple[None, Any, jax.Array]:
            """Returns a segment's losses in nats, or its hidden states.

            If hidden states are returned, losses are computed from them together.
            """
            hidden, memory = scorer.forward(weights, memory, segment.inputs)
            return (
                state,
                memory,
                hidden if n_together > 1 else scorer.nll(weights, hidden, segment.targets),
            )

        reset = functools.partial(scorer.reset, weights)
        _, memory, collected = recurrence.scan_segments(score, None, memory, segments, reset=reset)
        nll = collected
        if n_together > 1:
            nll = _score_together(
                functools.partial(scorer.nll, weights), collected, targets, n_together
            )
        return memory, SegmentLosses(*jax.vmap(recurrence.weighted_sum)(nll, weight), nll)

    return eval_step


def _segments_together(n_segment: int, shape: Sequence[int], *, n_tail: int) -> int:
    """Returns how many segments [B, L] to score at a time, a divisor of S.

    A tail of the adaptive softmax is read from memory for few tokens of a segment: of 64 tokens,
    seven are in the 160,000 words of the second tail of WikiText-103. Scoring 8 such segments
    together took 180 ms on an AMD EPYC (2 cores), one after the other 395 ms. Up to 1024 positions,
    so that logits stay small.
    """
    most = _SCORED_TOGETHER // math.prod(shape) if n_tail else 1
    return max(n for n in range(1, n_segment + 1) if n_segment % n == 0 and n <= max(most, 1))


def _score_together(
    nll: Callable[[jax.Array, jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    n_together: int,
) -> jax.Array:
    """Computes the losses of hidden states [S, B, L, D] and targets [S, B, L], in nats.

    This scores `n_together` segments at a time.
    """

    def score(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        # Rows first: the mesh shards them.
        of_rows = (jnp.moveaxis(array, 0, 1) for array in group)
        return jnp.moveaxis(nll(*of_rows), 1, 0)

    def groups(array: jax.Array) -> jax.Array:
        return array.reshape(-1, n_together, *array.shape[1:])

    return jax.lax.map(score, (groups(hidden), groups(targets))).reshape(targets.shape)


def evaluate(
    eval_step: EvalStep,
    weights: Any,
    memory: Any,
    reader: SegmentReader,
    *,
    segments_per_call: int = SEGMENTS_PER_CALL,
    place: Callable[[Segments], Segments],
    after_call: Callable[[int, Totals], None] = lambda segments, totals: None,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the whole text of `reader` with the scorer's prepared weights, S segments per call.

    The memory is donated, and any of the right shape: the reader's reset bits empty it first.
    `place` puts segments on the devices. `after_call` gets the segments done and the totals so far
    after each call but the last, and may raise to stop. `token_nats`, floats [T], receives each
    token's loss in nats. The first token is not scored.
    """
    totals = Totals()
    pending: tuple[int, SegmentLosses] | None = None

    def fetch(first: int, scores: SegmentLosses) -> Totals:
        if token_nats is not None:
            nll = distributed.to_host(scores.nll)
            scored = reader.scored(first, len(nll))
            token_nats[scored[scored > 0]] = nll[scored > 0]
        nats, tokens = distributed.to_host(scores.nats), distributed.to_host(scores.tokens)
        # Summed on the host, in double precision.
        return Totals(nats.sum(dtype="float64").item(), tokens.sum(dtype="float64").item())

    for first in range(0, reader.n_segments, segments_per_call):
        segments = place(reader.segments(first, segments_per_call))
        memory, scores = eval_step(weights, memory, segments)
        # Fetched one call late, so that the device never waits for the host.
        if pending is not None:
            totals += fetch(*pending)
            after_call(first, totals)
        pending = first, scores
    assert pending is not None, "a text has at least one segment"
    return totals + fetch(*pending)
