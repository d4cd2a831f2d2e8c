"""Validation while a run trains: scores, best parameters, the trigger of weight averaging, early stopping."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from txl_jax.config import EvalConfig, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import CheckpointError
from txl_jax.metrics import Measure, Totals
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.environment import duration
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.storage import read, write_json
from txl_jax.segments import Segments
from txl_jax.training import weight_averaging
from txl_jax.training.loop import HookContext
from txl_jax.training.members import Members
from txl_jax.training.progress import StepCost
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep

# Scores of a text as records and as lines for people.


def as_record(totals: Totals) -> dict[str, float]:
    """Returns the fields of a result in metrics.jsonl and results.json."""
    return {
        "loss": totals.nll,
        "bpc": totals.bpc,
        "perplexity": totals.perplexity,
        "tokens": totals.tokens,
    }


def as_result(totals: Totals) -> dict[str, Any]:
    """Returns `as_record` for a JSON file: a perplexity above the largest float, of a run that diverged, is null.

    >>> as_result(Totals(nats=2000.0, tokens=2.0))["perplexity"] is None
    True
    """
    record = as_record(totals)
    if math.isfinite(record["perplexity"]):
        return dict(record)
    return {**record, "perplexity": None, "note": "the loss is too large for a perplexity: exp(loss) overflows"}


def format_scores(totals: Totals, measure: Measure) -> str:
    """Formats one line of a result, the usual measure first."""
    perplexity = f"  {totals.format(Measure.PPL)}" if measure is Measure.BPC else ""
    return f"{totals.format(measure)}  loss {totals.nll:.4f}{perplexity}  ({totals.tokens:,.0f} tokens)"


def with_duration(line: str, seconds: float) -> str:
    """Appends the time that something took."""
    return f"{line}  in {duration(seconds)}"


# results.json: the scores of the best parameters on the test text, of a run or of each member of an ensemble.

RESULTS = "results.json"


class Score(Protocol):
    """Scores a text with given parameters."""

    def __call__(self, params: Any, split: str, name: str, log: Callable[[str], None]) -> Totals | None:
        """Scores the "valid" or "test" text; `name` is for progress lines. None: a stop was requested meanwhile."""


@dataclasses.dataclass(frozen=True)
class TrainTask:
    """One run, or one ensemble, as a `Trainer` takes it.

    Attributes:
      config: of the run; of an ensemble the base that its members differ from.
      members: of the ensemble.
      measure: the usual measure of the text.
      facts: come first in results.json.
      opening: lines that introduce the run in its log.
      cost: of one update of one member.
      segments_per_epoch: S segments of one pass over the text.
      abstract_state: shapes, types and shardings of the state, with the member axis.
      abstract_params: those of the parameters of one member.
      init_state: makes the state before the first update.
      compile_step: returns the compiled train step and a line about it.
      segments: (updates done, S) -> the next S segments, on the devices.
      score: scores a text.
    """

    config: ExperimentConfig
    members: Members
    measure: Measure
    facts: Mapping[str, Any]
    opening: Sequence[str]
    cost: StepCost
    segments_per_epoch: int
    abstract_state: TrainState
    abstract_params: Any
    init_state: Callable[[], TrainState]
    compile_step: Callable[[], tuple[TrainStep, str]]
    segments: Callable[[int, int], Segments]
    score: Score


class Results:
    """Makes results.json, and reads what is there."""

    def __init__(
        self,
        task: TrainTask,
        workdir: str,
        checkpoints: RunCheckpoints,
        validation: "Validation",
        note: Callable[[str], None],
    ):
        self.path = os.path.join(workdir, RESULTS)
        self._task = task
        self._checkpoints = checkpoints
        self._validation = validation
        self._note = note

    def on_disk(self, step: int) -> dict[str, Any] | None:
        """Reads results of `step` updates that were scored with these evaluation settings; None: there are none."""
        try:
            results = json.loads(read(self.path))
            same = results["steps"] == step and with_defaults(results["eval"]) == self._validation.eval_settings
        except (OSError, ValueError, KeyError, TypeError):  # There is none, or it is damaged: it is made again.
            return None
        return results if same else None

    def make(self, step: int, state: TrainState, log: RunLog) -> dict[str, Any] | None:
        """Scores the test text with the best parameters of each member; None: a stop was requested meanwhile."""
        members, scored = self._task.members, []
        for index in range(len(members)):
            best, params = self._best_or_last(index, state)
            began = time.monotonic()
            totals = self._task.score(params, "test", f"{members.prefix(index)}test", log.print)
            if totals is None:
                return None
            scored.append((best, totals, time.monotonic() - began))
        found = []
        for index, (best, totals, seconds) in enumerate(scored):
            label = members.labels[index]
            log.record("test", step, as_record(totals), member=label)
            line = with_duration(f"test {format_scores(totals, self._task.measure)}", seconds)
            log.print(f"{members.prefix(index)}{line}")
            found.append({"best_valid": best, "test": {"step": best["step"] if best else step, **as_result(totals)}})
        results = {
            **self._task.facts,
            "steps": step,
            **({"members": members.to_json(found)} if members.names else found[0]),
            "eval": self._validation.eval_settings,
            **environment.describe(),
        }

        def write() -> None:
            log.seal()
            write_json(self.path, results)

        distributed.broadcast_from_primary(write)
        log.print(f"results   {self.path}")
        return results

    def _best_or_last(self, index: int, state: TrainState) -> tuple[dict[str, Any] | None, Any]:
        """Returns scores and parameters of the best checkpoint; if it cannot be read, those of the last update."""
        try:
            restored = self._checkpoints.restore_best(index, self._task.abstract_params)
        except CheckpointError as error:
            self._note(f"{error}; the parameters after the last update are used instead")
            restored = None
        if restored is None:
            return None, self._task.members.take(state.scored_params, index)
        params, notes = restored
        return {name: value for name, value in notes.items() if name != "eval"}, params


class Validation:
    """Hooks that score the validation text, keep the best parameters, and act on the losses so far.

    Attributes:
      pending: whether the evaluation of the newest step was cut short; a resumed run repeats it.
      losses: validation losses of each member so far; kept for early stopping and NT-ASGD.
    """

    def __init__(self, task: TrainTask, workdir: str, checkpoints: RunCheckpoints, note: Callable[[str], None]):
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
