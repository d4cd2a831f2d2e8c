"""The training loop: calls of the train step, with hooks for everything periodic."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from txl_jax.errors import UserError
from txl_jax.runtime.log import RunLog
from txl_jax.segments import Segments
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep, UpdateMetrics


@dataclasses.dataclass
class HookContext:
    """Context of a hook: the state it reads and the functions by which it reports.

    Attributes:
      step: updates done.
      state: the training state after them; with a leading member axis in an ensemble. The next update reuses its
        buffers, so copy what is needed later.
      run_log: the log of the run.
      stopping: whether this hook has requested a stop.
    """

    step: int
    state: TrainState
    run_log: RunLog
    stopping: bool = False

    def log(self, line: str) -> None:
        """Prints a line and adds it to log.txt."""
        self.run_log.print(line)

    def record(self, kind: str, values: dict[str, float], *, member: str | None = None) -> None:
        """Adds a record of this step to metrics.jsonl; `member` names the member of an ensemble that it is about."""
        self.run_log.record(kind, self.step, values, member=member)

    def text(self, tag: str, text: str) -> None:
        """Passes a text of this step, such as a sample, on to the sinks: TensorBoard shows it under TEXT."""
        self.run_log.text(self.step, tag, text)

    def request_stop(self) -> None:
        """Ends training at this step, after the other hooks; everything is saved."""
        self.stopping = True


@dataclasses.dataclass(frozen=True)
class Hook:
    """An action that is due after every `every` updates, and after the last one.

    It may return a new state to go on with; None keeps the state. After a kill a hook may run again for steps that it
    has already seen.
    """

    every: int
    action: Callable[[HookContext], TrainState | None]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"a hook's interval is {self.every}; it must be at least 1 update")

    def check_interval(self, segments_per_call: int) -> None:
        """Raises `UserError` if the interval is no multiple of the updates of a call, after which hooks are run."""
        if self.every % segments_per_call:
            raise UserError(
                f"a hook's interval is {self.every}, no multiple of train.segments_per_call, {segments_per_call}; "
                "hooks are run between calls"
            )


class Meter(Protocol):
    """Takes the metrics of updates; `Progress` is one."""

    def update(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Takes the metrics [S], on the host, of the updates after the first `first_step`; raises `NonFiniteError`."""

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the next tokens/s."""

    def waited(self, seconds: float) -> None:
        """Takes time that the loop has waited for segments."""


def train(
    state: TrainState,
    train_step: TrainStep,
    segments: Callable[[int], Segments],
    *,
    first_step: int,
    steps: int,
    segments_per_call: int,
    progress: Meter,
    hooks: Sequence[Hook],
    log: RunLog,
    stop_requested: Callable[[], Any],
) -> tuple[int, TrainState]:
    """Updates the state from `first_step` to `steps`, or until a stop is requested.

    Args:
      train_step: S updates; the state is donated.
      segments: from the number of updates done to the next S segments, on the devices.
      hooks: run in this order where due. Every loss up to there was finite before any of them runs, so a
        checkpoint never holds the result of a nan.
      log: passed on to the hooks.

    Returns:
      The number of updates done, and the state after them.
    """

    def segments_at(step: int) -> Any:
        began = time.monotonic()
        found = segments(step) if step < steps else None
        progress.waited(time.monotonic() - began)
        return found

    step, stopping = first_step, False
    pending: tuple[int, UpdateMetrics] | None = None
    upcoming = segments_at(step)
    while step < steps:
        state, metrics = train_step(state, upcoming)
        # While the device works: the next segments, and the metrics of the call before.
        upcoming = segments_at(step + segments_per_call)
        if pending is not None:
            progress.update(*_to_host(*pending))
        pending = step, metrics
        step += segments_per_call
        due = [hook for hook in hooks if step % hook.every == 0 or step == steps]
        if due:
            progress.update(*_to_host(*pending))
            pending = None
            state, stopping = run_hooks(due, step, state, log=log, progress=progress)
        if stop_requested() or stopping:  # Asked after the hooks: one that was cut short must be repeated at this step.
            break
    if pending is not None:
        progress.update(*_to_host(*pending))
    return step, state


def run_hooks(
    hooks: Sequence[Hook], step: int, state: TrainState, *, log: RunLog, progress: Meter
) -> tuple[TrainState, bool]:
    """Runs hooks one after the other; returns the state to go on with, and whether one has requested a stop."""
    stopping = False
    for hook in hooks:
        began = time.monotonic()
        context = HookContext(step, state, log)
        changed = hook.action(context)
        progress.exclude(time.monotonic() - began)
        state = state if changed is None else changed
        stopping = stopping or context.stopping
    return state, stopping


def _to_host(step: int, metrics: Any) -> tuple[int, Any]:
    return step, jax.device_get(metrics)
