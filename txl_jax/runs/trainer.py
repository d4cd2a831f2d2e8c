"""The trainer owns state, log and checkpoints of a run or of an ensemble; everything periodic is a hook."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from txl_jax.config import tree as config_tree
from txl_jax.data.prefetch import Prefetcher
from txl_jax.errors import NonFiniteError
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.validation import Results, TrainTask, Validation
from txl_jax.runtime import distributed, environment, stop
from txl_jax.runtime.log import RunLog
from txl_jax.runtime.profiler import PROFILE, StepProfiler
from txl_jax.runtime.sinks import Sink
from txl_jax.training.loop import Hook, HookContext, run_hooks, train
from txl_jax.training.progress import Progress
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of training.

    Attributes:
      finished: False: stopped on request, everything saved.
      step: updates done.
      results: the contents of results.json.
    """

    finished: bool
    step: int
    results: dict[str, Any] | None


class Trainer:
    """One start of a run in its workdir.

    Args:
      hooks: run after evaluation and before the checkpoint of a step, so a state that they return is saved.
      sinks: get settings and records too.
      profile_steps: first and last update of a profile; None: none.
      confirm: called before something is written; raises if another run writes here.
    """

    def __init__(
        self,
        task: TrainTask,
        workdir: str,
        *,
        stop_requested: Callable[[], Any],
        hooks: Sequence[Hook] = (),
        sinks: Sequence[Sink] = (),
        profile_steps: tuple[int, int] | None = None,
        confirm: Callable[[], None] = lambda: None,
    ):
        self._task = task
        self._config = task.config.train
        self._workdir = workdir
        self._stop_requested = stop_requested
        self._user_hooks = tuple(hooks)
        self._profile_steps = profile_steps
        self._log = RunLog(workdir if distributed.is_primary() else None, sinks=sinks, confirm=confirm)
        self._checkpoints = RunCheckpoints(
            workdir, task.members, keep=self._config.keep_checkpoints, log=self._log.note, confirm=confirm
        )
        self._validation = Validation(task, workdir, self._checkpoints, self._log.note)
        self._results = Results(task, workdir, self._checkpoints, self._validation, self._log.note)

    def run(self, changes: Sequence[str] = ()) -> Outcome:
        """Trains to the end, or until a stop is requested; `changes` are settings that differ from the start before."""
        for change in changes:
            self._log.note(change)
        with self._checkpoints:
            step, state, notes = self._restore()
            with self._open_log(step):
                self._introduce(step)
                self._validation.read_losses()
                if results := self._finished_already(step):
                    return Outcome(True, step, results)
                train_step, compilation = self._task.compile_step()
                self._log.print(compilation)
                progress = self._make_progress(notes)
                if not self._has_ended(step):
                    step, state = self._train(train_step, step, state, progress)
                return self._finish(step, state, progress)

    # Opening

    def _restore(self) -> tuple[int, TrainState, dict[str, Any]]:
        """Restores the newest checkpoint: (updates done, state after them, notes); without one the initial state."""
        step, state, notes = self._checkpoints.restore(self._task.abstract_state) or (0, self._task.init_state(), {})
        self._validation.pending = notes.get("evaluation_pending", False)
        return step, state, notes

    def _open_log(self, step: int) -> RunLog:
        """Opens the log, which drops its records of updates after `step`."""
        # What was recorded and then lost its consequences to a kill is done, and recorded, again.
        redone = {"valid"} if self._validation.pending else set()
        if self._results.on_disk(step) is None:
            redone.add("test")
        return self._log.open(step, redone=redone, opening=self._task.opening)

    def _introduce(self, step: int) -> None:
        self._log.settings(config_tree.to_dict(self._task.config) | dict(self._task.facts) | environment.describe())
        if step:
            epoch, index = divmod(step, self._task.segments_per_epoch)
            self._log.print(f"resuming  after step {step}, epoch {epoch + 1}, segment {index} of its text")

    # Training

    def _make_progress(self, notes: dict[str, Any]) -> Progress:
        config = self._config
        return Progress(
            self._log,
            steps=config.steps,
            log_every=config.log_every,
            cost=self._task.cost,
            measure=self._task.measure,
            members=self._task.members,
            running_totals=notes.get("running_totals"),
        )

    def _train(self, train_step: TrainStep, step: int, state: TrainState, progress: Progress) -> tuple[int, TrainState]:
        config, validation = self._config, self._validation
        evaluation = [
            Hook(config.eval_every, validation.evaluate),
            Hook(config.eval_every, validation.begin_averaging),
            Hook(config.eval_every, validation.stop_early),
        ]
        # The caller's hooks may load the best parameters.
        best_is_saved = Hook(config.eval_every, lambda context: self._checkpoints.wait_for_best())
        # Saving is last: a checkpoint of a step implies that its evaluation is on disk.
        save = Hook(config.checkpoint_every, lambda context: self._save(context.step, context.state, progress))
        hooks = [*evaluation, best_is_saved, *self._user_hooks, save]
        if stop.is_watched_by_all():
            hooks.append(Hook(config.log_every, lambda context: self._save_on_notice(context, progress)))
        if validation.pending:
            state = self._repeat_evaluation(evaluation, save, step, state, progress)
            if self._must_end():
                return step, state
        per_call = config.segments_per_call
        profiled = StepProfiler(
            train_step,
            os.path.join(self._workdir, PROFILE),
            first_step=step,
            segments_per_call=per_call,
            profile_steps=self._profile_steps,
            log=self._log.note,
            exclude=progress.exclude,
        )
        try:
            with profiled, Prefetcher(self._task.segments, segments_per_call=per_call, steps=config.steps) as segments:
                return train(
                    state,
                    profiled,
                    segments,
                    first_step=step,
                    steps=config.steps,
                    segments_per_call=per_call,
                    progress=progress,
                    hooks=hooks,
                    log=self._log,
                    stop_requested=self._stop_requested,
                )
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {self._kept()}. {self._advice()}") from None

    def _repeat_evaluation(
        self, evaluation: list[Hook], save: Hook, step: int, state: TrainState, progress: Progress
    ) -> TrainState:
        """Repeats an evaluation that a stop cut short; returns the state to go on with."""
        state, _ = run_hooks(evaluation, step, state, log=self._log, progress=progress)
        if not self._validation.pending:
            # Else a kill before the next checkpoint would evaluate, and record, again.
            run_hooks([save], step, state, log=self._log, progress=progress)
        return state

    def _must_end(self) -> bool:
        """Returns whether a repeated evaluation was cut short again, or has used up the patience."""
        return self._validation.pending or self._validation.out_of_patience

    def _save(self, step: int, state: TrainState, progress: Progress) -> None:
        notes = {"running_totals": progress.state(), "evaluation_pending": self._validation.pending}
        self._log.seal()  # The records up to here are not made again by a run that resumes from this checkpoint.
        self._checkpoints.save(step, state, notes)

    def _save_on_notice(self, context: HookContext, progress: Progress) -> None:
        """Saves before maintenance of a machine, which may end it."""
        if stop.save_requested() and self._checkpoints.saved_step != context.step:
            self._save(context.step, context.state, progress)
            self._log.note(f"checkpoint of step {context.step}, since maintenance may end this machine")

    def _kept(self) -> str:
        """Describes the files that a run which fails now has written."""
        saved = self._checkpoints.saved_step
        return "no checkpoint was written" if saved is None else f"the checkpoint of step {saved} is kept"

    def _advice(self) -> str:
        if self._task.members.names:
            return (
                "Start again without that --ensemble_member, or with a lower learning rate for it, in a new --workdir; "
                "or split off the other members (--mode=split)"
            )
        return "Try a lower --optimizer.learning_rate or a longer --optimizer.warmup_steps, in a new --workdir"

    # The end

    def _finished_already(self, step: int) -> dict[str, Any] | None:
        """Returns the results of a run that had ended when it was opened; None: there is something to do."""
        if not self._has_ended(step):
            return None
        results = distributed.broadcast_from_primary(lambda: self._results.on_disk(step))
        if results:
            self._log.print(f"finished  already: {self._results.path}")
        return results

    def _has_ended(self, step: int) -> bool:
        ended = step >= self._config.steps or self._validation.out_of_patience
        return ended and not self._validation.pending

    def _finish(self, step: int, state: TrainState, progress: Progress) -> Outcome:
        """Saves the last checkpoint and, after the last update, scores the test text."""
        early = step < self._config.steps and self._validation.out_of_patience
        if early:
            self._log.print(f"note      ends after step {step}: no better loss in {self._config.patience} evaluations")
        finished = (early or step >= self._config.steps) and not self._validation.pending
        if self._checkpoints.saved_step != step:
            self._save(step, state, progress)
        self._checkpoints.wait()
        results = self._results.make(step, state, self._log) if finished else None
        if results is not None:
            return Outcome(True, step, results)
        self._log.print(
            f"stopped   on request after step {step}; everything is saved, the same command goes on from here"
        )
        return Outcome(False, step, None)
