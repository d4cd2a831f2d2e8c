"""Tests the progress lines: their sums, what a resumed run prints, tokens/s, and the alarm."""

import json
import math
import re

import jax
import numpy as np
import pytest

from txl_jax.errors import NonFiniteError
from txl_jax.flops import StepCost
from txl_jax.runtime.environment import duration
from txl_jax.runtime.sinks import MEASURED
from txl_jax.training.member_axis import Members
from txl_jax.training.progress import Progress
from txl_jax.training.step import UpdateMetrics

STEPS, LOG_EVERY, TOKENS = 8, 4, 21


class Log:
    def __init__(self):
        self.records, self.lines = [], []

    def record(self, kind, step, values, *, member=None):
        self.records.append(
            {"kind": kind, "step": step, **({} if member is None else {"member": member}), **values}
        )

    def print(self, line):
        self.lines.append(line)


def metrics(*steps: int, **changes) -> UpdateMetrics:
    step = np.asarray(steps, np.float32)
    found = UpdateMetrics(
        nats=60 + step,
        tokens=20 + 0 * step,
        grad_norm=1 / (1 + step),
        learning_rate=0.1 - step / 1000,
    )
    return found._replace(
        **{name: np.asarray(value, np.float32) for name, value in changes.items()}
    )


def progress(log, *, now=(100.0,), **changes) -> Progress:
    """Progress by a clock that shows `now[0]`."""
    given = {
        "steps": STEPS,
        "log_every": LOG_EVERY,
        "cost": StepCost(TOKENS),
        "clock": lambda: now[0],
    }
    return Progress(log, **given | changes)


def add(made, steps):
    for step in steps:
        made.add(step, metrics(step))


