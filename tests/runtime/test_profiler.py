"""Tests profiles of a few steps: which steps are profiled, the names in the trace, and that a run
continues after a failure.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from support import tiny_run
from txl_jax.errors import UserError
from txl_jax.runtime import profiler
from txl_jax.runtime.profiler import StepProfiler, check_steps
from txl_jax.runtime.storage import files_below
from txl_jax.training.step import make_train_step


@jax.jit
def add_one(state, segments):
    with jax.named_scope("optimizer"):
        return state + 1, jnp.sin(segments)


def profiled(folder, window, *, first_step=0, per_call=5, calls=4):
    """Makes calls, and profiles those that contain an update of a window (first and last update).

    Returns the logged lines and the excluded seconds.
    """
    lines = []
    seconds = []
    state = jnp.zeros(())
    with StepProfiler(
        add_one,
        str(folder),
        done=first_step,
        segments_per_call=per_call,
        profile_steps=window,
        log=lines.append,
        exclude=seconds.append,
    ) as step:
        for _ in range(calls):
            state, _ = step(state, jnp.ones(3))
    assert state == calls
    return lines, seconds


def traces(folder):
    return sorted(folder.rglob("*.xplane.pb"))


def step_markers(path):
    """The numbers of the profiled steps in a trace."""
    data = jax.profiler.ProfileData.from_file(str(path))
    steps = set()
    with warnings.catch_warnings():
        # jaxlib 0.7.2 warns of its own types in Python 3.13, and ends the process if that is an
        # error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name == "train":
                        steps.add(dict(event.stats)["step_num"])
    return sorted(steps)


def test_the_calls_that_hold_the_updates_are_profiled(tmp_path):
    lines, seconds = profiled(tmp_path, (7, 11))
    [path] = traces(tmp_path)
    place_of_tensorboard = tmp_path / "plugins" / "profile"
    assert path.parent.parent == place_of_tensorboard
    assert step_markers(path) == [6, 11]  # Calls of 5: updates 6 to 10 and 11 to 15.
    assert b"/optimizer/" in path.read_bytes()
    assert lines == [f"profile of steps 6 to 15 written to {tmp_path}"]
    # The trace was started and written.
    assert len(seconds) == 2
    assert min(seconds) > 0


@pytest.mark.full
def test_a_run_that_ends_early_is_profiled_up_to_its_end(tmp_path):
    lines, _ = profiled(tmp_path, (7, 20), calls=2)
    assert step_markers(*traces(tmp_path)) == [6]
    assert "6 to 10" in lines[0]


@pytest.mark.full
def test_a_resumed_run_is_profiled_for_the_rest_of_the_window(tmp_path):
    # The next call makes the updates 11 to 15.
    profiled(tmp_path / "within", (3, 12), first_step=10, calls=2)
    assert step_markers(*traces(tmp_path / "within")) == [11]

    lines, _ = profiled(tmp_path / "after", (3, 10), first_step=10)
    assert traces(tmp_path / "after") == []
    assert len(lines) == 1, "it says that there is no profile"


@pytest.mark.full
def test_a_run_in_a_bucket_has_its_profile_there(bucket):
    profiled(bucket, (7, 11))
    names = files_below(bucket / "plugins" / "profile")
    assert any(name.endswith(".xplane.pb") for name in names), names


@pytest.mark.parametrize(
    ("steps", "shown"),
    [((0, 3), "0,3"), ((5, 4), "5,4"), ((5, 101), "5,101"), ((5,), "5"), ((1, 2, 3), "1,2,3")],
    ids=["before", "backwards", "after", "one step", "three steps"],
)
def test_steps_outside_the_run_are_refused(steps, shown):
    with pytest.raises(UserError, match=rf" 1 to 100, got {shown}$"):
        check_steps(steps, steps=100)


def test_all_steps_of_a_run_may_be_profiled():
    check_steps((1, 100), steps=100)


@pytest.mark.parametrize("fails", ["start_trace", "stop_trace"])
def test_a_trace_that_cannot_be_written_ends_nothing(fails, tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def fail(*arguments, **options):
        if fails == "stop_trace":
            stop()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler.jax.profiler, fails, fail)
    lines, _ = profiled(tmp_path, (7, 11))
    [line] = lines
    assert "No space left" in line
    assert "continues" in line


@pytest.mark.full
def test_the_train_step_names_its_parts():
    made = tiny_run.parts()
    step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
    segments = made.abstract_segments(made.config.train)
    text = made.jit(step).lower(made.abstract_state, segments).as_text(debug_info=True)
    for scope in ("attention", "feed_forward", "softmax", "memory", "optimizer"):
        assert re.search(rf"/{scope}[/.]", text), scope
