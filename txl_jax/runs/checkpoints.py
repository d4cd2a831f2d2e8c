"""The checkpoints of a run (`runs.run`): the latest ones and the best ones.

The latest checkpoints contain everything. The best checkpoints contain each member's best
parameters, and are written by `runs.validation`. Both follow one rule: a checkpoint relies on the
best parameters of its evaluation, so these are on disk before it is written.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

from txl_jax.runs.run import Run
from txl_jax.runtime import distributed
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.training.member_axis import Members
from txl_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class TrainNotes:
    """Notes of a checkpoint in addition to the training state, as JSON with these keys."""

    # Sums since the last logged line, for `Progress`. An ensemble has one entry for each member.
    # None means that nothing was summed yet.
    running_totals: Any = None
    # Whether the evaluation of this step is pending, because a stop interrupted it.
    evaluation_pending: bool = False
    # `train.steps` of the run when it saved. None in checkpoints of earlier versions, and before
    # the first save.
    steps: int | None = None
    # Changes of `train.steps` between starts, each with "step", "name", "old" and "new".
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "TrainNotes":
        """Returns the notes of a checkpoint. Keys that this version does not know are dropped."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_json(self) -> dict[str, Any]:
        """Returns the values by key."""
        return dataclasses.asdict(self)


class RunCheckpoints(contextlib.ExitStack):
    """A context manager, the same in every process, that saves and restores.

    Saving raises if the run has lost its directory to another run.
    """

    def __init__(self, run: Run, members: Members, *, keep: int, log: Callable[[str], None]):
        super().__init__()
        # The last step whose saving began, or that was restored, or None.
        self.saved_step: int | None = None
        # Raises if the lock of the run's directory now belongs to another run.
        self._confirm = run.confirm
        self._latest = Checkpointer(run.latest, keep=keep, log=log)
        # The best parameters of each member, in the order of the member axis.
        self.best: list[Checkpointer] = []
        for name in members.labels:
            # This `Run` only knows the path of the member's best parameters. It reads nothing.
            self.best.append(Checkpointer(Run(run.path, name).best, keep=1, log=log))

    def __enter__(self) -> Self:
        for checkpointer in [self._latest, *self.best]:
            self.enter_context(checkpointer)
            # Saving also sweeps, but a run that was killed after its last save does not save again.
            checkpointer.sweep()
        return self

    def restore(self, abstract_state: TrainState) -> tuple[int, TrainState, TrainNotes] | None:
        """Restores the latest valid step, like `Checkpointer.restore`.

        Returns (updates done, state, notes), or None.
        """
        restored = self._latest.restore(abstract_state)
        if restored is None:
            return None
        step, state, notes = restored
        self.saved_step = step
        return step, state, TrainNotes.of_json(notes)

    def save(self, step: int, state: TrainState, notes: TrainNotes) -> None:
        """Starts writing a step, once the best parameters of its evaluation are on disk."""
        # Otherwise a kill could leave a checkpoint without the best parameters of its evaluation.
        self.wait_for_best()
        distributed.run_on_all(self._confirm)
        self._latest.save(step, state, notes.to_json())
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
