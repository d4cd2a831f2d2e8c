"""The trainer owns state, log and checkpoints of a run or of an ensemble; everything periodic is a hook."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from txl_jax.config import settings as config_tree
from txl_jax.data.prefetch import Prefetcher
from txl_jax.errors import NonFiniteError
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.run import Run
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
      finished: Whether training has ended. Otherwise it was stopped on request, with everything saved.
      step: Number of training steps done.
      results: Content of results.json, or None if training was stopped.
    """

    finished: bool
    step: int
    results: dict[str, Any] | None


class Trainer:
    """One start of a run that was begun in its directory.

    Args:
      task: What is trained.
      run: The run, after `Run.begin`.
      stop_requested: Whether to stop; asked between calls of the train step and while a text is scored.
      hooks: Run after evaluation and before the checkpoint of a step, so a state that they return is saved.
      sinks: Get settings and records too.
      profile_steps: First and last training step of a profile, or None for no profile.
    """

    def __init__(
        self,
        task: TrainTask,
        run: Run,
        *,
        stop_requested: Callable[[], Any],
        hooks: Sequence[Hook],
        sinks: Sequence[Sink],
        profile_steps: tuple[int, int] | None,
    ):
        self._task = task
        self._config = task.components.config.train
        self._run = run
        self._stop_requested = run.stopping(stop_requested)
        self._user_hooks = tuple(hooks)
        self._profile_steps = profile_steps
        self._log = RunLog(run.path if distributed.is_primary() else None, sinks=sinks, confirm=run.confirm)
        self._checkpoints = RunCheckpoints(
            run.path, task.members, keep=self._config.keep_checkpoints, log=self._log.note, confirm=run.confirm
        )
        self._validation = Validation(task, run, self._checkpoints, self._log, self._stop_requested)
        self._results = Results(task, run, self._checkpoints, self._validation, self._log)

    def run(self) -> Outcome:
        """Trains to the end, or until a stop is requested."""
        for note in self._run.notes:
            self._log.note(note)
        with self._checkpoints:
            step, state, notes = self._restore()
            with self._open_log(step):
                self._log.settings(
                    config_tree.to_dict(self._task.components.config) | self._results.facts | environment.describe()
                )
                if step:
                    epoch, index = divmod(step, self._task.segments_per_epoch)
                    self._log.print(f"resuming  after step {step}, epoch {epoch + 1}, segment {index} of its text")
                self._validation.read_losses()
                if results := self._finished_already(step):
                    return Outcome(True, step, results)
                train_step, compilation = self._task.compile_step()
                self._log.print(compilation)
                progress = Progress(
                    self._log,
                    steps=self._config.steps,
                    log_every=self._config.log_every,
                    cost=self._task.cost,
                    measure=self._task.corpus.vocabulary.measure,
                    members=self._task.members,
                    running_totals=notes.get("running_totals"),
                )
                if not self._has_ended(step):
                    step, state = self._train(train_step, step, state, progress)
                return self._finish(step, state, progress)

    def _restore(self) -> tuple[int, TrainState, dict[str, Any]]:
        """Restores the latest checkpoint, or makes the initial state: (updates done, state after them, notes)."""
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
        if validation.pending:  # A stop cut the last evaluation short: it is repeated.
            state, _ = run_hooks(evaluation, step, state, log=self._log, progress=progress)
            if not self._validation.pending:
                # Else a kill before the next checkpoint would evaluate, and record, again.
                run_hooks([save], step, state, log=self._log, progress=progress)
            if self._validation.pending or validation.out_of_patience:
                return step, state
        per_call = config.segments_per_call
        profiled = StepProfiler(
            train_step,
            os.path.join(self._run.path, PROFILE),
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

    def _finished_already(self, step: int) -> dict[str, Any] | None:
        """Returns the results of a run that had ended when it was opened, or None if there is something to do."""
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
        """Saves the last checkpoint and, after the last update, scores the test split."""
        early = step < self._config.steps and self._validation.out_of_patience
        if early:
            self._log.print(f"note      ends after step {step}: no better loss in {self._config.patience} evaluations")
        finished = (early or step >= self._config.steps) and not self._validation.pending
        if self._checkpoints.saved_step != step:
            self._save(step, state, progress)
        self._checkpoints.wait()
        results = self._results.make(step, state) if finished else None
        if results is not None:
            return Outcome(True, step, results)
        self._log.print(
            f"stopped   on request after step {step}; everything is saved, the same command goes on from here"
        )
        return Outcome(False, step, None)
