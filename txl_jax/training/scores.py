"""Scores of a text as records and as lines for people."""

import math
from typing import Any

from txl_jax.metrics import Measure, Totals
from txl_jax.runtime.environment import duration


def as_record(totals: Totals) -> dict[str, float]:
    """Returns the fields of a result in metrics.jsonl and results.json."""
    return {
        "loss": totals.nll,
        "bpc": totals.bpc,
        "perplexity": totals.perplexity,
        "tokens": totals.tokens,
    }


def as_result(totals: Totals) -> dict[str, Any]:
    """Returns `as_record` for a JSON file: a perplexity above the largest float, of a run that diverged, is null.

    >>> as_result(Totals(nats=2000.0, tokens=2.0))["perplexity"] is None
    True
    """
    record = as_record(totals)
    if math.isfinite(record["perplexity"]):
        return dict(record)
    return {**record, "perplexity": None, "note": "the loss is too large for a perplexity: exp(loss) overflows"}


def format_scores(totals: Totals, measure: Measure) -> str:
    """Formats one line of a result, the usual measure first."""
    perplexity = f"  {totals.format(Measure.PPL)}" if measure is Measure.BPC else ""
    return f"{totals.format(measure)}  loss {totals.nll:.4f}{perplexity}  ({totals.tokens:,.0f} tokens)"


def with_duration(line: str, seconds: float) -> str:
    """Appends the time that something took."""
    return f"{line}  in {duration(seconds)}"
