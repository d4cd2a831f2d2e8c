"""Trains a run: from config and text to checkpoints and results.json.

From top to bottom, `train` and `train_run` prepare a run, `Trainer` trains it, and `run_updates` is
its loop. Cheap failures come first, before anything is written: the model is built and the text cut
into segments, the weights of a warm start are read, and the run is recorded. Then the state is
restored or initialized. Everything periodic in training is a hook.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax import flops
from txl_jax.config import ExperimentConfig, Order, config_tree
from txl_jax.config.config_tree import require
from txl_jax.data.corpus import Corpus
from txl_jax.data.prefetch import Prefetcher
from txl_jax.data.segments import SegmentReader, training_segments
from txl_jax.errors import NonFiniteError
from txl_jax.recurrence import Segments
from txl_jax.runs import announce, attention_check, ensemble, warm_start
from txl_jax.runs.build import Built, Compilation, build_for
from txl_jax.runs.checkpoints import RunCheckpoints, TrainNotes
from txl_jax.runs.generate import make_sampler
from txl_jax.runs.run import (
    MemberSettings,
    Run,
    check_same_attention,
    check_same_remat,
    check_same_text,
)
from txl_jax.runs.validation import Validation
from txl_jax.runtime import distributed, environment, profiler, stop
from txl_jax.runtime.log import RunLog
from txl_jax.runtime.sinks import Sink
from txl_jax.runtime.stop import StopRequest
from txl_jax.training.hooks import Hook, HookContext, check_hooks
from txl_jax.training.optimizer import learning_rate
from txl_jax.training.progress import Progress
from txl_jax.training.step import TrainState, TrainStep, UpdateMetrics


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of training."""

    # Whether training has ended. Otherwise it was stopped on request, with everything saved.
    finished: bool
    # Number of training steps done.
    step: int
    # Content of results.json, or None if training was stopped.
    results: dict[str, Any] | None


def train(
    config: ExperimentConfig,
    path: str | os.PathLike[str],
    *,
    data_dir: str = "data",
    cache_dir: str | None = None,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
) -> Outcome:
    """Trains a config, starting or resuming the run in the directory `path`.

    It reads the corpus of the config and then trains, like the commands.

    The same call resumes a stopped run. For a finished run it returns the results.

    Ctrl-C and SIGTERM save the run, and then raise KeyboardInterrupt or SystemExit(143). Signals
    with your own handler, and all signals outside the main thread, are not handled: use a hook that
    calls `HookContext.request_stop`.

    Args:
      config: All settings. Your own text is `DataConfig(corpus="text", file=...)`. The defaults of
        `TrainConfig` and `EvalConfig` are for the 12-layer enwik8 model.
      path: The workdir. Created if missing.
      data_dir: Directory of the corpora's own files.
      cache_dir: Directory for prepared tokens, or None for `prepared` in `data_dir`.
      hooks: As in `train_run`, like the other arguments.

    Raises:
      UserError: If `config` is not an `ExperimentConfig`, is not valid, or the text cannot be read.
        Other errors are raised by `train_run`.
    """
    require(
        isinstance(config, ExperimentConfig),
        f"config must be an ExperimentConfig, got {config!r:.40}. "
        'Pass txl_jax.preset("small"), for example.',
    )
    config = config.resolved()
    config.validate()
    # Checked before the text is read, which may take minutes.
    check_hooks(hooks, config.train.segments_per_call)

    with Run.open(path) as run:
        run.compare(config)
        corpus = warm_start.read_corpus(config, run, data_dir, cache_dir)
        with StopRequest(only_defaults=True) as stop_request:
            outcome = train_run(
                config,
                corpus,
                run,
                hooks=hooks,
                sinks=sinks,
                profile_steps=profile_steps,
                stop_requested=lambda: stop_request,
            )

    # The caller's program ends by the signal, now that the run is saved.
    if stop_request.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if stop_request.signal_number:
        raise SystemExit(128 + stop_request.signal_number)
    return outcome


