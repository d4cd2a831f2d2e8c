"""Tests the remaining time in the lines of scoring."""

import io
import re
import sys
import types

from txl_jax.metrics import Measure, Totals
from txl_jax.runs import scoring_progress


def test_the_remaining_time_does_not_count_compilation(monkeypatch):
    """The first of 101 segments takes 25 seconds, and each of the others half a second."""
    clock = {"now": 0.0}
    monkeypatch.setattr(
        scoring_progress, "time", types.SimpleNamespace(monotonic=lambda: clock["now"])
    )
    # Not a terminal, so that lines are logged.
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines = []
    with scoring_progress.progress_bar(
        "valid", 101, unit="segment", measure=Measure.BPC, log=lines.append
    ) as show:
        for done in range(1, 102):
            clock["now"] = 25 + (done - 1) / 2
            show(done, Totals(nats=done, tokens=done))

    shown = [re.search(r"(\d+)%.*ETA (\S+)", line).groups() for line in lines]
    # Lines after 25, 45 and 65 seconds: 1, 41 and 81 segments, so 60 and 20 are left.
    assert shown == [("1", "unknown"), ("41", "0:00:30"), ("80", "0:00:10")]
