"""Scoring a text: its loss at the evaluation lengths, with a progress bar or lines, and a way to stop."""

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
from txl_jax.data.batches.segment_reader import SegmentReader, evaluation_segments
from txl_jax.data.corpus import Corpus
from txl_jax.errors import NonFiniteError
from txl_jax.evaluation.sliding_window import evaluate_windows
from txl_jax.evaluation.streaming import evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime.environment import duration
from txl_jax.training.scores import format_scores, with_duration

SPLITS = ("valid", "test")  # The texts that are scored.
_SECONDS_BETWEEN_LINES = 20.0


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """A stop was requested while a text was being scored."""


def score(
    components: RunComponents,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Computes the losses of a text [T]: streaming with a memory, or, with `eval.stride`, in a sliding window.

    Args:
      name: of the text, in the progress bar and in errors.
      token_nats: floats [T] that take the nats of each token; the first one is not scored and stays as it is.

    Raises:
      Interrupted: a stop was requested before the end.
      NonFiniteError: the loss is nan or infinite.
    """
    progress = functools.partial(progress_bar, name, measure=measure, log=log, stop_requested=stop_requested)
    score_text = _score_stream if components.config.eval.stride is None else _score_windows
    totals = score_text(components, params, tokens, token_nats=token_nats, progress=progress)
    check_finite(totals, name)
    return totals


_Progress = Callable[..., contextlib.AbstractContextManager[Callable[[float, Totals], None]]]


def _score_windows(
    components: RunComponents, params: Any, tokens: Any, *, token_nats: np.ndarray | None, progress: _Progress
) -> Totals:
    eval_config = components.config.eval
    assert eval_config.stride is not None
    with progress(len(tokens) - 1, unit="token") as show:
        return evaluate_windows(
            components.evaluation.window_step,
            params,
            tokens,
            attention_len=eval_config.segment_len,
            stride=eval_config.stride,
            batch_size=eval_config.batch_size,
            after_call=lambda so_far: show(so_far.tokens, so_far),
            token_nats=token_nats,
        )


def _score_stream(
    components: RunComponents, params: Any, tokens: Any, *, token_nats: np.ndarray | None, progress: _Progress
) -> Totals:
    eval_config = components.config.eval
    whole = evaluation_segments(
        tokens,
        batch_size=eval_config.batch_size,
        segment_len=eval_config.segment_len,
        warmup_tokens=eval_config.warmup_tokens,
    )
    # Each process reads the rows of its own devices.
    reader = dataclasses.replace(whole, own=components.placement.own_rows(eval_config.batch_size))
    weights = components.evaluation.prepare_params(params)
    with progress(reader.n_segments, unit="segment") as show:
        return evaluate(
            components.evaluation.eval_step,
            weights,
            components.evaluation.init_memory(weights),
            reader,
            segments_per_call=eval_config.segments_per_call,
            place=functools.partial(components.placement.place, batch_size=eval_config.batch_size),
            after_call=show,
            keep=None if token_nats is None else functools.partial(put_in_text_order, token_nats, whole),
        )


def score_split(
    components: RunComponents,
    params: Any,
    corpus: Corpus,
    split: str,
    *,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the validation or the test text of a corpus as `score` does, and logs the result."""
    began, measure = time.monotonic(), corpus.vocabulary.measure
    totals = score(
        components,
        params,
        getattr(corpus, split),
        name=split,
        measure=measure,
        log=log,
        stop_requested=stop_requested,
        token_nats=token_nats,
    )
    log(with_duration(f"{split} {format_scores(totals, measure)}", time.monotonic() - began))
    return totals


@contextlib.contextmanager
def progress_bar(
    name: str,
    total: int,
    *,
    unit: str,
    measure: Measure,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any],
) -> Iterator[Callable[[float, Totals], None]]:
    """Shows the progress of scoring: on a terminal a bar, elsewhere a line every 20 seconds.

    Yields:
      A function to call with how much of `total` is done and the scores so far. It raises `Interrupted` once a stop is
      requested.
    """
    began = last_line = time.monotonic()
    # disable=None: no bar unless the error stream is a terminal. leave=False: the result's line takes its place.
    with tqdm.tqdm(total=total, desc=name, unit=unit, leave=False, disable=None) as bar:

        def show(done: float, totals: Totals) -> None:
            nonlocal last_line
            if stop_requested():
                raise Interrupted(name)
            now = time.monotonic()
            # While only warm-up tokens have been read, and for what is no scoring, there is no score to show.
            score_so_far = totals.format(measure) if totals.tokens else ""
            if not bar.disable:
                bar.set_postfix_str(score_so_far, refresh=False)
                bar.update(done - bar.n)
            elif now - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = now
                remaining = (now - began) / done * (total - done) if done else math.nan
                shown_score = f"  {score_so_far} so far" if score_so_far else ""
                log(f"{name}: {done / total:.0%}{shown_score}  ETA {duration(remaining)}")

        yield show


def put_in_text_order(token_nats: np.ndarray, reader: SegmentReader, first: int, nll: np.ndarray) -> None:
    """Writes the nats [S, B, L] of the segments from number `first` on to their tokens' places in floats [T]."""
    scored = reader.scored(first, len(nll))
    token_nats[scored[scored > 0]] = nll[scored > 0]


def check_finite(totals: Totals, name: str) -> None:
    """Raises `NonFiniteError` if the loss of a text is nan or infinite."""
    if not math.isfinite(totals.nats):
        raise NonFiniteError(f"{name}: the summed loss is {totals.nats}, so these parameters cannot be used")