def train_run(
    config: ExperimentConfig,
    corpus: Corpus,
    run: Run,
    *,
    members: MemberSettings = (),
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    profile_steps: tuple[int, int] | None = None,
    verbose: bool = False,
    compiled_step: Compilation | None = None,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Outcome:
    """Trains an open run to the end, or until a stop is requested.

    A recorded run resumes where it stopped.

    Args:
      config: All settings, resolved and valid.
      corpus: The text, in the vocabulary of the run.
      run: The open workdir.
      members: The settings in which the members of an ensemble differ (see `runs.ensemble`), or
        empty for one run.
      hooks: Hooks that run after evaluation and before the checkpoint of a step. To train N updates
        of a longer schedule, pass a hook that calls `HookContext.request_stop` at update N, a
        multiple of `train.eval_every`.
      sinks: Sinks for the records, in addition to metrics.jsonl and TensorBoard's files.
      profile_steps: First and last update, from 1, of a profile in the workdir's `profile`, or None
        for no profile.
      verbose: Whether to print details of attention and memory. On one device only log.txt contains
        them otherwise.
      compiled_step: A training step that this process has compiled, or None. It is used if it is
        the same program, for any lengths of the schedule.
      stop_requested: Is called between calls of the training step and while a split is scored. Once
        it returns a true value, training saves and stops.

    Raises:
      UserError: If settings, members, text and workdir are incompatible, or the workdir cannot be
        used.
      NonFiniteError: If a loss or gradient was not finite. The last checkpoint precedes it.
      CheckpointError: If none of the run's checkpoints can be read.
      RemoteProcessError: If another process could not continue.
    """
    check_hooks(hooks, config.train.segments_per_call)
    if profile_steps is not None:
        profiler.check_steps(profile_steps, steps=config.train.steps)
    members = [ensemble.in_order(member) for member in members]
    # Commands have compared the settings before they read a text. Now the members are known, and
    # the steps that --minutes has set.
    run.compare(config, members)
    if distributed.is_multiprocess():
        check_same_text(corpus)

    def build_and_cut() -> tuple[Built, list[SegmentReader]]:
        # The attention and remat of an earlier start, or on a first start the config's, because a
        # resumed run must stay identical to the last bit.
        recorded_or_asked = run.attention_for(config)
        built = build_for(
            config,
            corpus.vocabulary,
            recorded=recorded_or_asked,
            remat=run.remat_for(config),
            n_member=max(len(members), 1),
        )
        built.check_batch_size()
        seeds = [config.seed]
        if members:
            built = ensemble.Ensemble.of(built, members)
            seeds = [member_config.seed for member_config in built.configs.values()]
        return built, [training_reader(built, corpus, seed) for seed in seeds]

    # All processes build, and compare the attention that they choose with the reference. If a path
    # fails on one process, all of them build again without it.
    built, readers = attention_check.build_on_all(build_and_cut)
    if distributed.is_multiprocess():
        check_same_attention(built.attention)
        check_same_remat(built.remat)

    sampler = None
    if config.train.sample_every:
        sampler = make_sampler(config, corpus.vocabulary)
    pretrained = None
    if config.init_from is not None:
        pretrained = warm_start.load(built, corpus.vocabulary, run)

    warm_start_record = None if pretrained is None else pretrained.record

    # The first write of this start. Earlier failures do not leave a directory behind.
    run.record_start(
        config,
        corpus,
        attention=built.attention,
        remat=built.remat,
        warm_start=warm_start_record,
        members=members,
    )

    trainer = Trainer(
        built,
        run,
        corpus,
        readers,
        pretrained=pretrained,
        hooks=hooks,
        sinks=sinks,
        profile_steps=profile_steps,
        sampler=sampler,
        verbose=verbose,
        compiled_step=compiled_step,
        stop_requested=stop_requested,
    )
    return trainer.train()


def training_reader(built: Built, corpus: Corpus, seed: int) -> SegmentReader:
    """Cuts the training split into segments, in the config's order.

    Args:
      built: The model's config and the devices. The reader reads only the rows of this process.
      corpus: The text.
      seed: Seed of the order of epochs, which differs between the members of an ensemble.

    Raises:
      UserError: If the text is too short for one segment.
    """
    data = built.config.data
    train_config = built.config.train
    sentence_starts = None
    if data.order is Order.SENTENCES:
        sentence_starts = corpus.sentences
    return training_segments(
        corpus.train,
        batch_size=train_config.batch_size,
        segment_len=train_config.segment_len,
        stride=train_config.stride,
        seed=seed,
        roll=data.roll,
        sentence_starts=sentence_starts,
        own=built.own_rows(train_config.batch_size).tolist(),
    )


class _Start(NamedTuple):
    """The state at the start of a run: a checkpoint, or the initial state."""

    step: int  # Number of updates done.
    state: TrainState  # The state after them, with a leading member axis in an ensemble.
    notes: TrainNotes  # The notes of the checkpoint, or their defaults without one.


@dataclasses.dataclass(eq=False, repr=False)
class Trainer:
    """One start of a run that is recorded in its directory. `train` is called once.

    It owns the state, the log and the checkpoints.
    """

    # The model to train: one run or, with a leading member axis, an ensemble.
    built: Built
    # The open workdir, with the record of this start.
    run: Run
    corpus: Corpus
    # The training segments of each member, or of the one run.
    readers: Sequence[SegmentReader]
    _: dataclasses.KW_ONLY
    # The model whose parameters a warm start begins with, or None for random parameters.
    pretrained: warm_start.WarmStart | None
    # Hooks that run after evaluation and before the checkpoint of a step, which saves their state.
    hooks: Sequence[Hook]
    # Sinks for settings and records.
    sinks: Sequence[Sink]
    # First and last update of a profile, or None for no profile.
    profile_steps: tuple[int, int] | None
    # Writes the samples of `train.sample_every`, or None for no samples.
    sampler: Callable[..., list[bytes]] | None
    # Whether to print details, which only log.txt contains otherwise on one device.
    verbose: bool
    # A training step that was compiled before, possibly for this run, or None.
    compiled_step: Compilation | None
    # Called between calls of the training step and while a split is scored.
    stop_requested: Callable[[], Any]

    def __post_init__(self) -> None:
        self._config = self.built.config.train
        # Only process 0 writes the log. Before an upload the log confirms
        # that no other run writes here.
        folder = self.run.path if distributed.is_primary() else None
        self._log = RunLog(folder, sinks=self.sinks, confirm=self.run.confirm)
        self._checkpoints = RunCheckpoints(
            self.run,
            self.built.members,
            keep=self._config.keep_checkpoints,
            log=self._log.note,
        )
        self._validation = Validation(
            self.built,
            self.corpus,
            self.run,
            self._checkpoints,
            self._log,
            stop_requested=self._is_stopping,
            sampler=self.sampler,
        )

    def train(self) -> Outcome:
        """Trains to the end, or until a stop is requested."""
        for note in self.run.notes:
            self._log.note(note)
        with self._checkpoints:
            start = self._restore_or_initialize()
            with self._open_log(start.step):
                self._log.settings(self._settings())
                # The losses so far, for patience and the best step. They are read only after the
                # log is opened, which drops the records of a killed start after its last
                # checkpoint: this start computes them again.
                self._validation.read_losses()
                results = self._results_if_finished(start.step)
                if results is not None:
                    return Outcome(finished=True, step=start.step, results=results)

                if start.step:
                    self._log.print(f"resuming  from {self._position(start.step)}")
                train_step = self._compile()
                self._progress = self._make_progress(start.notes)
                step, state = self._update_until_done(train_step, start)
                self._save_last(step, state)
                return self._finish(step, state)

    def _is_stopping(self) -> Any:
        """Returns whether a stop is requested. Raises `UserError` if the lock is lost."""
        self.run.check()
        return self.stop_requested()

    def _has_ended(self, step: int) -> bool:
        """Returns whether training has ended after `step` updates, with its last evaluation.

        An evaluation that a stop interrupted is pending, and the next start repeats it.
        """
        is_last = step >= self._config.steps or self._validation.out_of_patience
        return is_last and not self._validation.pending

    # Before the first update

    def _restore_or_initialize(self) -> _Start:
        """Restores the latest checkpoint, or initializes the state of a first start."""
        built = self.built
        # A checkpoint of an ensemble has the member axis, which `abstract` adds. For a single run
        # it adds nothing.
        restored = self._checkpoints.restore(built.members.abstract(built.abstract_state))
        if restored is not None:
            step, state, notes = restored
        else:
            warm_state = None if self.pretrained is None else self.pretrained.state
            step = 0
            state = built.init_state(warm_state)
            notes = TrainNotes()
        start = _Start(step, state, notes)

        self._validation.pending = start.notes.evaluation_pending
        self._validation.changes = self._changes_of_steps(start)
        return start

    def _changes_of_steps(self, start: _Start) -> list[dict[str, Any]]:
        """Returns the changes of `train.steps` so far.

        They are the checkpoint's changes, and the change made by this start, if any.
        """
        changes = start.notes.changes
        new_steps = self._config.steps
        old_steps = start.notes.steps
        if old_steps is None or old_steps == new_steps:
            return changes

        old_config = config_tree.replace(self.built.config, {"train.steps": old_steps})
        old_rate = _share_of_peak(old_config, start.step)
        new_rate = _share_of_peak(self.built.config, start.step)
        if old_rate != new_rate:
            self._log.note(
                f"the learning-rate schedule ends at step {new_steps:,} instead of {old_steps:,}, "
                f"so the rate after step {start.step:,} changes from {old_rate} to {new_rate} of "
                "its peak"
            )
        change = {"step": start.step, "name": "train.steps", "old": old_steps, "new": new_steps}
        return [*changes, change]

    def _open_log(self, step: int) -> RunLog:
        """Opens the log for the records after `step`, with the startup summary."""
        # Kinds of records of `step` itself that this start repeats. The log drops them if an
        # earlier start was killed right after recording them.
        redone = set()
        # A repeated evaluation is recorded before a checkpoint says that none is pending.
        if self._validation.pending:
            redone.add("valid")
        # The scores of the test split are recorded before results.json is written, so they are
        # computed again unless that file contains results for this step.
        if self._validation.results_after(step) is None:
            redone.add("test")
        opening = announce.startup_summary(
            self.built, self.corpus, self.readers[0], pretrained=self.pretrained
        )
        return self._log.open(step, redone=redone, header=environment.origin(), opening=opening)

    def _settings(self) -> dict[str, Any]:
        """Returns the run's settings and metadata for the sinks."""
        settings = config_tree.to_dict(self.built.config)
        # `facts` describe the text, the size, and the weights that the run began with.
        return settings | self._validation.facts | environment.describe()

    def _results_if_finished(self, step: int) -> dict[str, Any] | None:
        """Returns the results of a run that an earlier start finished, or None."""
        if not self._has_ended(step):
            return None
        results = distributed.broadcast_from_primary(lambda: self._validation.results_after(step))
        if not results:
            return None
        advice = ""
        if step < self._config.steps:
            advice = ". To continue, raise --train.patience or set it to none."
        self._log.print(f"finished  already: {self._validation.results_path}{advice}")
        return results

    def _position(self, step: int) -> str:
        """Describes step and place in the text, which is the same for all members."""
        epoch, segment = divmod(step, self.readers[0].n_segments)
        return f"step {step} (epoch {epoch + 1}, segment {segment})"

    def _compile(self) -> TrainStep:
        """Compiles the training step, and logs attention, memory and the compilation time."""
        # Traces `make_train_step` (training/step.py) with its `jax.grad`.
        compilation = self.built.compile_step(self.compiled_step)
        show_details = self.verbose or self.built.mesh.size > 1
        announce.report_build(self.built, compilation, self._log, show_details=show_details)
        return compilation.program

    def _make_progress(self, notes: TrainNotes) -> Progress:
        built = self.built
        cost = flops.of_step(
            built.config, vocab_size=built.model.vocab_size, n_device=built.mesh.size
        )
        return Progress(
            self._log,
            steps=self._config.steps,
            log_every=self._config.log_every,
            cost=cost,
            measure=self.corpus.vocabulary.measure,
            members=built.members,
            running_totals=notes.running_totals,
        )

    # Updates

    def _update_until_done(self, train_step: TrainStep, start: _Start) -> tuple[int, TrainState]:
        """Updates the state to the end of training, or until a stop is requested.

        Returns (updates done, state after them).
        """
        step = start.step
        state = start.state
        if self._has_ended(step):
            return step, state

        evaluation = self._validation.hooks()
        save = Hook(self._config.checkpoint_every, self._save)
        hooks = self._hooks_in_order(evaluation, save)

        # A stop has interrupted the last evaluation. The repeated one may be interrupted as well,
        # or exhaust the patience.
        if self._validation.pending:
            state = self._repeat_evaluation(evaluation, save, step, state)
        if self._validation.pending or self._validation.out_of_patience:
            return step, state

        segments_per_call = self._config.segments_per_call
        calls = range(step, self._config.steps, segments_per_call)
        # `Run.compare` has checked this before anything was written, by the steps of checkpoints.
        # An earlier step may have been restored since, because a later one is corrupted.
        if calls:
            self.run.check_masks()
        with contextlib.ExitStack() as stack:
            if self.profile_steps is not None:
                train_step = stack.enter_context(self._profiler(train_step, step))
            prefetched = stack.enter_context(
                Prefetcher(
                    self._read, segments_per_call=segments_per_call, steps=self._config.steps
                )
            )
            try:
                return run_updates(
                    state, train_step, prefetched, calls, hooks, self._progress, self._is_stopping
                )
            except NonFiniteError as error:
                raise self._with_advice(error) from None

    def _repeat_evaluation(
        self, evaluation: Sequence[Hook], save: Hook, step: int, state: TrainState
    ) -> TrainState:
        """Runs the hooks of an evaluation again. Returns the state that they leave."""
        state, _ = run_hooks(evaluation, step, state, self._progress)
        if not self._validation.pending:
            # Otherwise, after a kill before the next checkpoint, it would be repeated and recorded
            # again.
            run_hooks([save], step, state, self._progress)
        return state

    def _hooks_in_order(self, evaluation: Sequence[Hook], save: Hook) -> list[Hook]:
        """Returns all hooks in the order in which they run after an update."""
        hooks = list(evaluation)
        if self.hooks:
            # The caller's hooks may load the best parameters, so these must be on disk.
            every = self._config.eval_every
            hooks.append(Hook(every, lambda context: self._checkpoints.wait_for_best()))
        hooks.extend(self.hooks)
        # A checkpoint of a step implies that its evaluation is on disk.
        hooks.append(save)
        # Google Cloud announces the maintenance of a machine. If all processes wait for such
        # notices, a notice to any of them saves a checkpoint.
        if stop.is_watched_by_all():
            hooks.append(Hook(self._config.log_every, self._save_on_notice))
        return hooks

    def _read(self, first_step: int, n_step: int) -> Segments:
        """Returns the segments of the updates from `first_step` on, placed on the devices.

        Their shape is [S, B, L], or [n, S, B, L] for an ensemble.
        """
        blocks = [reader.segments(first_step, n_step) for reader in self.readers]
        segments = blocks[0]
        if len(blocks) > 1:
            segments = jax.tree.map(lambda *arrays: np.stack(arrays), *blocks)
        return self.built.place(segments, batch_size=self._config.batch_size)

    def _profiler(self, train_step: TrainStep, step: int) -> profiler.StepProfiler:
        assert self.profile_steps is not None
        return profiler.StepProfiler(
            train_step,
            os.path.join(self.run.path, profiler.PROFILE),
            done=step,
            segments_per_call=self._config.segments_per_call,
            profile_steps=self.profile_steps,
            log=self._log.note,
            exclude=self._progress.exclude,
        )

    def _with_advice(self, error: NonFiniteError) -> NonFiniteError:
        """Adds the remaining checkpoint, and what to try, to the error."""
        checkpoint = "No checkpoint was written"
        if self._checkpoints.saved_step is not None:
            checkpoint = f"The checkpoint of step {self._checkpoints.saved_step} is kept"
        advice = "a longer --optimizer.warmup_steps, in a new --workdir"
        if self.built.members.names:
            advice = (
                "start without that --ensemble_member, or split off the other members "
                "(--mode=split)"
            )
        return NonFiniteError(
            f"{error}. {checkpoint}. Try a lower --optimizer.learning_rate, or {advice}."
        )

    # Checkpoints

    def _save(self, context: HookContext) -> None:
        """Starts writing a checkpoint with everything that a later start needs."""
        notes = TrainNotes(
            running_totals=self._progress.state(),
            evaluation_pending=self._validation.pending,
            steps=self._config.steps,
            changes=self._validation.changes,
        )
        # `seal` returns when the lines and metrics so far are durable, even in a bucket. A run that
        # resumes from this checkpoint does not write them again.
        self._log.seal()
        self._checkpoints.save(context.step, context.state, notes)

    def _save_on_notice(self, context: HookContext) -> None:
        """Saves before maintenance of a machine, which may end it."""
        if stop.save_requested() and self._checkpoints.saved_step != context.step:
            self._save(context)
            self._log.note(
                f"checkpoint saved at step {context.step}, because maintenance may end this machine"
            )

    # After the last update

    def _save_last(self, step: int, state: TrainState) -> None:
        """Saves the last step, if it is not saved yet, and waits until everything is on disk."""
        if step < self._config.steps and self._validation.out_of_patience:
            self._log.note(
                f"training ends at step {step}: no better loss in {self._config.patience} "
                "evaluations"
            )
        if self._checkpoints.saved_step != step:
            self._save(HookContext(step, state, self._log))
        self._checkpoints.wait()

    def _finish(self, step: int, state: TrainState) -> Outcome:
        """Scores the test split and writes results.json, if training has ended.

        A stop while the split is scored leaves this to the next start.
        """
        results = None
        if self._has_ended(step):
            results = self._validation.make_results(step, state)
        if results is None:
            advice = "Rerun the same command to resume."
            if step >= self._config.steps or self._validation.out_of_patience:
                advice = "All training steps are done. Rerun the same command to finish scoring."
            self._log.print(f"stopped   at step {step}, checkpoint saved. {advice}")
        return Outcome(finished=results is not None, step=step, results=results)


def _share_of_peak(config: ExperimentConfig, step: int) -> str:
    """Returns the learning rate after `step` updates, as a percentage of its peak."""
    return f"{float(learning_rate(config, peak=1.0)(step)):.1%}"


def run_updates(
    state: TrainState,
    train_step: TrainStep,
    prefetched: Callable[[int], Segments],
    calls: range,
    hooks: Sequence[Hook],
    progress: Progress,
    stop_requested: Callable[[], Any],
) -> tuple[int, TrainState]:
    """Updates the state by `calls`, or until a stop is requested.

    Before a hook runs, every loss so far has been checked, so that a checkpoint never contains the
    result of a nan.

    Args:
      state: The state before the first call.
      train_step: Performs S updates. The state is donated to it.
      prefetched: Returns the next S segments, on the devices, for the number of updates done.
      calls: The number of updates before each call, S apart.
      hooks: Hooks that run after the calls at which they are due, in this order.
      progress: Receives the metrics, and the seconds spent on waiting and in hooks.
      stop_requested: Is called after each call and its hooks.

    Returns:
      (updates done, state after them).

    Raises:
      NonFiniteError: If a loss or gradient norm is not finite.
    """
    # The metrics of the last call, which are not fetched yet.
    unreported: tuple[int, UpdateMetrics] | None = None
    step = calls.start
    upcoming = _wait_for_segments(prefetched, step, calls, progress)
    while step < calls.stop:
        state, metrics = train_step(state, upcoming)

        # While the device works, get the next segments and the metrics of the previous call.
        upcoming = _wait_for_segments(prefetched, step + calls.step, calls, progress)
        _report(unreported, progress)
        unreported = (step, metrics)
        step += calls.step

        is_stopping = False
        # S divides the steps of the run and the intervals of the hooks, so a call never jumps past
        # a hook's step, and the last call ends exactly at `calls.stop`.
        due = [hook for hook in hooks if step % hook.every == 0 or step == calls.stop]
        if due:
            # The hooks must not see, or save, a state whose metrics are not checked.
            _report(unreported, progress)
            unreported = None
            state, is_stopping = run_hooks(due, step, state, progress)
        # Called after the hooks: an interrupted hook must be repeated at this step.
        if stop_requested() or is_stopping:
            break
    _report(unreported, progress)
    return step, state


def _wait_for_segments(
    prefetched: Callable[[int], Segments], step: int, calls: range, progress: Progress
) -> Any:
    """Returns the segments of the call after `step` updates, or None after the last call."""
    began = time.monotonic()
    segments = prefetched(step) if step < calls.stop else None
    progress.waited(time.monotonic() - began)
    return segments


def _report(unreported: tuple[int, UpdateMetrics] | None, progress: Progress) -> None:
    """Fetches the metrics of a call, if any, and adds them to the progress."""
    if unreported is not None:
        first_step, metrics = unreported
        progress.add(first_step, jax.device_get(metrics))


def run_hooks(
    hooks: Sequence[Hook], step: int, state: TrainState, progress: Progress
) -> tuple[TrainState, bool]:
    """Runs hooks one after the other.

    Returns the state to continue with, and whether a hook has requested a stop.
    """
    is_stopping = False
    for hook in hooks:
        began = time.monotonic()
        context = HookContext(step, state, progress.log)
        new_state = hook.action(context)
        progress.exclude(time.monotonic() - began)
        if new_state is not None:
            state = new_state
        if context.stopping:
            is_stopping = True
    return state, is_stopping
