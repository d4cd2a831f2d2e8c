"""Tests the order of things in the training loop: calls, metrics, hooks. No model takes part."""

import numpy as np
import pytest

from txl_jax.errors import NonFiniteError
from txl_jax.runs.trainer import run_updates
from txl_jax.runtime.log import RunLog
from txl_jax.training.hooks import Hook
from txl_jax.training.step import UpdateMetrics


class Story:
    """A substitute for everything around the loop, which records the order of events."""

    def __init__(self, *, bad_call: int | None = None):
        self.events: list[str] = []
        self.waits: list[float] = []
        self.waited = self.waits.append
        self._bad_call = bad_call

    def step(self, state, segments):
        assert segments == state, "a call got another call's segments"
        self.events.append(f"call {state}")
        return state + self._per_call, UpdateMetrics(*(np.full(self._per_call, state, np.float32) for _ in range(4)))

    def segments(self, done):
        self.events.append(f"segments {done}")
        return done

    def add(self, first_step, metrics):
        assert metrics.nats.tolist() == [first_step] * self._per_call, "metrics of another call"
        if first_step == self._bad_call:
            raise NonFiniteError(f"call {first_step}")
        self.events.append(f"metrics {first_step}")

    def exclude(self, seconds):
        assert seconds >= 0
        self.events.append("exclude")

    def hook(self, name, every):
        def action(context):
            assert context.state == context.step
            self.events.append(f"{name} {context.step}")

        return Hook(every, action)

    def run(self, steps, *hooks, per_call=1):
        """The loop over this story; returns its result."""
        self._per_call = per_call
        span = {"first_step": 0, "steps": steps, "segments_per_call": per_call}
        around = {"progress": self, "hooks": hooks, "log": RunLog(None), "stop_requested": lambda: False}
        return run_updates(0, self.step, self.segments, **span, **around)

    def only(self, *words) -> list[str]:
        return [event for event in self.events if event.split()[0] in words]


def test_metrics_are_fetched_one_call_late_and_waits_for_segments_are_timed(monkeypatch):
    story, now = Story(), iter(range(0, 1000, 3))
    monkeypatch.setattr("txl_jax.runs.trainer.time.monotonic", lambda: next(now))
    assert story.run(6, per_call=2) == (6, 6)
    order = "segments 0, call 0, segments 2, call 2, segments 4, metrics 0, call 4, metrics 2, metrics 4"
    assert ", ".join(story.events) == order
    assert story.waits == [3, 3, 3, 3]  # The last asks for nothing.


def test_hooks_run_in_order_at_multiples_and_at_the_end_after_all_metrics():
    story = Story()
    assert story.run(10, story.hook("eval", 4), story.hook("save", 6), per_call=2) == (10, 10)
    assert story.only("eval", "save") == ["eval 4", "save 6", "eval 8", "eval 10", "save 10"]
    for step in (4, 6, 8, 10):
        at = next(i for i, event in enumerate(story.events) if event in (f"eval {step}", f"save {step}"))
        reported = [event for event in story.events[:at] if event.startswith("metrics")]
        assert reported == [f"metrics {first}" for first in range(0, step, 2)]
    assert len(story.only("exclude")) == 5  # Each hook's time is left out of tokens/s.


def test_a_bad_number_stops_the_run_before_a_hook_sees_its_state():
    story = Story(bad_call=3)
    with pytest.raises(NonFiniteError, match="call 3"):
        story.run(8, story.hook("save", 2))
    assert story.only("save") == ["save 2"]
    with pytest.raises(NonFiniteError):  # Also in the last call, and without hooks.
        Story(bad_call=3).run(4)
