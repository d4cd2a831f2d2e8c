"""results.json: the scores of the best parameters on the test text, of a run or of each member of an ensemble."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.errors import CheckpointError
from txl_jax.runtime import distributed, environment
from txl_jax.runtime.files import write_json
from txl_jax.runtime.metrics_log import MetricsLog
from txl_jax.training.run_checkpoints import RunCheckpoints
from txl_jax.training.scores import as_record, as_result, format_scores, with_duration
from txl_jax.training.state import TrainState
from txl_jax.training.task import TrainTask
from txl_jax.training.validation import Validation, with_defaults

RESULTS = "results.json"


class Results:
    """Makes results.json, and reads what is there."""

    def __init__(
        self,
        task: TrainTask,
        workdir: Path,
        checkpoints: RunCheckpoints,
        validation: Validation,
        note: Callable[[str], None],
    ):
        self.path = workdir / RESULTS
        self._task = task
        self._checkpoints = checkpoints
        self._validation = validation
        self._note = note

    def on_disk(self, step: int) -> dict[str, Any] | None:
        """Reads results of `step` updates that were scored with these evaluation settings; None: there are none."""
        try:
            results = json.loads(self.path.read_text())
            same = results["steps"] == step and with_defaults(results["eval"]) == self._validation.eval_settings
        except (OSError, ValueError, KeyError, TypeError):  # There is none, or it is damaged: it is made again.
            return None
        return results if same else None

    def make(self, step: int, state: TrainState, log: MetricsLog) -> dict[str, Any] | None:
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
        log.seal()
        distributed.broadcast_from_primary(lambda: write_json(self.path, results))
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
