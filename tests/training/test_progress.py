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

STEPS = 8
LOG_EVERY = 4
# Tokens of one update, by which throughput is counted. Only 20 of them are scored (`metrics`).
TOKENS = 21


class Log:
    """Keeps the records and lines that a run's log would write."""

    def __init__(self):
        self.records = []
        self.lines = []

    def record(self, kind, step, values, *, member=None):
        labels = {"kind": kind, "step": step}
        if member is not None:
            labels["member"] = member
        self.records.append(labels | values)

    def print(self, line):
        self.lines.append(line)

    def forecasts(self):
        """The lines that say how long the run takes."""
        return [line for line in self.lines if line.startswith("time")]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def move(self, seconds):
        self.now += seconds


def metrics(*steps: int, **changes) -> UpdateMetrics:
    """Metrics of these updates, each with numbers of its own: 60 nats and more, of 20 tokens."""
    step = np.asarray(steps, np.float32)
    of_steps = UpdateMetrics(
        nats=60 + step,
        tokens=20 + 0 * step,
        grad_norm=1 / (1 + step),
        learning_rate=0.1 - step / 1000,
    )
    arrays = {name: np.asarray(value, np.float32) for name, value in changes.items()}
    return of_steps._replace(**arrays)


def progress(log, **changes) -> Progress:
    """Progress of a run of `STEPS` updates, by a clock that stands still if none is passed."""
    settings = {
        "steps": STEPS,
        "log_every": LOG_EVERY,
        "cost": StepCost(TOKENS),
        "clock": Clock(),
    }
    return Progress(log, **settings | changes)


def add(run, steps):
    """Adds updates one by one."""
    for step in steps:
        run.add(step, metrics(step))


def test_a_line_sums_up_its_updates():
    log = Log()
    clock = Clock()
    run = progress(log, clock=clock)

    for first_update in (0, 2, 4, 6):
        clock.move(0.5)
        run.add(first_update, metrics(first_update, first_update + 1))

    first, second = log.records
    loss = (60 + 61 + 62 + 63) / 80
    expected = {
        "loss": loss,
        "bpc": loss / math.log(2),
        "grad_norm": (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4,
        # The rate is the last one.
        "learning_rate": 0.1 - 3 / 1000,
        "tokens_per_second": 4 * TOKENS / 1.0,
    }
    assert first["kind"] == "train"
    assert first["step"] == 4
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert second["step"] == 8
    assert second["loss"] == pytest.approx((64 + 65 + 66 + 67) / 80)
    # Four of eight updates took a second, so a second is left.
    assert re.search(r"\b4/8\b.*\b0:00:01$", log.lines[0])


def test_the_last_update_is_reported_between_multiples_of_log_every():
    log = Log()

    add(progress(log, steps=3, log_every=2), range(3))

    assert [record["step"] for record in log.records] == [2, 3]
    assert log.records[1]["loss"] == pytest.approx(62 / 20)


# Within an interval, at its end, and after it.
@pytest.mark.parametrize("stopped_after", [3, 4, 5])
def test_a_resumed_run_writes_the_same_records(stopped_after):
    expected = Log()
    add(progress(expected), range(STEPS))

    resumed = Log()
    before = progress(resumed)
    add(before, range(stopped_after))
    stored = json.loads(json.dumps(before.state()))
    after = progress(resumed, running_totals=stored)
    add(after, range(stopped_after, STEPS))

    # Measured times and rates depend on the process.
    for record in (*expected.records, *resumed.records):
        for name in MEASURED:
            record.pop(name, None)
    assert resumed.records == expected.records
    assert len(resumed.lines) == len(expected.lines)


def test_a_resumed_ensemble_continues_the_totals_of_each_member():
    log = Log()
    members = Members(("a", "b"))
    before = progress(log, members=members)
    before.add(0, jax.device_get(members.stack([metrics(0), metrics(0, nats=[30.0])])))

    stored = json.loads(json.dumps(before.state()))
    assert {name: totals["nats"] for name, totals in stored.items()} == {"a": 60.0, "b": 30.0}

    resumed = progress(log, members=members, log_every=2, running_totals=stored)
    resumed.add(1, jax.device_get(members.stack([metrics(1), metrics(1)])))
    losses = {record["member"]: record["loss"] for record in log.records}
    assert losses == pytest.approx({"a": (60 + 61) / 40, "b": (30 + 61) / 40})


def test_tokens_per_second_counts_this_process():
    """The loss is the mean over the whole interval, whichever process made its updates."""
    log = Log()
    clock = Clock()
    # Of updates 0 and 1, by an earlier process.
    stored = {"nats": 130.0, "tokens": 40.0, "grad_norm": 2.0, "updates": 2}
    run = progress(log, clock=clock, running_totals=stored)

    for step in (2, 3):
        clock.move(1.0)
        run.add(step, metrics(step))

    assert log.records[0]["tokens_per_second"] == pytest.approx(TOKENS / 1.0)
    assert log.records[0]["loss"] == pytest.approx((130 + 62 + 63) / 80)


# Of the call's three updates, the second is the first bad one.
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"nats": [60, math.nan, math.inf]}, id="loss"),
        pytest.param(
            {"nats": [60, -math.inf, 60], "grad_norm": [1, 1, math.nan]}, id="loss before gradient"
        ),
    ],
)
def test_the_alarm_names_the_first_bad_update(changes):
    """With its loss or gradient norm, and its learning rate.

    It is the second update of a call that begins after the first, so the third of the run. Its rate
    is 0.1 - 2 / 1000.
    """
    log = Log()
    run = progress(log)
    run.add(0, metrics(0))

    with pytest.raises(NonFiniteError, match=r"^\D*\b3\b.*\b(nan|inf)\b.*\b9\.80e-02\b"):
        run.add(1, metrics(1, 2, 3, **changes))

    # Nothing of that call is counted or reported.
    assert run.state()["updates"] == 1
    assert not log.records


