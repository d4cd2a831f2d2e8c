"""Scoring while a run trains and at its end.

It covers the best parameters, weight averaging, early stopping, and results.json.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from txl_jax.config import config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.errors import CheckpointError
from txl_jax.metrics import Totals
from txl_jax.runs.build import Built
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.generate import as_file
from txl_jax.runs.run import RESULTS, Run, read_results
from txl_jax.runs.score import Interrupted, Split, as_record, as_result, printable, score_with_line
from txl_jax.runtime import distributed, environment, storage
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.storage import write_json
from txl_jax.training import weight_averaging
from txl_jax.training.hooks import Hook, HookContext
from txl_jax.training.step import TrainState


@dataclasses.dataclass(eq=False, repr=False)
class Validation:
    """Scoring of the splits with the parameters of a run, or of each ensemble member.

    It provides the hooks, and results.json.
    """

    built: Built
    corpus: Corpus
    run: Run
    checkpoints: RunCheckpoints
    log: RunLog
    stop_requested: Callable[[], Any]
    # Of `make_sampler`, with `train.sample_every`.
    sampler: Callable[..., list[bytes]] | None = None
    # Whether the last evaluation was cut short. A resumed run repeats it.
    pending: bool = False
    # Changes of `train.steps`: [{"step": after which it came, "name": .., "old": .., "new": ..},
    # ..].
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        # Of validation, by member.
        self.losses: list[list[float]] = [[] for _ in self.built.members.labels]
        self.results_path = os.path.join(self.run.path, RESULTS)
        self._config = self.built.config
        self._members = self.built.members
        self._vocabulary, self._measure = self.corpus.vocabulary, self.corpus.vocabulary.measure
        # Scores at other evaluation settings are not comparable.
        self._eval_settings = config_tree.to_dict(self._config.eval)

    @property
    def out_of_patience(self) -> bool:
        """Returns whether the last `patience` validation losses did not improve on the best.

        This is the case if all of them were no better than the best loss before them.
        """
        patience = self._config.train.patience
        if not patience:
            return False
        [losses] = self.losses  # Ensembles have no patience.
        return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])

    def read_losses(self) -> None:
        """Reads the recorded losses, but not those at other evaluation settings."""

        def recorded() -> list[list[float]]:
            valid = [record for record in read_metrics(self.run.path) if record["kind"] == "valid"]
            of_members = [
                [each for each in valid if each.get("member") == label]
                for label in self._members.labels
            ]
            return [[record["loss"] for record in records] for records in of_members]

        found = distributed.broadcast_from_primary(recorded)
        self.losses = [
            [] if self._best(index) is None else losses for index, losses in enumerate(found)
        ]

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
        self.pending = True  # Until it is done: a checkpoint written now must record it.
        of_members = self._members.split(context.state.scored_params)
        scored = self._score(Split.VALID, of_members, prefix=f"step {context.step}: ")
        if scored is None:  # All members are scored again when the run is resumed.
            return
        self.pending = False
        for index, (totals, line) in enumerate(scored):
            best = self._best(index)
            context.record(
                "valid", as_record(totals, self._vocabulary), member=self._members.labels[index]
            )
            # Those of this very step are written again: a kill may have come before they had their
            # digests.
            if best is None or totals.nll < best["loss"] or best["step"] == context.step:
                context.log(f"{line}  best so far")
                notes = {
                    "step": context.step,
                    **as_result(totals, self._vocabulary),
                    "eval": self._eval_settings,
                }
                self.checkpoints.save_best(index, context.step, of_members[index], notes)
            else:
                context.log(
                    f"{line}  best {Totals(best['loss'], 1).format(self._measure)} at step "
                    f"{best['step']}"
                )
            self.losses[index].append(totals.nll)
        if self.out_of_patience:
            context.request_stop()

    def _score(
        self, split: Split, of_members: Sequence[Any], *, prefix: str = ""
    ) -> list[tuple[Totals, str]] | None:
        """Scores a split with each member's parameters.

        Returns the scores and a line about them for each member, or None if stopped.
        """
        tokens = (
            self.corpus.test
            if split is Split.TEST
            else self.corpus.valid[: self._config.eval.valid_tokens]
        )
        options: dict[str, Any] = {"log": self.log.print, "stop_requested": self.stop_requested}
        names = [
            f"{prefix}{self._members.prefix(index)}{split}" for index in range(len(of_members))
        ]
        try:
            return [
                score_with_line(
                    self.built, params, tokens, name=name, vocabulary=self._vocabulary, **options
                )
                for name, params in zip(names, of_members, strict=True)
            ]
        except Interrupted:
            return None

    def start_averaging(self, context: HookContext) -> TrainState | None:
        """Starts weight averaging (NT-ASGD) in members whose validation loss stopped improving."""
        trigger, average = self._config.average.nt_asgd_patience or 0, context.state.average
        if self.pending or average is None:
            return None
        for index, losses in enumerate(self.losses):
            if not weight_averaging.has_begun(average, index) and weight_averaging.is_due(
                losses, trigger
            ):
                context.log(
                    f"note      {self._members.prefix(index)}weight averaging starts: "
                    f"no better loss than {trigger} evaluations ago"
                )
                average = weight_averaging.begin(average, context.step, index)
        return dataclasses.replace(context.state, average=average)

    def sample(self, context: HookContext) -> None:
        """Writes a sample from the evaluated parameters, in an ensemble the first member's."""
        due = (
            context.step % (self._config.train.sample_every or 1) == 0
            or context.step == self._config.train.steps
        )
        if self.pending or not due or self.sampler is None:
            return
        params = self._members.take(context.state.scored_params, 0)
        text = as_file(self.sampler(self.built, params, self.stop_requested))
        path = os.path.join(self.run.path, "samples", f"step-{context.step}.txt")
        distributed.broadcast_from_primary(lambda: storage.write(path, text))
        context.log("\n".join([f"sample    {path}", *map(printable, text.splitlines())]))
        context.text("sample", text.decode(errors="replace"))

    def _best(self, index: int) -> dict[str, Any] | None:
        """Returns step and scores of the best parameters so far, or None if none are comparable."""

        def comparable() -> dict[str, Any] | None:
            try:
                notes = self.checkpoints.best[index].notes()
            except CheckpointError as error:
                self.log.note(f"{error} The best checkpoint is chosen again from this step.")
                return None
            if notes is None or notes["eval"] == self._eval_settings:
                return notes
            self.log.note(
                f"the best step is chosen again: step {notes['step']} was scored with other "
                "--eval settings"
            )
            return None

        return distributed.broadcast_from_primary(comparable)

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the run's metadata, which is the first part of results.json.

        It describes the text, the size, and the weights that the run began with.
        """
        corpus, weights = self.corpus, self.run.warm_start
        facts = {
            "corpus": corpus.name,
            "text": corpus.description,
            "parameters": self.built.num_parameters,
        }
        return facts | ({"warm_start": dict(weights)} if weights else {})

    def results_after(self, step: int) -> dict[str, Any] | None:
        """Returns the results after `step` updates, or None if there are no results.

        Only results at these evaluation settings count.
        """
        results = read_results(self.run.path)
        try:
            same = results["steps"] == step and results["eval"] == self._eval_settings
        except (KeyError, TypeError, AttributeError):
            # The file is missing, or corrupted: it is made again.
            return None
        return results if same else None

    def make_results(self, step: int, state: TrainState) -> dict[str, Any] | None:
        """Scores the test split with each member's best parameters.

        Returns None if a stop was requested meanwhile.
        """
        best, of_members = zip(
            *(self._best_or_last(i, state) for i in range(len(self._members))), strict=True
        )
        scored = self._score(Split.TEST, of_members)
        if scored is None:
            return None
        results = []
        for label, own, (totals, line) in zip(self._members.labels, best, scored, strict=True):
            self.log.record("test", step, as_record(totals, self._vocabulary), member=label)
            self.log.print(line)
            if totals.diverged:
                self.log.note(
                    "the run diverged. Try a lower --optimizer.learning_rate, in a new --workdir."
                )
            test = as_result(totals, self._vocabulary)
            results.append(
                {"best_valid": own, "test": {"step": own["step"] if own else step, **test}}
            )
        content = {
            **self.facts,
            "steps": step,
            **({"changes": self.changes} if self.changes else {}),
            **({"members": self._members.to_json(results)} if self._members.names else results[0]),
            "eval": self._eval_settings,
            **environment.describe(),
        }

        def write() -> None:
            self.log.seal()
            write_json(self.results_path, content)

        distributed.broadcast_from_primary(write)
        self.log.print(f"results   {self.results_path}")
        return content

    def _best_or_last(self, index: int, state: TrainState) -> tuple[dict[str, Any] | None, Any]:
        """Returns the scores and the parameters of the best checkpoint.

        If the checkpoint is unreadable, returns None and the last parameters.
        """
        try:
            restored = self.checkpoints.best[index].restore(
                {"params": self.built.abstract_state.params}
            )
        except CheckpointError as error:
            self.log.note(f"{error} The parameters of the last step are used instead.")
            restored = None
        if restored is None:
            return None, self._members.take(state.scored_params, index)
        _, saved, notes = restored
        return {name: value for name, value in notes.items() if name != "eval"}, saved["params"]