def test_a_line_sums_up_its_updates():
    log, now = Log(), [100.0]
    made = progress(log, now=now)
    for first in (0, 2, 4, 6):
        now[0] += 0.5
        made.add(first, metrics(first, first + 1))
    first, second = log.records
    loss = (60 + 61 + 62 + 63) / 80
    expected = {
        "loss": loss,
        "bpc": loss / math.log(2),
        "grad_norm": (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4,
    }
    # The rate is the last one.
    expected |= {"learning_rate": 0.1 - 3 / 1000, "tokens_per_second": 4 * TOKENS / 1.0}
    assert (first["kind"], first["step"], second["step"]) == ("train", 4, 8)
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert second["loss"] == pytest.approx((64 + 65 + 66 + 67) / 80)
    assert re.search(r"\b4/8\b.*\b0:00:01$", log.lines[0])
    short = Log()
    add(progress(short, steps=3, log_every=2), range(3))
    assert [record["step"] for record in short.records] == [2, 3], (
        "the last update is reported between multiples"
    )
    assert short.records[1]["loss"] == pytest.approx(62 / 20)


# Within an interval, at its end, and after it.
@pytest.mark.parametrize("stopped_after", [3, 4, 5])
def test_a_resumed_run_writes_the_same_records(stopped_after):
    expected, resumed = Log(), Log()
    add(progress(expected), range(STEPS))
    before = progress(resumed)
    add(before, range(stopped_after))
    add(
        progress(resumed, running_totals=json.loads(json.dumps(before.state()))),
        range(stopped_after, STEPS),
    )

    for record in (*expected.records, *resumed.records):
        for name in MEASURED:
            record.pop(name, None)
    assert resumed.records == expected.records and len(resumed.lines) == len(expected.lines)


def test_a_resumed_ensemble_continues_the_totals_of_each_member():
    log, members = Log(), Members(("a", "b"))
    before = progress(log, members=members)
    of_members = [metrics(0), metrics(0, nats=[30.0])]
    before.add(0, jax.device_get(members.stack(of_members)))
    stored = json.loads(json.dumps(before.state()))
    assert {name: totals["nats"] for name, totals in stored.items()} == {"a": 60.0, "b": 30.0}
    resumed = progress(log, members=members, log_every=2, running_totals=stored)
    resumed.add(1, jax.device_get(members.stack([metrics(1), metrics(1)])))
    losses = {record["member"]: record["loss"] for record in log.records}
    assert losses == pytest.approx({"a": (60 + 61) / 40, "b": (30 + 61) / 40})


def test_tokens_per_second_counts_this_process():
    log, now = Log(), [100.0]
    made = progress(
        log, now=now, running_totals={"nats": 130.0, "tokens": 40.0, "grad_norm": 2.0, "updates": 2}
    )
    for step in (2, 3):
        now[0] += 1.0
        made.add(step, metrics(step))
    assert log.records[0]["tokens_per_second"] == pytest.approx(TOKENS / 1.0)
    assert log.records[0]["loss"] == pytest.approx((130 + 62 + 63) / 80)


@pytest.mark.parametrize(
    "changes",
    [
        {"nats": [60, math.nan, math.inf]},
        {"nats": [60, -math.inf, 60], "grad_norm": [1, 1, math.nan]},
    ],
)
def test_the_alarm_names_the_first_bad_update(changes):
    log = Log()
    made = progress(log)
    made.add(0, metrics(0))
    with pytest.raises(NonFiniteError, match=r"^\D*\b3\b.*\b(nan|inf)\b.*\b9\.80e-02\b"):
        made.add(1, metrics(1, 2, 3, **changes))
    # Nothing of that call is counted or reported.
    assert made.state()["updates"] == 1 and not log.records
    bad = jax.tree.map(lambda own: np.stack([own, own * np.nan]), metrics(0))
    with pytest.raises(NonFiniteError, match=r"^b: "):
        progress(log, members=Members(("a", "b"))).add(0, bad)


def measured_run(*, per_update=0.5, steps=STEPS, names=(), **cost):
    """A log of updates on a clock: each takes as long, the last of an interval after a wait of a
    fifth of it.
    """
    log, now, members = Log(), [100.0], Members(names)
    given = {"steps": steps, "cost": StepCost(TOKENS, **cost), "members": members}
    made = progress(log, now=now, **given, device_memory=lambda: 3_000_000_000 if cost else None)
    for step in range(LOG_EVERY * 2):
        now[0] += per_update
        if step % LOG_EVERY == LOG_EVERY - 1:
            made.waited(per_update * LOG_EVERY / 5)
        made.add(step, jax.device_get(members.stack([metrics(step)] * len(members))))
        now[0] += 50.0
        made.exclude(50.0)  # An evaluation.
    return log


def test_what_a_record_measures():
    """A step of 2e12 operations in half a second on a peak of 16e12."""
    log = measured_run(flops=2e12, peak_flops=16e12)
    expected = {"tokens_per_second": TOKENS / 0.5, "step_seconds": 0.5, "host_wait_share": 0.2}
    expected |= {
        "model_flops_per_second": 4e12,
        "peak_share": 0.25,
        "device_memory_bytes": 3_000_000_000,
    }
    for record in log.records:
        assert {name: record[name] for name in MEASURED} == pytest.approx(expected)
    both = measured_run(names=("a", "b"), flops=2e12, peak_flops=16e12)  # They share the peak.
    assert [record["peak_share"] for record in both.records] == pytest.approx([0.5] * 4)
    assert [record["member"] for record in both.records] == ["a", "b"] * 2


def test_the_time_of_a_run_is_forecast_by_its_first_steps():
    """The first update is left out, the next two take 4 s, and 997 are left; hooks take none of
    it.
    """
    [line] = [
        line for line in measured_run(per_update=2.0, steps=1000).lines if line.startswith("time")
    ]
    assert "2 s per step" in line and "0:33:14" in line and "997 steps" in line
    # Too short to time.
    assert not [line for line in measured_run(per_update=0.001).lines if line.startswith("time")]


def test_durations():
    assert [duration(seconds) for seconds in (59.6, 3723, 200_000)] == [
        "0:01:00",
        "1:02:03",
        "2d 7:33:20",
    ]
    assert duration(1e15) == duration(-1e300) == duration(math.inf)
    assert duration(math.inf) == duration(math.nan) and not any(
        map(str.isdigit, duration(math.nan))
    )
