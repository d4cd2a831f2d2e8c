"""The score of a text: its summed losses, their log line, and their record."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from txl_jax.data.vocabulary import MOST_UNKNOWN, Vocabulary
from txl_jax.evaluation.sliding_window import evaluate_windows, window_batches
from txl_jax.evaluation.streaming import evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.runs.build import Built
from txl_jax.runs.scoring_progress import check_finite, progress_bar
from txl_jax.runtime import environment


def score(
    built: Built,
    params: Any,
    tokens: Any,
    *,
    name: str,
    measure: Measure = Measure.BPC,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Computes the losses of a text, either streaming or in a sliding window.

    The text is streamed with a memory or, with `eval.stride`, scored in a sliding window. The first
    token is not scored.

    Args:
      built: The model, with the evaluation lengths.
      params: Its parameters, as in training.
      tokens: Ids [T] of the text.
      name: Name of the text, for progress and errors.
      measure: The measure in which progress is shown.
      log: Receives a line of progress.
      stop_requested: Is called after each call.
      token_nats: Floats [T] that receive each token's loss in nats, or None.

    Returns:
      The sum of the losses, and the number of scored tokens.

    Raises:
      Interrupted: If a stop was requested.
      NonFiniteError: If the loss is nan or infinite.
    """
    lengths = built.config.eval
    progress = functools.partial(
        progress_bar, name, measure=measure, log=log, stop_requested=stop_requested
    )
    if lengths.stride is not None:
        with progress(len(tokens) - 1, unit="token") as show:
            batches = window_batches(
                tokens,
                attention_len=lengths.segment_len,
                stride=lengths.stride,
                batch_size=lengths.batch_size,
            )
            totals = evaluate_windows(
                built.window_step,
                params,
                batches,
                after_call=lambda so_far: show(so_far.tokens, so_far),
                token_nats=token_nats,
            )
    else:
        reader = built.evaluation_reader(tokens)
        prepared = built.prepare_params(params)
        with progress(reader.n_segments, unit="segment") as show:
            totals = evaluate(
                built.eval_step,
                prepared,
                built.init_memory(prepared),
                reader,
                place=functools.partial(built.place, batch_size=lengths.batch_size),
                after_call=show,
                token_nats=token_nats,
            )
    check_finite(totals, name)
    return totals


def score_with_line(
    built: Built,
    params: Any,
    tokens: Any,
    *,
    name: str,
    vocabulary: Vocabulary,
    **options: Any,
) -> tuple[Totals, str]:
    """Scores a text like `score`. Returns the totals, and a line with the totals and the time.

    The totals include the number of bytes of the text if the vocabulary knows it.
    """
    score_text = functools.partial(score, built, params)
    return score_text_with_line(score_text, tokens, name=name, vocabulary=vocabulary, **options)


def score_text_with_line(
    score_text: Callable[..., Totals],
    tokens: Any,
    *,
    name: str,
    vocabulary: Vocabulary,
    **options: Any,
) -> tuple[Totals, str]:
    """Scores a text with `score_text`, otherwise like `score_with_line`.

    `score_text` takes tokens and options as `score` does after the parameters.
    """
    began = time.monotonic()
    measure = vocabulary.measure
    totals = score_text(tokens, name=name, measure=measure, **options)
    totals = dataclasses.replace(totals, bytes=vocabulary.count_bytes(tokens[1:]))
    line = f"{name} {format_scores(totals, measure)}"
    if totals.bytes and measure is Measure.PPL:
        line += f"  {vocabulary.per_byte.replace('_', ' ')} {totals.bits_per_byte:.4f}"
    line += f"  in {environment.duration(time.monotonic() - began)}"
    return totals, line


def note_unknown(unknown: int, tokens: int, consequence: str) -> None:
    """Prints a note about unknown tokens if there are more than one in a thousand."""
    if unknown > MOST_UNKNOWN * tokens:
        print(
            f"note      {unknown / tokens:.2%} of the tokens are unknown, {consequence}", flush=True
        )


def as_record(totals: Totals, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the fields of a result in metrics.jsonl and results.json."""
    record = totals.per_token(vocabulary.measure)
    if totals.bytes:
        record |= {vocabulary.per_byte: totals.bits_per_byte}
    return record | {"tokens": totals.tokens}


def as_result(totals: Totals, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns `as_record` for a JSON file, with null for a perplexity that is too large.

    A perplexity is too large if it is above the largest float, which happens in a run that
    diverged.
    """
    record: dict[str, Any] = as_record(totals, vocabulary)
    if math.isfinite(record["perplexity"]):
        return record
    return record | {
        "perplexity": None,
        "note": "the loss is too large for a perplexity: exp(loss) overflows",
    }


def format_scores(totals: Totals, measure: Measure) -> str:
    """Formats one line of a result, the usual measure first."""
    perplexity = f"  {totals.format(Measure.PPL)}" if measure.is_bits else ""
    return (
        f"{totals.format(measure)}  loss {totals.nll:.4f}{perplexity}  "
        f"({totals.tokens:,.0f} tokens)"
    )