def test_the_alarm_names_the_member_of_an_ensemble():
    second_is_bad = jax.tree.map(lambda good: np.stack([good, good * np.nan]), metrics(0))
    run = progress(Log(), members=Members(("a", "b")))

    with pytest.raises(NonFiniteError, match=r"^b: "):
        run.add(0, second_is_bad)


def measured_run(*, per_update=0.5, steps=STEPS, names=(), memory=None, **cost):
    """A log of two intervals of updates, which all take the same time.

    The last update of an interval comes after a wait of a fifth of the interval. An evaluation
    follows each update.
    """
    log = Log()
    clock = Clock()
    members = Members(names)
    run = progress(
        log,
        clock=clock,
        steps=steps,
        cost=StepCost(TOKENS, **cost),
        members=members,
        device_memory=lambda: memory,
    )
    for step in range(LOG_EVERY * 2):
        clock.move(per_update)
        if step % LOG_EVERY == LOG_EVERY - 1:
            run.waited(per_update * LOG_EVERY / 5)
        run.add(step, jax.device_get(members.stack([metrics(step)] * len(members))))

        evaluation = 50.0
        clock.move(evaluation)
        run.exclude(evaluation)
    return log


def test_what_a_record_measures():
    """A step of 2e12 operations in half a second on a peak of 16e12."""
    log = measured_run(memory=3_000_000_000, flops=2e12, peak_flops=16e12)

    expected = {
        "tokens_per_second": TOKENS / 0.5,
        "step_seconds": 0.5,
        "host_wait_share": 0.2,
        "model_flops_per_second": 4e12,
        "peak_share": 0.25,
        "device_memory_bytes": 3_000_000_000,
    }
    for record in log.records:
        assert {name: record[name] for name in MEASURED} == pytest.approx(expected)


def test_members_of_an_ensemble_share_the_peak():
    """Two members make 4e12 operations in half a second, of a peak of 16e12."""
    log = measured_run(names=("a", "b"), memory=3_000_000_000, flops=2e12, peak_flops=16e12)

    assert [record["peak_share"] for record in log.records] == pytest.approx([0.5] * 4)
    assert [record["member"] for record in log.records] == ["a", "b", "a", "b"]


def test_the_time_of_a_run_is_forecast_by_its_first_steps():
    """The first update is omitted, the next two take 4 s, which is long enough, and 997 are left.

    They take 1,994 s, or 33 minutes and 14 s. Evaluations in between do not count.
    """
    (line,) = measured_run(per_update=2.0, steps=1000).forecasts()

    assert "2 s per step" in line
    assert "0:33:14" in line
    assert "997 steps" in line


def test_a_run_that_is_too_short_to_time_has_no_forecast():
    """Its eight updates take 8 ms, and three seconds are timed."""
    assert measured_run(per_update=0.001).forecasts() == []


def test_durations():
    """Days, hours, minutes and seconds. Seconds are rounded before they are split."""
    assert duration(59.6) == "0:01:00"
    assert duration(3723) == "1:02:03"
    assert duration(200_000) == "2d 7:33:20"


def test_durations_that_are_unknown_have_no_digits():
    unknown = duration(math.nan)

    assert duration(math.inf) == unknown
    assert duration(1e15) == unknown
    assert duration(-1e300) == unknown
    assert not re.search(r"\d", unknown)
