"""Scores a run during training and at its end.

This includes the best parameters, weight averaging, early stopping, and results.json.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from txl_jax.config.evaluation import is_same_in_training, training_settings
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError
from txl_jax.metrics import Totals
from txl_jax.runs.build import Built
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.generate import as_file
from txl_jax.runs.run import RESULTS, Run, read_results
from txl_jax.runs.score import as_record, as_result, score_with_line
from txl_jax.runs.score_splits import Split, printable
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runtime import distributed, environment, storage
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.storage import write_json
from txl_jax.training import weight_averaging
from txl_jax.training.hooks import Hook, HookContext
from txl_jax.training.step import TrainState


class _Score(NamedTuple):
    """The score of a split with the parameters of one member."""

    totals: Totals
    line: str  # The score and the time that it took, for the log.


@dataclasses.dataclass(eq=False, repr=False)
class Validation:
    """Scores the splits with the parameters of a run, or of each ensemble member.

    It provides the hooks, and results.json. A single run is handled as the only member of an
    ensemble without names, so lists by member then have one entry.
    """

    built: Built
    corpus: Corpus
    run: Run
    checkpoints: RunCheckpoints
    log: RunLog
    # Called while a split is scored.
    stop_requested: Callable[[], Any]
    # Made by `make_sampler` if `train.sample_every` is set, otherwise None.
    sampler: Callable[..., list[bytes]] | None = None
    # Whether the last evaluation was interrupted. A resumed run repeats it.
    pending: bool = False
    # Changes of `train.steps`, as dicts with the keys "step" (updates done when the change came),
    # "name", "old" and "new".
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.results_path = os.path.join(self.run.path, RESULTS)
        self._config = self.built.config
        self._members = self.built.members
        # The validation losses so far, by member.
        self.losses: list[list[float]] = [[] for _ in self._members.labels]
        self._vocabulary = self.corpus.vocabulary
        self._measure = self._vocabulary.measure
        # Scores at other evaluation settings are not comparable.
        self._eval_settings = training_settings(self._config.eval)

    @property
    def out_of_patience(self) -> bool:
        """Whether none of the last `patience` validation losses improved on the best before."""
        patience = self._config.train.patience
        if not patience:
            return False
        [losses] = self.losses  # Ensembles have no patience.
        return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])

    def read_losses(self) -> None:
        """Reads the recorded losses, except those at other evaluation settings."""
        recorded = distributed.broadcast_from_primary(self._recorded_losses)
        for index, losses in enumerate(recorded):
            is_comparable = self._best(index) is not None
            self.losses[index] = losses if is_comparable else []

    def _recorded_losses(self) -> list[list[float]]:
        """Returns the validation losses in metrics.jsonl, by member."""
        losses: dict[str | None, list[float]] = {label: [] for label in self._members.labels}
        for record in read_metrics(self.run.path):
            label = record.get("member")
            if record["kind"] == "valid" and label in losses:
                losses[label].append(record["loss"])
        return list(losses.values())

    def hooks(self) -> list[Hook]:
        """Returns the hooks that run every `eval_every` steps, in this order."""
        actions: list[Callable[[HookContext], TrainState | None]] = [self.evaluate]
        if self._config.average.nt_asgd_patience:
            actions.append(self.start_averaging)
        if self.sampler is not None:
            storage.make_folder(os.path.join(self.run.path, "samples"))
            actions.append(self.sample)
        return [Hook(self._config.train.eval_every, action) for action in actions]

    def evaluate(self, context: HookContext) -> None:
        """Scores the validation split, and saves a member's parameters if they are the best so far.

        Requests a stop when the patience is used up.
        """
        # True until all members are scored: a checkpoint written now must record it.
        self.pending = True
        params_by_member = self._members.split(context.state.scored_params)
        scores = self._score(Split.VALID, params_by_member, prefix=f"step {context.step}: ")
        if scores is None:
            # A resumed run scores all members again.
            return
        self.pending = False

        for index, score in enumerate(scores):
            self._compare_with_best(context, index, params_by_member[index], score)
            self.losses[index].append(score.totals.nll)
        if self.out_of_patience:
            context.request_stop()

    def _compare_with_best(
        self, context: HookContext, index: int, params: Any, score: _Score
    ) -> None:
        """Records a member's score, and saves its parameters if they are the best so far."""
        totals = score.totals
        best = self._best(index)
        record = as_record(totals, self._vocabulary)
        context.record("valid", record, member=self._members.labels[index])

        # The best parameters of this same step are written again, because a kill may have happened
        # before their digests were written.
        if best is None or totals.nll < best["loss"] or best["step"] == context.step:
            context.log(f"{score.line}  best so far")
            result = as_result(totals, self._vocabulary)
            notes = {"step": context.step, **result, "eval": self._eval_settings}
            self.checkpoints.save_best(index, context.step, params, notes)
        else:
            best_loss = Totals(best["loss"], 1).format(self._measure)
            context.log(f"{score.line}  best {best_loss} at step {best['step']}")

    def _score(
        self, split: Split, params_by_member: Sequence[Any], *, prefix: str = ""
    ) -> list[_Score] | None:
        """Scores a split with each member's parameters.

        Args:
          split: The validation or the test split.
          params_by_member: The parameters of each member.
          prefix: Begins the lines about the scores.

        Returns:
          A score for each member, or None if a stop was requested meanwhile.
        """
        if split is Split.TEST:
            tokens = self.corpus.test
        else:
            tokens = self.corpus.valid[: self._config.eval.valid_tokens]

        scores = []
        try:
            for index, params in enumerate(params_by_member):
                totals, line = score_with_line(
                    self.built,
                    params,
                    tokens,
                    name=f"{prefix}{self._members.prefix(index)}{split}",
                    vocabulary=self._vocabulary,
                    log=self.log.print,
                    stop_requested=self.stop_requested,
                )
                scores.append(_Score(totals, line))
        except Interrupted:
            return None
        return scores

    def start_averaging(self, context: HookContext) -> TrainState | None:
        """Starts weight averaging (NT-ASGD) in members whose validation loss stopped improving.

        Returns the state with the averages that have started, or None if nothing is averaged or the
        evaluation was cut short.
        """
        patience = self._config.average.nt_asgd_patience or 0
        average = context.state.average
        if self.pending or average is None:
            return None

        for index, losses in enumerate(self.losses):
            if weight_averaging.has_begun(average, index):
                continue
            if weight_averaging.is_due(losses, patience):
                context.log(
                    f"note      {self._members.prefix(index)}weight averaging starts: "
                    f"no better loss than {patience} evaluations ago"
                )
                average = weight_averaging.begin(average, context.step, index)
        return dataclasses.replace(context.state, average=average)

    def sample(self, context: HookContext) -> None:
        """Writes a sample from the evaluated parameters (for an ensemble, the first member's)."""
        is_last = context.step == self._config.train.steps
        is_due = is_last or context.step % (self._config.train.sample_every or 1) == 0
        if self.pending or not is_due or self.sampler is None:
            return

        params = self._members.take(context.state.scored_params, 0)
        text = as_file(self.sampler(self.built, params, self.stop_requested))
        path = os.path.join(self.run.path, "samples", f"step-{context.step}.txt")
        distributed.broadcast_from_primary(lambda: storage.write(path, text))
        lines = [printable(line) for line in text.splitlines()]
        context.log("\n".join([f"sample    {path}", *lines]))
        context.text("sample", text.decode(errors="replace"))

    def _best(self, index: int) -> dict[str, Any] | None:
        """Returns step and scores of a member's best parameters so far.

        Returns None if they do not exist, or were scored at other evaluation settings.
        """
        return distributed.broadcast_from_primary(lambda: self._comparable_best(index))

    def _comparable_best(self, index: int) -> dict[str, Any] | None:
        """Does the work of `_best`, in process 0."""
        try:
            notes = self.checkpoints.best[index].notes()
        except CheckpointError as error:
            self.log.note(f"{error} The best checkpoint is chosen again from this step.")
            return None
        if notes is None or is_same_in_training(notes["eval"], self._config.eval):
            return notes
        self.log.note(
            f"the best step is chosen again: step {notes['step']} was scored with other "
            "--eval settings"
        )
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the run's metadata, which is the first part of results.json.

        It describes the text, the size, and the weights that the run began with.
        """
        facts: dict[str, Any] = {
            "corpus": self.corpus.name,
            "text": self.corpus.description,
            "parameters": self.built.num_parameters,
        }
        if self.run.warm_start:
            facts["warm_start"] = dict(self.run.warm_start)
        return facts

    def results_after(self, step: int) -> dict[str, Any] | None:
        """Returns the results after `step` updates, or None if there are no results.

        Only results at these evaluation settings count.
        """
        results = read_results(self.run.path)
        try:
            is_same = results["steps"] == step and is_same_in_training(
                results["eval"], self._config.eval
            )
        except (KeyError, TypeError, AttributeError):
            # The file is missing or corrupted, and is written again.
            return None
        return results if is_same else None

    def make_results(self, step: int, state: TrainState) -> dict[str, Any] | None:
        """Scores the test split with each member's best parameters, and writes results.json.

        Returns the results, or None if a stop was requested meanwhile.
        """
        best_by_member = []
        params_by_member = []
        for index in range(len(self._members)):
            best, params = self._best_or_last(index, state)
            best_by_member.append(best)
            params_by_member.append(params)
        scores = self._score(Split.TEST, params_by_member)
        if scores is None:
            return None

        results = []
        for index, score in enumerate(scores):
            self._record_test(step, index, score)
            best = best_by_member[index]
            best_step = step if best is None else best["step"]
            test = {"step": best_step, **as_result(score.totals, self._vocabulary)}
            results.append({"best_valid": best, "test": test})

        content = self.facts
        content["steps"] = step
        if self.changes:
            content["changes"] = self.changes
        if self._members.names:
            content["members"] = self._members.to_json(results)
        else:
            content |= results[0]
        content["eval"] = self._eval_settings
        content |= environment.describe()
        distributed.broadcast_from_primary(lambda: self._write_results(content))
        self.log.print(f"results   {self.results_path}")
        return content

    def _best_or_last(self, index: int, state: TrainState) -> tuple[dict[str, Any] | None, Any]:
        """Returns the scores and the parameters of a member's best checkpoint.

        Without a readable checkpoint, returns None and the last parameters.
        """
        abstract = {"params": self.built.abstract_state.params}
        try:
            restored = self.checkpoints.best[index].restore(abstract)
        except CheckpointError as error:
            self.log.note(f"{error} The parameters of the last step are used instead.")
            restored = None
        if restored is None:
            return None, self._members.take(state.scored_params, index)
        _, saved, notes = restored
        scores = {name: value for name, value in notes.items() if name != "eval"}
        return scores, saved["params"]

    def _record_test(self, step: int, index: int, score: _Score) -> None:
        """Records and logs a member's score of the test split."""
        record = as_record(score.totals, self._vocabulary)
        self.log.record("test", step, record, member=self._members.labels[index])
        self.log.print(score.line)
        if score.totals.diverged:
            self.log.note(
                "the run diverged. Try a lower --optimizer.learning_rate, in a new --workdir."
            )

    def _write_results(self, content: dict[str, Any]) -> None:
        # With results.json the run counts as finished, so its records must be safe by then.
        self.log.seal()
        write_json(self.results_path, content)
