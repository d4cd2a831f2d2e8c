"""Hooks, which run everything periodic in training."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from txl_jax.config.config_tree import require
from txl_jax.runtime.log import RunLog
from txl_jax.training.step import TrainState


@dataclasses.dataclass
class HookContext:
    """Context of a hook: the training state, and functions for reporting."""

    # Number of updates done.
    step: int
    # The state after them, with a leading member axis in an ensemble. The next update reuses its
    # buffers: copy them.
    state: TrainState
    # The log that `log`, `record` and `text` write to.
    run_log: RunLog
    # Whether this hook has requested a stop.
    stopping: bool = False

    def log(self, line: str) -> None:
        """Prints a line and adds it to log.txt."""
        self.run_log.print(line)

    def record(self, kind: str, values: dict[str, float], *, member: str | None = None) -> None:
        """Adds a record of this step to metrics.jsonl.

        `member` is the ensemble member's name, if any.
        """
        self.run_log.record(kind, self.step, values, member=member)

    def text(self, tag: str, text: str) -> None:
        """Passes a text of this step, such as a sample, on to the sinks.

        TensorBoard shows it under TEXT.
        """
        self.run_log.text(self.step, tag, text)

    def request_stop(self) -> None:
        """Ends training at this step, after the other hooks. A checkpoint is saved."""
        self.stopping = True


@dataclasses.dataclass(frozen=True)
class Hook:
    """An action that is due after every `every` updates, and after the last one.

    It may return a new state to continue with, or None to keep it. After a kill it may run again
    for earlier steps.
    """

    # Interval in updates, at least 1.
    every: int
    # Reads and reports through its context. Returns a new state or None.
    action: Callable[[HookContext], TrainState | None]

    def __post_init__(self) -> None:
        require(self.every >= 1, f"a hook's interval must be at least 1 step, got {self.every}")


def check_hooks(hooks: Any, segments_per_call: int) -> None:
    """Checks that hooks can run between calls of S updates.

    Args:
      hooks: The value that the caller passed as a list of hooks.
      segments_per_call: S. Each hook must be due after whole calls.

    Raises:
      UserError: If `hooks` is not a list of hooks, or an interval is not a multiple of S.
    """
    are_hooks = isinstance(hooks, Iterable) and all(isinstance(hook, Hook) for hook in hooks)
    require(
        are_hooks,
        f"hooks must be a list of txl_jax.Hook, got {hooks!r}. "
        "Write hooks=[txl_jax.Hook(100, function)]",
    )
    for hook in hooks:
        require(
            hook.every % segments_per_call == 0,
            "a hook's interval must be a multiple of train.segments_per_call "
            f"({segments_per_call}), got {hook.every}",
        )
