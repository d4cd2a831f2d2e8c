"""The training job: from config and text to checkpoints and results.json.

Starting goes in this order, so that the cheap failures come first and nothing is written before them:
  1. the parts are assembled and the text is cut: settings that do not fit fail here, and so do processes that do not
     have the same ones;
  2. the workdir is made, locked, and compared with what an earlier start left in it;
  3. the newest sound checkpoint is read, or the state initialised;
  4. the opening lines are printed, and the step is compiled;
  5. the loop runs, with evaluation and checkpoints as hooks;
  6. the best parameters are scored on the test text.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from txl_jax.assemble import RunComponents, assemble
from txl_jax.config import EvalConfig, ExperimentConfig, Order
from txl_jax.config import tree as config_tree
from txl_jax.data.batches.prefetch import Prefetcher
from txl_jax.data.batches.segment_reader import SegmentReader, training_segments
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError, NonFiniteError
from txl_jax.jobs import agreement, report
from txl_jax.jobs.score import Interrupted, as_record, score
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.metrics import Totals
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.files import write_json
from txl_jax.runtime.metrics_log import NoLog, RunLog, read_metrics
from txl_jax.training import weight_averaging
from txl_jax.training.loop import Hook, train
from txl_jax.training.progress import Progress
from txl_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a training job ended."""

    finished: bool  # False: stopped on request, everything saved.
    step: int
    results: dict[str, Any] | None  # What results.json holds.


def run(
    config: ExperimentConfig,
    corpus: Corpus,
    workdir: Workdir,
    *,
    stop_requested: Callable[[], Any] = lambda: False,
) -> Outcome:
    """Trains to the end, or until a stop is requested; in a used workdir it goes on where that stopped.

    Raises:
      ValueError: settings, text and workdir do not fit together.
      OSError: the workdir cannot be used.
      NonFiniteError: a loss or gradient was not finite; the last checkpoint is from before it.
      CheckpointError: there are checkpoints, but none can be read.
      RemoteProcessError: another process could not go on.
    """
    agreement.check(config, corpus)

    def prepare() -> tuple[RunComponents, SegmentReader]:
        parts = assemble(config, vocab_size=corpus.vocabulary.size)
        parts.training.check_batch_size()
        return parts, training_reader(parts, corpus)

    parts, reader = distributed.run_on_all(prepare)
    with contextlib.ExitStack() as held:
        changes = distributed.broadcast_from_primary(lambda: _claim(workdir, config, TextInfo.of(corpus), held))
        workdir.check_shared()
        return Run(parts, corpus, reader, workdir, stop_requested).run(changes)


def _claim(workdir: Workdir, config: ExperimentConfig, text: TextInfo, held: contextlib.ExitStack) -> list[str]:
    """Locks the workdir until `held` is closed, and records the run in it; returns how its settings have changed."""
    workdir.check_same_run(config, text)
    held.enter_context(workdir.create().lock())
    changes = workdir.check_same_run(config, text)
    workdir.record(config, text)
    return changes


def training_reader(parts: RunComponents, corpus: Corpus) -> SegmentReader:
    """Deals out the training text in the config's order; raises `ValueError` if it is too short for one segment."""
    data, span = parts.config.data, parts.config.train
    return training_segments(
        corpus.train,
        batch_size=span.batch_size,
        segment_len=span.segment_len,
        stride=span.stride,
        seed=parts.config.seed,
        roll=data.roll,
        sentence_starts=corpus.sentences if data.order is Order.SENTENCES else None,
        epoch_memory=data.epoch_memory,
        own=parts.placement.own_rows(span.batch_size),
    )


