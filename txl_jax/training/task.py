"""Everything that a trainer runs but does not own: config, compiled step, segments, scoring."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from txl_jax.config import ExperimentConfig
from txl_jax.metrics import Measure, Totals
from txl_jax.segments import Segments
from txl_jax.training.members import Members
from txl_jax.training.progress import StepCost
from txl_jax.training.state import TrainState
from txl_jax.training.step import TrainStep


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
