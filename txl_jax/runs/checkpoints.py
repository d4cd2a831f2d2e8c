"""The checkpoints of a run (`runs.run`), both the latest and the best.

The latest checkpoint contains everything. The best checkpoints contain each member's best
parameters.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Self

from txl_jax.runs.run import Run
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.training.member_axis import Members
from txl_jax.training.step import TrainState


class RunCheckpoints(contextlib.ExitStack):
    """A context manager, the same in every process, that saves and restores.

    Raises if another run writes too.
    """

    def __init__(self, run: Run, members: Members, *, keep: int, log: Callable[[str], None]):
        super().__init__()
        self.saved_step: int | None = None  # The last step that was saved or restored.
        self._confirm = run.confirm
        self._latest = Checkpointer(run.latest, keep=keep, log=log)
        # Of each member's best parameters; `save_best` writes them.
        self.best = [
            Checkpointer(Run(run.path, name).best, keep=1, log=log) for name in members.labels
        ]

    def __enter__(self) -> Self:
        for checkpointer in [self._latest, *self.best]:
            # A run that was killed after its last save will save no more, and so would never sweep.
            self.enter_context(checkpointer).sweep()
        return self

    def restore(self, abstract_state: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
        """Restores the latest valid step, like `Checkpointer.restore`.

        Returns (updates done, state, notes), or None.
        """
        restored = self._latest.restore(abstract_state)
        self.saved_step = None if restored is None else restored[0]
        return restored

    def save(self, step: int, state: TrainState, notes: dict[str, Any]) -> None:
        """Starts writing a step, once the best parameters of its evaluation are on disk."""
        # Else a kill could leave a checkpoint whose evaluation's best is lost.
        self.wait_for_best()
        distributed.run_on_all(self._confirm)
        self._latest.save(step, state, notes)
        self.saved_step = step

    def save_best(self, index: int, step: int, params: Any, notes: dict[str, Any]) -> None:
        """Starts writing the best parameters of a member."""
        distributed.run_on_all(self._confirm)
        self.best[index].save(step, {"params": params}, notes)

    def wait(self) -> None:
        """Returns once everything is on disk."""
        distributed.run_on_all(self._latest.wait)
        self.wait_for_best()

    def wait_for_best(self) -> None:
        """Returns once the best parameters of all members are on disk."""
        for best in self.best:
            distributed.run_on_all(best.wait)
