"""Scoring a text, with a progress line and a way out."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from txl_jax.assemble import Parts
from txl_jax.data.segments import evaluation_segments
from txl_jax.evaluation.streaming import evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.training.progress import NonFiniteError, duration

_SECONDS_BETWEEN_LINES = 20.0


class Interrupted(Exception):
    """A stop was requested while a text was being scored."""


def score(
    parts: Parts,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    say: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
) -> Totals:
    """Losses of a text [T] at the evaluation lengths.

    Raises:
      Interrupted: a stop was requested before the end.
      NonFiniteError: the loss is nan or infinite.
    """
    span = parts.config.eval
    reader = evaluation_segments(
        tokens,
        batch_size=span.batch_size,
        segment_len=span.segment_len,
        warmup_tokens=span.warmup_tokens,
        host=parts.host(span.batch_size),
    )
    began = last_line = time.monotonic()

    def after_call(done: int, totals: Totals) -> None:
        nonlocal last_line
        if stop_requested():
            raise Interrupted(name)
        now = time.monotonic()
        if now - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = now
            remaining = (now - began) / done * (reader.n_segments - done)
            say(f"{name}: {done / reader.n_segments:.0%}  {totals.told(measure)} so far  ETA {duration(remaining)}")

    totals = evaluate(
        parts.eval_step,
        params,
        parts.eval_memory(),
        reader,
        segments_per_call=span.segments_per_call,
        place=functools.partial(parts.place, batch_size=span.batch_size),
        after_call=after_call,
    )
    if not math.isfinite(totals.nats):
        raise NonFiniteError(f"{name}: the summed loss is {totals.nats}, so these parameters cannot be used")
    return totals


def as_record(totals: Totals) -> dict[str, float]:
    """The fields of a result in metrics.jsonl and results.json."""
    return {
        "loss": totals.nll,
        "bpc": totals.bpc,
        "perplexity": totals.perplexity,
        "tokens": totals.tokens,
    }
