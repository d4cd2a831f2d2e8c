"""Streaming evaluation: the model reads a text once, segment after segment, with its memory.

Every token except the first is scored exactly once, in the order of `txl_jax.data.segments`.
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

    nats: jax.Array  # [S], losses summed over scored tokens.
    tokens: jax.Array  # [S], number of scored tokens.
    nll: jax.Array  # [S, B, L], losses of all positions in nats, scored or not.


# S of every evaluation. It also determines which tails are scored together.
SEGMENTS_PER_CALL = 8
# Positions [n, B, L] whose tails are scored together.
_SCORED_TOGETHER = 1024

# (prepared parameters, memory, segments) -> (memory, losses). Prepared parameters and memory belong
# to the scorer (`txl_jax.inference.scorer`).
EvalStep = Callable[[Any, Any, Segments], tuple[Any, SegmentLosses]]


def make_eval_step(model: AnyModel, config: EvalConfig) -> EvalStep:
    """Returns a function that scores S segments, ready for `jax.jit` with the memory donated."""
    scorer = make_scorer(model, config)

    def eval_step(prepared: Any, memory: Any, segments: Segments) -> tuple[Any, SegmentLosses]:
        targets = jnp.asarray(segments.targets)
        # Ignored targets do not count.
        loss_mask = jnp.asarray(segments.weights) * (targets >= 0)
        n_segment, *shape = targets.shape
        n_together = _segments_together(n_segment, shape, n_tail=len(model.config.cutoffs))

        def read(state: None, memory: Any, segment: Any) -> tuple[None, Any, jax.Array]:
            """Returns a segment's hidden states if it is scored with others, or its losses."""
            hidden, memory = scorer.forward(prepared, memory, segment.inputs)
            if n_together > 1:
                return state, memory, hidden
            nll = scorer.nll(prepared, hidden, segment.targets)
            return state, memory, nll

        reset = functools.partial(scorer.reset, prepared)
        _, memory, collected = recurrence.scan_segments(read, None, memory, segments, reset=reset)

        if n_together > 1:
            nll_of = functools.partial(scorer.nll, prepared)
            nll = _score_together(nll_of, collected, targets, n_together)
        else:
            nll = collected
        nats, tokens = jax.vmap(recurrence.weighted_sum)(nll, loss_mask)
        return memory, SegmentLosses(nats=nats, tokens=tokens, nll=nll)

    return eval_step


def _segments_together(n_segment: int, shape: Sequence[int], *, n_tail: int) -> int:
    """Returns the number of segments [B, L] to score at a time, a divisor of S.

    A tail of the adaptive softmax is read from memory for few tokens of a segment: of 64 tokens,
    seven are in the 160,000 words of the second tail of WikiText-103. Scoring 8 such segments took
    180 ms together, and 395 ms one after the other, on an AMD EPYC (2 cores). The maximum is 1024
    positions, so that logits stay small.
    """
    if n_tail == 0:
        return 1
    most = max(_SCORED_TOGETHER // math.prod(shape), 1)
    return max(n for n in range(1, min(most, n_segment) + 1) if n_segment % n == 0)


def _score_together(
    nll_of: Callable[[jax.Array, jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    n_together: int,
) -> jax.Array:
    """Computes the losses of hidden states [S, B, L, D] and targets [S, B, L], in nats.

    This scores `n_together` segments at a time.
    """

    def score(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_nxBxLxD, targets_nxBxL = group
        # Rows come first, because the mesh shards the first axis.
        nll_BxnxL = nll_of(jnp.moveaxis(hidden_nxBxLxD, 0, 1), jnp.moveaxis(targets_nxBxL, 0, 1))
        return jnp.moveaxis(nll_BxnxL, 1, 0)

    def in_groups(array: jax.Array) -> jax.Array:
        """[S, ..] -> [S / n, n, ..]."""
        return array.reshape(-1, n_together, *array.shape[1:])

    nll = jax.lax.map(score, (in_groups(hidden), in_groups(targets)))
    return nll.reshape(targets.shape)


class _ScoringCall(NamedTuple):
    """A call of the step that may not have finished."""

    first_segment: int  # Number of the first of its segments in the text.
    losses: SegmentLosses


def evaluate(
    eval_step: EvalStep,
    prepared: Any,
    memory: Any,
    reader: SegmentReader,
    *,
    segments_per_call: int = SEGMENTS_PER_CALL,
    place: Callable[[Segments], Segments],
    after_call: Callable[[int, Totals], None] = lambda segments, totals: None,
    check_nats: Callable[[int, np.ndarray], None] = lambda first_segment, nats: None,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the whole text of `reader`, S segments per call.

    The first token of the text is not scored.

    Args:
      eval_step: The compiled function of `make_eval_step`.
      prepared: Parameters that the scorer has prepared.
      memory: Any memory of the right shape. It is donated, and the reader's reset bits empty it
        before the first segment.
      reader: The text's segments.
      segments_per_call: S.
      place: Puts segments on the devices.
      after_call: Gets the segments done and the totals so far after each call except the last, and
        may raise to stop.
      check_nats: Gets the number of the first segment and the summed nats [S] of each call, and may
        raise to stop.
      token_nats: Floats [T], or None. Receives each scored token's loss, in nats.
    """
    totals = Totals()
    pending: _ScoringCall | None = None
    for first_segment in range(0, reader.n_segments, segments_per_call):
        segments = place(reader.segments(first_segment, segments_per_call))
        memory, losses = eval_step(prepared, memory, segments)
        # Losses are fetched one call late, so that the device never waits for the host.
        if pending is not None:
            totals += _fetch(pending, reader, check_nats, token_nats)
            after_call(first_segment, totals)
        pending = _ScoringCall(first_segment, losses)
    assert pending is not None, "a text has at least one segment"
    return totals + _fetch(pending, reader, check_nats, token_nats)


def _fetch(
    call: _ScoringCall,
    reader: SegmentReader,
    check_nats: Callable[[int, np.ndarray], None],
    token_nats: np.ndarray | None,
) -> Totals:
    """Waits for a call, and sums its losses on the host, in double precision."""
    if token_nats is not None:
        nll = distributed.to_host(call.losses.nll)
        scored = reader.scored(call.first_segment, len(nll))
        is_scored = scored > 0
        token_nats[scored[is_scored]] = nll[is_scored]
    nats = distributed.to_host(call.losses.nats)
    check_nats(call.first_segment, nats)
    tokens = distributed.to_host(call.losses.tokens)
    return Totals(nats.sum(dtype="float64").item(), tokens.sum(dtype="float64").item())
