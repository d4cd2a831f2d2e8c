"""The trainer owns state, log and checkpoints of a run or an ensemble.

Everything periodic is a hook.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax import flops
from txl_jax.config import config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.prefetch import Prefetcher
from txl_jax.data.segments import SegmentReader
from txl_jax.errors import NonFiniteError
from txl_jax.recurrence import Segments
from txl_jax.runs import attention_choice
from txl_jax.runs.build import Built, Compilation
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.run import Run
from txl_jax.runs.validation import Validation
from txl_jax.runtime import distributed, environment, stop
from txl_jax.runtime.log import RunLog
from txl_jax.runtime.profiler import PROFILE, StepProfiler
from txl_jax.runtime.sinks import Sink
from txl_jax.training.hooks import Hook, HookContext
from txl_jax.training.optimizer import learning_rate
from txl_jax.training.progress import Progress
from txl_jax.training.step import TrainState, TrainStep, UpdateMetrics


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of training.

    Attributes:
      finished: Whether training has ended. Otherwise it was stopped on request, with everything
        saved.
      step: Number of training steps done.
      results: Content of results.json, or None if training was stopped.
    """

    finished: bool
    step: int
    results: dict[str, Any] | None


@dataclasses.dataclass(eq=False, repr=False)
class Trainer:
    """One start of a run that was begun in its directory. `train` is called once."""

    # What is trained: one run or, with a leading member axis, an ensemble.
    built: Built
    # After `Run.record_start`.
    run: Run
    corpus: Corpus
    # The training segments of each member.
    readers: Sequence[SegmentReader]
    _: dataclasses.KW_ONLY
    # Initial parameters -> the first state of a warm start.
    warm_state: Callable[[Any], TrainState] | None
    # Lines that introduce the run in its log.
    opening: Sequence[str]
    # Asked between calls of the train step and while a text is scored.
    stop_requested: Callable[[], Any]
    # Run after evaluation and before the checkpoint of a step, which has the state they return.
    hooks: Sequence[Hook]
    # Get settings and records too.
    sinks: Sequence[Sink]
    # First and last update of a profile, or None for no profile.
    profile_steps: tuple[int, int] | None
    # Writes the samples of `train.sample_every`.
    sampler: Callable[..., list[bytes]] | None
    # Whether to print details on one device too, where else only log.txt has them.
    verbose: bool

    def __post_init__(self) -> None:
        run = self.run
        self._config = self.built.config.train
        self._log = RunLog(
            run.path if distributed.is_primary() else None, sinks=self.sinks, confirm=run.confirm
        )
        self._checkpoints = RunCheckpoints(
            run, self.built.members, keep=self._config.keep_checkpoints, log=self._log.note
        )
        self._validation = Validation(
            self.built,
            self.corpus,
            run,
            self._checkpoints,
            self._log,
            self._is_stopping,
            self.sampler,
        )

    def _is_stopping(self) -> Any:
        self.run.check()
        return self.stop_requested()

    def train(self) -> Outcome:
        """Trains to the end, or until a stop is requested."""
        built, config, log, validation = self.built, self._config, self._log, self._validation
        for note in self.run.notes:
            log.note(note)
        with self._checkpoints:
            restored = self._checkpoints.restore(built.members.abstract(built.abstract_state))
            step, state, saved = restored or (0, built.init_state(self.warm_state), {})
            validation.pending = saved.get("evaluation_pending", False)
            validation.changes = self._changes(step, saved)
            # What was recorded and then lost its consequences to a kill is done, and recorded,
            # again.
            redone = {"valid"} if validation.pending else set()
            if validation.results_after(step) is None:
                redone.add("test")
            with log.open(step, redone=redone, header=environment.origin(), opening=self.opening):
                log.settings(
                    config_tree.to_dict(built.config) | validation.facts | environment.describe()
                )
                validation.read_losses()
                if self._has_ended(step):  # A first start skips this.
                    results = distributed.broadcast_from_primary(
                        lambda: validation.results_after(step)
                    )
                    if results:
                        why = (
                            ""
                            if step >= config.steps
                            else ". To continue, raise --train.patience or set it to none."
                        )
                        log.print(f"finished  already: {validation.results_path}{why}")
                        return Outcome(True, step, results)
                if step:
                    epoch, index = divmod(step, self.readers[0].n_segments)
                    log.print(f"resuming  from step {step} (epoch {epoch + 1}, segment {index})")
                # Traces `make_train_step` (training/step.py) with its `jax.grad`.
                compilation = built.compile_step()
                _report_build(
                    built, compilation, log, show_details=self.verbose or built.mesh.size > 1
                )
                self._progress = Progress(
                    log,
                    steps=config.steps,
                    log_every=config.log_every,
                    cost=flops.of_step(
                        built.config, vocab_size=built.model.vocab_size, n_device=built.mesh.size
                    ),
                    measure=self.corpus.vocabulary.measure,
                    members=built.members,
                    running_totals=saved.get("running_totals"),
                )
                if not self._has_ended(step):
                    step, state = self._loop(compilation.program, step, state)
                if step < config.steps and validation.out_of_patience:
                    log.note(
                        f"training ends at step {step}: no better loss "
                        f"in {config.patience} evaluations"
                    )
                if self._checkpoints.saved_step != step:
                    self._save(HookContext(step, state, log))
                self._checkpoints.wait()
                results = validation.make_results(step, state) if self._has_ended(step) else None
                if results is None:
                    log.print(
                        f"stopped   at step {step}, checkpoint saved. "
                        "Rerun the same command to resume."
                    )
                return Outcome(results is not None, step, results)

    def _changes(self, step: int, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the changes of `train.steps` so far.

        They are the checkpoint's changes, and the change made by this start, if any.
        """
        changes, config, new = saved.get("changes", []), self.built.config, self._config.steps
        old = saved.get("steps", new)
        if old == new:
            return changes
        before = config_tree.replace(config, {"train.steps": old})
        was, rate = (
            f"{float(learning_rate(each, peak=1.0)(step)):.1%}" for each in (before, config)
        )
        if was != rate:
            why = f"the schedule ends with train.steps, now {new:,} instead of {old:,}"
            self._log.note(
                f"from step {step:,} the learning rate is {rate} of its peak, not {was}: {why}"
            )
        return [*changes, {"step": step, "name": "train.steps", "old": old, "new": new}]

    def _has_ended(self, step: int) -> bool:
        ended = step >= self._config.steps or self._validation.out_of_patience
        return ended and not self._validation.pending

    def _loop(self, train_step: TrainStep, step: int, state: TrainState) -> tuple[int, TrainState]:
        """Updates the state, with everything periodic as hooks.

        Returns (updates done, state after them).
        """
        config, validation, progress = self._config, self._validation, self._progress
        evaluation = validation.hooks()
        # Saving is last: a checkpoint of a step implies that its evaluation is on disk.
        save = Hook(config.checkpoint_every, self._save)
        # The caller's hooks may load the best parameters.
        wait = (
            [Hook(config.eval_every, lambda context: self._checkpoints.wait_for_best())]
            if self.hooks
            else []
        )
        hooks = [*evaluation, *wait, *self.hooks, save]
        if stop.is_watched_by_all():
            hooks.append(Hook(config.log_every, self._save_on_notice))
        # A stop cut the last evaluation short: it is repeated. A first start skips this.
        if validation.pending:
            state, _ = run_hooks(evaluation, step, state, progress)
            if not self._validation.pending:
                # Else a kill before the next checkpoint would evaluate, and record, again.
                run_hooks([save], step, state, progress)
            if self._validation.pending or validation.out_of_patience:
                return step, state
        per_call = config.segments_per_call
        with contextlib.ExitStack() as stack:
            if self.profile_steps is not None:
                train_step = stack.enter_context(
                    StepProfiler(
                        train_step,
                        os.path.join(self.run.path, PROFILE),
                        done=step,
                        segments_per_call=per_call,
                        profile_steps=self.profile_steps,
                        log=self._log.note,
                        exclude=progress.exclude,
                    )
                )
            prefetched = stack.enter_context(
                Prefetcher(self._read, segments_per_call=per_call, steps=config.steps)
            )
            try:
                calls = range(step, config.steps, per_call)
                return run_updates(
                    state, train_step, prefetched, calls, hooks, progress, self._is_stopping
                )
            except NonFiniteError as error:
                saved = self._checkpoints.saved_step
                there = (
                    "No checkpoint was written"
                    if saved is None
                    else f"The checkpoint of step {saved} is kept"
                )
                advice = "a longer --optimizer.warmup_steps, in a new --workdir"
                if self.built.members.names:
                    advice = (
                        "start without that --ensemble_member, or split off the other members "
                        "(--mode=split)"
                    )
                raise NonFiniteError(
                    f"{error}. {there}. Try a lower --optimizer.learning_rate, or {advice}."
                ) from None

    def _read(self, first: int, count: int) -> Segments:
        """Returns the segments of the updates from `first` on, placed on the devices.

        Their shape is [S, B, L], or [n, S, B, L] for an ensemble.
        """
        segments, *others = [reader.segments(first, count) for reader in self.readers]
        if others:
            segments = jax.tree.map(lambda *arrays: np.stack(arrays), segments, *others)
        return self.built.place(segments, batch_size=self._config.batch_size)

    def _save(self, context: HookContext) -> None:
        validation = self._validation
        notes = {"running_totals": self._progress.state(), "evaluation_pending": validation.pending}
        notes |= {"steps": self._config.steps, "changes": validation.changes}
        # The records up to here are not made again by a run that resumes from this checkpoint.
        self._log.seal()
        self._checkpoints.save(context.step, context.state, notes)

    def _save_on_notice(self, context: HookContext) -> None:
        """Saves before maintenance of a machine, which may end it."""
        if stop.save_requested() and self._checkpoints.saved_step != context.step:
            self._save(context)
            self._log.note(
                f"checkpoint saved at step {context.step}, because maintenance may end this machine"
            )


def run_updates(
    state: TrainState,
    train_step: TrainStep,
    prefetched: Callable[[int], Segments],
    calls: range,
    hooks: Sequence[Hook],
    progress: Progress,
    stop_requested: Callable[[], Any],
) -> tuple[int, TrainState]:
    """Updates the state by `calls`, or until a stop is requested: (updates done, state after them).

    `calls` has the number of updates before each call, S apart. `train_step` makes S updates, and
    the state is donated to it. `prefetched` returns the next S segments, on the devices, for the
    number of updates done. Before any hook runs, every loss up to there was found finite, so that a
    checkpoint never holds the result of a nan.
    """
    # At most the metrics of one call, which are not fetched yet.
    pending: list[tuple[int, UpdateMetrics]] = []

    def segments_of(step: int) -> Any:
        began = time.monotonic()
        found = prefetched(step) if step < calls.stop else None
        progress.waited(time.monotonic() - began)
        return found

    def report() -> None:
        if pending:
            first_step, metrics = pending.pop()
            progress.add(first_step, jax.device_get(metrics))

    step, stopping = calls.start, False
    upcoming = segments_of(step)
    while step < calls.stop:
        state, metrics = train_step(state, upcoming)
        # While the device works: the next segments, and the metrics of the call before.
        upcoming = segments_of(step + calls.step)
        report()
        pending.append((step, metrics))
        step += calls.step
        due = [hook for hook in hooks if step % hook.every == 0 or step == calls.stop]
        if due:
            report()
            state, stopping = run_hooks(due, step, state, progress)
        # Asked after the hooks: one that was cut short must be repeated at this step.
        if stop_requested() or stopping:
            break
    report()
    return step, state


def run_hooks(
    hooks: Sequence[Hook], step: int, state: TrainState, progress: Progress
) -> tuple[TrainState, bool]:
    """Runs hooks one after the other.

    Returns the state to continue with, and whether a hook has requested a stop.
    """
    stopping = False
    for hook in hooks:
        began = time.monotonic()
        context = HookContext(step, state, progress.log)
        changed = hook.action(context)
        progress.exclude(time.monotonic() - began)
        state = state if changed is None else changed
        stopping = stopping or context.stopping
    return state, stopping


def _report_build(
    built: Built, compilation: Compilation, log: RunLog, *, show_details: bool
) -> None:
    """Logs attention, the estimated memory per device, and the compilation time.

    Details may go only to log.txt.
    """
    if built.attention is not None:
        show = show_details or any(chosen.replaces_failed for chosen in built.attention)
        log.print(f"attention {attention_choice.describe(built.attention)}", show=show)
    sizes = {name: len(built.members) * size for name, size in built.device_bytes().items()}
    if compilation.temporary_bytes is not None:
        sizes["activations and gradients"] = compilation.temporary_bytes
    by_kind = ", ".join(f"{name} {environment.megabytes(size)}" for name, size in sizes.items())
    total = environment.megabytes(sum(sizes.values()))
    log.print(f"memory    {total} per device, estimated (compiled in {compilation.seconds:.1f} s)")
    log.print(f"          {by_kind}", show=show_details)
