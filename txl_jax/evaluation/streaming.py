"""Streaming evaluation: the model reads a text once, segment after segment, with its memory.

Every token but the first is scored exactly once (DESIGN of the walk: `txl_jax.data.segments`).
"""

from collections.abc import Callable
from typing import Any

import jax

from txl_jax import losses, recurrence
from txl_jax.config import EvalConfig
from txl_jax.data.segments import SegmentReader, Segments
from txl_jax.memory import Memory
from txl_jax.metrics import Totals
from txl_jax.modules.transformer_xl import TransformerXL

# (params, memory, S segments) -> (memory, summed nats [S], scored tokens [S])
EvalStep = Callable[[Any, Memory, Segments], tuple[Memory, jax.Array, jax.Array]]


def make_eval_step(model: TransformerXL, config: EvalConfig) -> EvalStep:
    """A function that scores S segments, ready for `jax.jit` with the memory donated."""

    def score(params: Any, memory: Memory, segment: Segments) -> tuple[Any, Memory, tuple[jax.Array, jax.Array]]:
        variables = {"params": params}
        hidden, memory = model.apply(
            variables,
            segment.inputs,
            memory,
            clamp_len=config.clamp_len,
            same_length=config.same_length,
            deterministic=True,
            method=model.encode,
        )
        nll = model.apply(variables, hidden, segment.targets, method=model.nll)
        return params, memory, losses.weighted_sum(nll, segment.weights)

    def eval_step(params: Any, memory: Memory, segments: Segments) -> tuple[Memory, jax.Array, jax.Array]:
        _, memory, (nats, tokens) = recurrence.scan_segments(
            score, params, memory, segments, start=model.compat.memory_start
        )
        return memory, nats, tokens

    return eval_step


def evaluate(
    eval_step: EvalStep,
    params: Any,
    memory: Memory,
    reader: SegmentReader,
    *,
    segments_per_call: int,
    place: Callable[[Segments], Segments],
    after_call: Callable[[int, Totals], None] = lambda segments, totals: None,
) -> Totals:
    """Scores the whole text of `reader`.

    Args:
      memory: any memory of the right shape; the reader's reset bits empty it first. It is donated.
      place: puts segments on the devices.
      after_call: called with the number of segments done and the totals up to there; may raise to stop.
    """
    totals, pending = Totals(), None
    for first in range(0, reader.n_segments, segments_per_call):
        segments = place(reader.segments(first, segments_per_call))
        memory, nats, tokens = eval_step(params, memory, segments)
        if pending is not None:  # Fetched one call late, so that the device never waits for the host.
            totals += _fetch(*pending)
            after_call(first, totals)
        pending = nats, tokens
    return totals + _fetch(*pending)


def _fetch(nats: jax.Array, tokens: jax.Array) -> Totals:
    """Sums over S on the host, in double precision."""
    nats, tokens = jax.device_get((nats, tokens))
    return Totals(nats.sum(dtype="float64").item(), tokens.sum(dtype="float64").item())
