"""Validation while a run trains: scores, best parameters, the trigger of weight averaging, early stopping."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.config import EvalConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import CheckpointError
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime import distributed
from txl_jax.runtime.metrics_log import read_metrics
from txl_jax.training import weight_averaging
from txl_jax.training.loop import HookContext
from txl_jax.training.run_checkpoints import RunCheckpoints
from txl_jax.training.scores import as_record, as_result, format_scores, with_duration
from txl_jax.training.state import TrainState
from txl_jax.training.task import TrainTask


class Validation:
    """Hooks that score the validation text, keep the best parameters, and act on the losses so far.

    Attributes:
      pending: whether the evaluation of the newest step was cut short; a resumed run repeats it.
      losses: validation losses of each member so far; kept for early stopping and NT-ASGD.
    """

    def __init__(self, task: TrainTask, workdir: Path, checkpoints: RunCheckpoints, note: Callable[[str], None]):
        self.pending = False
        self.losses: list[list[float]] = [[] for _ in task.members.labels]
        self._task = task
        self._workdir = workdir
        self._checkpoints = checkpoints
        self._note = note

    @property
    def out_of_patience(self) -> bool:
        """Returns whether the last `patience` validation losses were all no better than the best before them."""
        patience = self._task.config.train.patience
        if not patience:
            return False
        return all(
            len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience]) for losses in self.losses
        )

    @property
    def eval_settings(self) -> dict[str, Any]:
        """The evaluation lengths: scores at other ones are not comparable."""
        return config_tree.to_dict(self._task.config.eval)

    def read_losses(self) -> None:
        """Reads the losses of this run from its records; none if they were scored with other --eval settings."""
        for index, label in enumerate(self._task.members.labels):
            self.losses[index] = [] if self.best(index) is None else self._recorded_losses(label)

    def _recorded_losses(self, label: str | None) -> list[float]:
        return distributed.broadcast_from_primary(
            lambda: [
                record["loss"]
                for record in read_metrics(self._workdir)
                if record["kind"] == "valid" and record.get("member") == label
            ]
        )

    # Hooks, in this order.

    def evaluate(self, context: HookContext) -> None:
        """Scores the validation text, and keeps the parameters of a member if no earlier ones were better."""
        self.pending = True  # Until it is done: a checkpoint written now must record it.
        scored, members = [], self._task.members
        for index in range(len(members)):
            began = time.monotonic()
            params = members.take(context.state.scored_params, index)
            totals = self._task.score(
                params, "valid", f"step {context.step}: {members.prefix(index)}valid", context.log
            )
            if totals is None:  # A stop was requested: all members are scored again when the run is resumed.
                return
            scored.append((params, totals, time.monotonic() - began))
        self.pending = False
        for index, label in enumerate(members.labels):
            self._take(context, index, label, *scored[index])

    def _take(
        self, context: HookContext, index: int, label: str | None, params: Any, totals: Totals, seconds: float
    ) -> None:
        """Records the scores of a member, and saves its parameters if they are the best."""
        step, measure = context.step, self._task.measure
        best = self.best(index)
        # Those of this very step are written again: a kill may have come before they had their digests.
        better = best is None or totals.nll < best["loss"] or best["step"] == step
        context.record("valid", as_record(totals), member=label)
        outcome = _format_outcome(best, better, measure)
        prefix = self._task.members.prefix(index)
        context.log(
            f"step {step}: {prefix}{with_duration(f'valid {format_scores(totals, measure)}', seconds)}  {outcome}"
        )
        if better:
            notes = {"step": step, **as_result(totals), "eval": self.eval_settings}
            self._checkpoints.save_best(index, step, params, notes)
        self.losses[index].append(totals.nll)

    def begin_averaging(self, context: HookContext) -> TrainState | None:
        """NT-ASGD: starts weight averaging in members whose validation loss has stopped improving."""
        trigger = self._task.config.average.nt_asgd_patience
        average = context.state.average
        if not trigger or self.pending or average is None:
            return None
        for index, losses in enumerate(self.losses):
            if not weight_averaging.has_begun(average, index) and weight_averaging.is_due(losses, trigger):
                context.log(
                    f"note      {self._task.members.prefix(index)}weight averaging starts here: no better loss than "
                    f"{trigger} evaluations ago"
                )
                average = weight_averaging.begin(average, context.step, index)
        return dataclasses.replace(context.state, average=average)

    def stop_early(self, context: HookContext) -> None:
        """Early stopping: requests a stop when the patience is used up."""
        if self.out_of_patience:
            context.request_stop()

    def best(self, index: int) -> dict[str, Any] | None:
        """Returns step and scores of the best parameters so far; None if there are none that can be compared with."""
        return distributed.broadcast_from_primary(lambda: self._best_on_disk(index))

    def _best_on_disk(self, index: int) -> dict[str, Any] | None:
        try:
            notes = self._checkpoints.best_notes(index)
        except CheckpointError as error:
            self._note(f"{error}; the best is chosen anew from here")
            return None
        if notes is not None and with_defaults(notes["eval"]) != self.eval_settings:
            self._note(
                f"the best so far, of step {notes['step']}, was scored with other --eval settings; "
                "it is chosen anew from here"
            )
            return None
        return notes


def with_defaults(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Completes recorded evaluation settings: one that was added later had the effect of its default."""
    return config_tree.to_dict(EvalConfig()) | evaluation


def _format_outcome(best: dict[str, Any] | None, better: bool, measure: Measure) -> str:
    if better or best is None:
        return "best so far"
    return f"best {Totals(best['loss'], 1).format(measure)} at step {best['step']}"
