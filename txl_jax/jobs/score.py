"""Scoring a text, with a bar or lines that tell how far it is, and a way out."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tqdm

from txl_jax.assemble import RunComponents
from txl_jax.data.batches.segments import SegmentReader, evaluation_segments
from txl_jax.data.corpus import Corpus
from txl_jax.errors import NonFiniteError
from txl_jax.evaluation.sliding_window import evaluate_windows
from txl_jax.evaluation.streaming import evaluate
from txl_jax.jobs import report
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime.environment import duration

SPLITS = ("valid", "test")  # The texts that are scored.
_SECONDS_BETWEEN_LINES = 20.0


class Interrupted(Exception):
    """A stop was requested while a text was being scored."""


def score(
    parts: RunComponents,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Losses of a text [T] at the evaluation lengths: read once with a memory, or, with `eval.stride`, in windows.

    Args:
      token_nats: floats [T] that take the nats of each token; the first one is not scored and stays as it is.

    Raises:
      Interrupted: a stop was requested before the end.
      NonFiniteError: the loss is nan or infinite.
    """
    watch = {"measure": measure, "log": log, "stop_requested": stop_requested}
    by = _in_windows if parts.config.eval.stride else _streaming
    totals = by(parts, params, tokens, name=name, token_nats=token_nats, **watch)
    check_finite(totals, name)
    return totals


def _in_windows(
    parts: RunComponents, params: Any, tokens: Any, *, name: str, token_nats: np.ndarray | None, **watch: Any
) -> Totals:
    span = parts.config.eval
    with watched(name, len(tokens) - 1, unit="token", **watch) as show:
        return evaluate_windows(
            parts.evaluation.window_step,
            params,
            tokens,
            attention_len=span.segment_len,
            stride=span.stride,
            batch_size=span.batch_size,
            after_call=lambda so_far: show(so_far.tokens, so_far),
            token_nats=token_nats,
        )


def _streaming(
    parts: RunComponents, params: Any, tokens: Any, *, name: str, token_nats: np.ndarray | None, **watch: Any
) -> Totals:
    span = parts.config.eval
    whole = evaluation_segments(
        tokens, batch_size=span.batch_size, segment_len=span.segment_len, warmup_tokens=span.warmup_tokens
    )
    reader = dataclasses.replace(
        whole, own=parts.placement.own_rows(span.batch_size)
    )  # It reads this process's rows only.
    weights = parts.evaluation.prepare_params(params)
    with watched(name, reader.n_segments, unit="segment", **watch) as show:
        return evaluate(
            parts.evaluation.eval_step,
            weights,
            parts.evaluation.init_memory(weights),
            reader,
            segments_per_call=span.segments_per_call,
            place=functools.partial(parts.placement.place, batch_size=span.batch_size),
            after_call=show,
            keep=None if token_nats is None else functools.partial(put_in_text_order, token_nats, whole),
        )


def score_split(
    parts: RunComponents,
    params: Any,
    corpus: Corpus,
    split: str,
    *,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the validation or the test text of a corpus as `score` does, and says the result."""
    began, measure = time.monotonic(), corpus.vocabulary.measure
    totals = score(
        parts,
        params,
        getattr(corpus, split),
        name=split,
        measure=measure,
        log=log,
        stop_requested=stop_requested,
        token_nats=token_nats,
    )
    log(report.timed(f"{split} {report.scores(totals, measure)}", time.monotonic() - began))
    return totals


@contextlib.contextmanager
def watched(
    name: str,
    total: int,
    *,
    unit: str,
    measure: Measure,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
) -> Iterator[Callable[[float, Totals], None]]:
    """A function to call with how much of `total` is done and the scores so far, while a text is being scored.

    On a terminal it moves a bar, elsewhere it says a line every 20 seconds. It raises `Interrupted` once a stop is
    requested.
    """
    began = last_line = time.monotonic()
    # None: disabled unless the error stream is a terminal. The result is said when the bar has gone.
    with tqdm.tqdm(total=total, desc=name, unit=unit, leave=False, disable=None) as bar:

        def show(done: float, totals: Totals) -> None:
            nonlocal last_line
            if stop_requested():
                raise Interrupted(name)
            now = time.monotonic()
            if not bar.disable:
                bar.set_postfix_str(totals.told(measure), refresh=False)
                bar.update(done - bar.n)
            elif now - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = now
                remaining = (now - began) / done * (total - done)
                log(f"{name}: {done / total:.0%}  {totals.told(measure)} so far  ETA {duration(remaining)}")

        yield show


def put_in_text_order(token_nats: np.ndarray, reader: SegmentReader, first: int, nll: np.ndarray) -> None:
    """Writes the nats [S, B, L] of the segments from number `first` on to the places of their tokens, in floats [T]."""
    scored = reader.scored(first, len(nll))
    token_nats[scored[scored > 0]] = nll[scored > 0]


def check_finite(totals: Totals, name: str) -> None:
    """Raises `NonFiniteError` if the loss of a text is nan or infinite."""
    if not math.isfinite(totals.nats):
        raise NonFiniteError(f"{name}: the summed loss is {totals.nats}, so these parameters cannot be used")


def as_record(totals: Totals) -> dict[str, float]:
    """The fields of a result in metrics.jsonl and results.json."""
    return {
        "loss": totals.nll,
        "bpc": totals.bpc,
        "perplexity": totals.perplexity,
        "tokens": totals.tokens,
    }
