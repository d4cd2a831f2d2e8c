"""The training loop: a page. Everything periodic is a hook."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from txl_jax.segments import Segments
from txl_jax.training.progress import Progress
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Hook:
    """An action that is due after every `every` updates, and after the last one.

    It may return a state to go on with; None: as it was.
    """

    every: int
    action: Callable[[int, TrainState], TrainState | None]


def train(
    state: TrainState,
    train_step: TrainStep,
    segments: Callable[[int], Segments],
    *,
    first_step: int,
    steps: int,
    segments_per_call: int,
    progress: Progress,
    hooks: list[Hook],
    stop_requested: Callable[[], Any],
) -> tuple[int, TrainState]:
    """Updates the state from `first_step` to `steps`, or until a stop is requested.

    Args:
      train_step: S updates; the state is donated.
      segments: from the number of updates done to the next S segments, on the devices.
      hooks: run in this order where due. Every loss up to there was finite before any of them runs, so a
        checkpoint never holds the result of a nan.

    Returns:
      The number of updates done, and the state after them.
    """
    step, pending = first_step, None
    upcoming = segments(step) if step < steps else None
    while step < steps:
        state, metrics = train_step(state, upcoming)
        # While the device works: the next segments, and the metrics of the call before.
        upcoming = segments(step + segments_per_call) if step + segments_per_call < steps else None
        if pending is not None:
            progress.update(*_on_host(*pending))
        pending = step, metrics
        step += segments_per_call
        due = [hook for hook in hooks if step % hook.every == 0 or step == steps]
        if due:
            progress.update(*_on_host(*pending))
            pending = None
        for hook in due:
            state = _run(hook, step, state, progress)
        if stop_requested():  # Asked after the hooks: one that was cut short must be repeated at this very step.
            break
    if pending is not None:
        progress.update(*_on_host(*pending))
    return step, state


def _run(hook: Hook, step: int, state: TrainState, progress: Progress) -> TrainState:
    began = time.monotonic()
    changed = hook.action(step, state)
    progress.exclude(time.monotonic() - began)
    return state if changed is None else changed


def _on_host(step: int, metrics: Any) -> tuple[int, Any]:
    return step, jax.device_get(metrics)