class Run:
    """One start of a run: its state, its log, its checkpoints.

    Args:
      label: stands before each line that is printed, where several runs print.
    """

    def __init__(
        self,
        parts: RunComponents,
        corpus: Corpus,
        reader: SegmentReader,
        workdir: Workdir,
        stop_requested: Callable[[], Any],
        *,
        label: str = "",
    ):
        self.parts = parts
        self.config = parts.config.train
        self.corpus = corpus
        self.measure = corpus.vocabulary.measure
        self.reader = reader
        self.workdir = workdir
        self.stop_requested = stop_requested
        self.label = label
        self.saved_step = -1
        self.evaluation_pending = False
        self.log: RunLog | NoLog | None = None
        self.losses: list[float] = []  # Of the validation text so far.
        self.unsaid: list[str] = []  # Until the log is open: it opens at a step that the checkpoints tell.

    def run(self, changes: list[str]) -> Outcome:
        """All of it; `changes` are settings that differ from the start before."""
        with self.checkpoints():
            step, state, notes = self.restore(self.parts.training.init_state)
            with self.logging(step, changes):
                if results := self.ended_before(step, notes):
                    return Outcome(True, step, results)
                train_step, compilation = self.parts.training.compile_step()
                self.log.print(report.memory_line(self.parts, compilation))
                if not self._has_ended(step, notes):
                    step, state = self._train(train_step, step, state, notes)
                return self.finish(step, state)

    @contextlib.contextmanager
    def checkpoints(self) -> Iterator[None]:
        """The checkpoints are open."""
        with (
            Checkpointer(self.workdir.latest, keep=self.config.keep_checkpoints, log=self._note) as self.latest,
            Checkpointer(self.workdir.best, keep=1, log=self._note) as self.best,
        ):
            # A run that was killed after its last save will save no more, and so would never sweep.
            self.latest.sweep()
            self.best.sweep()
            yield

    def restore(
        self, init_state: Callable[[], TrainState], *, before: int | None = None
    ) -> tuple[int, TrainState, dict[str, Any]]:
        """The number of updates done, the state after them, and its notes; only checkpoints `before` a step count."""
        restored = self.latest.restore(self.parts.training.abstract_state, before=before)
        self.saved_step = -1 if restored is None else restored[0]
        step, state, notes = restored or (0, init_state(), {})
        self.evaluation_pending = notes.get("evaluation_pending", False)
        return step, state, notes

    @contextlib.contextmanager
    def logging(self, step: int, changes: list[str], *, introduce: bool = True) -> Iterator[None]:
        """The log is open, and drops what it has of updates after `step`.

        Args:
          changes: settings that differ from the start before.
          introduce: print what the run is; it is written to the log anyway.
        """
        self.unsaid += changes
        with self._open_log(step) as self.log:
            self._open(step, introduce=introduce)
            self.losses = self._losses_so_far()
            yield

    def _open_log(self, step: int) -> RunLog | NoLog:
        if not distributed.is_primary():
            return NoLog()
        # What was recorded and then lost its consequences to a kill is done, and recorded, again.
        redone = {"valid"} if self.evaluation_pending else set()
        if self._results_on_disk(step) is None:
            redone.add("test")
        return RunLog(self.workdir.path, first_step=step, redone=redone, label=self.label)

    def ended_before(self, step: int, notes: dict[str, Any]) -> dict[str, Any] | None:
        """The results of a run that had ended when it was opened; None: there is something to do."""
        results = None
        if self._has_ended(step, notes):
            results = distributed.broadcast_from_primary(lambda: self._results_on_disk(step))
        if results:
            self.log.print(f"finished  already: {self.workdir.path / 'results.json'}")
        return results

    def _has_ended(self, step: int, notes: dict[str, Any]) -> bool:
        ended = step >= self.config.steps or self._out_of_patience()
        return ended and not notes.get("evaluation_pending", False)

    def _note(self, line: str) -> None:
        if self.log is None:
            self.unsaid.append(line)
        else:
            self.log.print(f"note      {line}")

    def _open(self, step: int, *, introduce: bool) -> None:
        for line in report.opening(self.parts, self.corpus, self.reader):
            self.log.print(line, shown=introduce)
        for line in self.unsaid:
            self._note(line)
        if step:
            epoch, index = divmod(step, self.reader.n_segments)
            self.log.print(f"resuming  after step {step}, epoch {epoch + 1}, segment {index} of its text")

    def begin(self, notes: dict[str, Any], *, shown: bool = True) -> None:
        """Starts the clock; the lines of progress are printed if `shown`."""
        span = self.config
        self.progress = Progress(
            self.log,
            steps=span.steps,
            log_every=span.log_every,
            tokens_per_step=span.batch_size * span.new_tokens,
            measure=self.measure,
            window=notes.get("window"),
            log=functools.partial(self.log.print, shown=shown),
        )

    def _train(self, train_step: Any, step: int, state: TrainState, notes: dict[str, Any]) -> tuple[int, TrainState]:
        span = self.config
        self.begin(notes)
        if notes.get("evaluation_pending"):
            state = self.repeat_evaluation(step, state)
            if self.evaluation_pending or self._out_of_patience():
                return step, state
        try:
            with Prefetcher(
                lambda first, count: self.parts.placement.place(
                    self.reader.segments(first, count), batch_size=span.batch_size
                ),
                segments_per_call=span.segments_per_call,
                steps=span.steps,
            ) as segments:
                return train(
                    state,
                    train_step,
                    segments,
                    first_step=step,
                    steps=span.steps,
                    segments_per_call=span.segments_per_call,
                    progress=self.progress,
                    # Evaluation first: a checkpoint of a step implies that its evaluation is on disk.
                    hooks=[Hook(span.eval_every, self.evaluate), Hook(span.checkpoint_every, self.save)],
                    stop_requested=lambda: self.stop_requested() or self._out_of_patience(),
                )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error}; {self.kept}. Try a lower --optimizer.learning_rate or a longer --optimizer.warmup_steps, "
                "in a new --workdir"
            ) from None

    @property
    def kept(self) -> str:
        """What a run that ends now leaves."""
        return (
            "no checkpoint was written" if self.saved_step < 0 else f"the checkpoint of step {self.saved_step} is kept"
        )

    def repeat_evaluation(self, step: int, state: TrainState) -> TrainState:
        """What a stop cut short; returns the state to go on with."""
        began = time.monotonic()
        state = self.evaluate(step, state)
        if not self.evaluation_pending:
            self.save(step, state)  # Else a kill before the next checkpoint would evaluate, and record, again.
        self.progress.exclude(time.monotonic() - began)
        return state

    def evaluate(self, step: int, state: TrainState) -> TrainState:
        """Scores the validation text, and keeps the parameters if no earlier ones were better.

        Returns:
          The state to go on with: a mean of the weights may begin here.
        """
        began = time.monotonic()
        valid = self.corpus.valid[: self.parts.config.eval.valid_tokens or None]
        self.evaluation_pending = True  # Until it is done: a checkpoint written now must say so.
        try:
            totals = self._score(state.scored_params, valid, f"step {step}: valid")
        except Interrupted:
            return state
        self.evaluation_pending = False
        best = self._best()
        # Those of this very step are written again: a kill may have come before they had their digests.
        better = best is None or totals.nll < best["loss"] or best["step"] == step
        self.log.record("valid", step, as_record(totals))
        self.log.print(
            report.timed(f"step {step}: valid {report.scores(totals, self.measure)}", time.monotonic() - began)
            + ("  best so far" if better else f"  best {self._told(best)} at step {best['step']}")
        )
        if better:
            notes = {"step": step, **as_record(totals), "eval": self._eval_settings()}
            self.best.save(step, {"params": state.scored_params}, notes)
        self.losses.append(totals.nll)
        return self._with_average(step, state)

    def _losses_so_far(self) -> list[float]:
        """The validation losses of this run in order; none if they were scored with other --eval settings."""
        if self._best() is None:
            return []
        return distributed.broadcast_from_primary(
            lambda: [record["loss"] for record in read_metrics(self.workdir.path) if record["kind"] == "valid"]
        )

    def _with_average(self, step: int, state: TrainState) -> TrainState:
        trigger = self.parts.config.average.nt_asgd_patience
        if (
            not trigger
            or weight_averaging.has_begun(state.average)
            or not weight_averaging.is_due(self.losses, trigger)
        ):
            return state
        self.log.print(f"note      the mean of the weights begins here: no better loss than {trigger} evaluations ago")
        return state.replace(average=weight_averaging.begin(state.average, step))

    def _out_of_patience(self) -> bool:
        """Whether the last `patience` validation losses were all no better than the best before them."""
        patience = self.config.patience
        if not patience or len(self.losses) <= patience:
            return False
        return min(self.losses[-patience:]) >= min(self.losses[:-patience])

    def _best(self) -> dict[str, Any] | None:
        """Step and scores of the best parameters so far; None if there are none that can be compared with."""
        return distributed.broadcast_from_primary(self._best_on_disk)

    def _best_on_disk(self) -> dict[str, Any] | None:
        step = self.best.latest_step()
        if step is None:
            return None
        try:
            notes = self.best.notes(step)
        except CheckpointError as error:
            self._note(f"{error}; the best is chosen anew from here")
            return None
        if with_defaults(notes["eval"]) != self._eval_settings():
            self._note(
                f"the best so far, of step {step}, was scored with other --eval settings; it is chosen anew from here"
            )
            return None
        return notes

    def _eval_settings(self) -> dict[str, Any]:
        """The evaluation lengths: scores at other ones are not comparable."""
        return config_tree.to_dict(self.parts.config.eval)

    def save(self, step: int, state: TrainState) -> None:
        """Writes a checkpoint."""
        distributed.run_on_all(self.best.wait)  # Else a kill could leave a checkpoint whose evaluation's best is lost.
        window = dataclasses.asdict(self.progress.window)
        self.latest.save(step, state, {"window": window, "evaluation_pending": self.evaluation_pending})
        self.saved_step = step

    def finish(self, step: int, state: TrainState) -> Outcome:
        """The last checkpoint, and, after the last update, the test text."""
        early = step < self.config.steps and self._out_of_patience()
        if early:
            self.log.print(f"note      ends after step {step}: no better loss in {self.config.patience} evaluations")
        finished = (early or step >= self.config.steps) and not self.evaluation_pending
        if self.saved_step != step:
            self.save(step, state)
        distributed.run_on_all(self.latest.wait)
        distributed.run_on_all(self.best.wait)
        if finished:
            try:
                return Outcome(True, step, self._test(step, state))
            except Interrupted:
                pass
        self.log.print(
            f"stopped   on request after step {step}; everything is saved, the same command goes on from here"
        )
        return Outcome(False, step, None)

    def _test(self, step: int, state: TrainState) -> dict[str, Any]:
        best, params = self._best_or_last(state)
        began = time.monotonic()
        totals = self._score(params, self.corpus.test, "test")
        self.log.record("test", step, as_record(totals))
        self.log.print(report.timed(f"test {report.scores(totals, self.measure)}", time.monotonic() - began))
        results = {
            "corpus": self.corpus.name,
            "text": self.corpus.description,
            "parameters": self.parts.num_parameters,
            "steps": step,
            "best_valid": best,
            "test": {"step": best["step"] if best else step, **as_record(totals)},
            "eval": self._eval_settings(),
            **environment.describe(),
        }
        distributed.broadcast_from_primary(lambda: write_json(self.workdir.path / "results.json", results))
        self.log.print(f"results   {self.workdir.path / 'results.json'}")
        return results

    def _best_or_last(self, state: TrainState) -> tuple[dict[str, Any] | None, Any]:
        """Scores and parameters of the best checkpoint; if it cannot be read, those of the last update."""
        try:
            restored = self.best.restore({"params": self.parts.training.abstract_state.params})
        except CheckpointError as error:
            self._note(f"{error}; the parameters after the last update are used instead")
            restored = None
        if restored is None:
            return None, state.scored_params
        _, tree, notes = restored
        return {name: value for name, value in notes.items() if name != "eval"}, tree["params"]

    def _results_on_disk(self, step: int) -> dict[str, Any] | None:
        """What results.json holds, if it was measured after `step` updates with these evaluation settings."""
        try:
            results = json.loads((self.workdir.path / "results.json").read_text())
            same = results["steps"] == step and with_defaults(results["eval"]) == self._eval_settings()
        except (OSError, ValueError, KeyError, TypeError):  # There is none, or it is damaged: it is made again.
            return None
        return results if same else None

    def _score(self, params: Any, tokens: Any, name: str) -> Totals:
        return score(
            self.parts,
            params,
            tokens,
            name=name,
            measure=self.measure,
            log=self.log.print,
            stop_requested=self.stop_requested,
        )

    def _told(self, notes: dict[str, Any]) -> str:
        """The scores that a checkpoint's notes hold, for people."""
        return Totals(notes["loss"], 1).told(self.measure)


def with_defaults(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings of evaluation; one that did not exist then had the effect of its default."""
    return config_tree.to_dict(EvalConfig()) | evaluation
