"""Tests scoring of a text: which nats belong to which token, and the progress bar or lines."""

import re

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from txl_jax.data.segments import evaluation_segments
from txl_jax.evaluation.streaming import Scores, evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.runs import score as score_job
from txl_jax.runs.score import progress_bar, put_in_text_order


@given(
    length=st.integers(2, 60),
    batch_size=st.integers(1, 7),
    segment_len=st.integers(1, 9),
    warmup=st.integers(0, 30),
    per_call=st.integers(1, 5),
)
@example(length=6, batch_size=4, segment_len=3, warmup=2, per_call=2)  # The last row has no target of its own.
def test_every_tokens_nats_come_to_its_place(length, batch_size, segment_len, warmup, per_call):
    """Runs `evaluate` itself, with a model for which the nats of a token are its number, and NaN elsewhere."""

    def step(weights, memory, segments):
        nll = np.where(segments.weights > 0, segments.targets, np.nan)
        return memory, Scores(np.nansum(nll, (1, 2)), segments.weights.sum((1, 2)), nll)

    reader = evaluation_segments(
        np.arange(length), batch_size=batch_size, segment_len=segment_len, warmup_tokens=warmup
    )
    nats, written = np.full(length, -1.0), []

    def keep(first, nll):
        before = nats.copy()
        put_in_text_order(nats, reader, first, nll)
        written.extend(np.flatnonzero(before != nats).tolist())

    evaluate(step, None, None, reader, segments_per_call=per_call, place=lambda segments: segments, keep=keep)
    assert nats.tolist() == [-1, *range(1, length)]
    assert sorted(written) == list(range(1, length)), "each once"


def test_without_a_terminal_a_line_comes_every_twenty_seconds(monkeypatch, capsys):
    clock = iter([100, 119, 120, 121, 139, 145, 166])  # At the start, and at each call.
    monkeypatch.setattr(score_job.time, "monotonic", lambda: next(clock))
    logged = []
    reported = {"unit": "segment", "measure": Measure.BPC, "log": logged.append, "stop_requested": lambda: False}
    with progress_bar("a text", 50, **reported) as show:
        for done in (5, 10, 15, 20, 25, 0):
            show(done, Totals(nats=np.log(2) * done, tokens=done))
    assert "nan" not in logged.pop() and len(logged) == 2  # Without a token there is no score.
    for line, percent, remaining in zip(logged, (20, 50), ("0:01:20", "0:00:45"), strict=True):
        assert re.match(rf"a text:\D*\b{percent}%.*\bbpc 1\.0000\b.*\b{remaining}$", line), line
    assert capsys.readouterr().err == ""
