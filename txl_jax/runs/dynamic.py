"""Dynamic evaluation of a trained model, which learns from a text while it scores it.

`evaluation.dynamic` defines the update. This module builds a trained model for it, and copies its
parameters for each text or document, so that each starts from the trained parameters and the run
does not change.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from txl_jax.config import DynamicConfig, DynamicRule, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.errors import NonFiniteError
from txl_jax.evaluation import dynamic
from txl_jax.evaluation.streaming import EvalStep, SegmentLosses, evaluate
from txl_jax.metrics import Measure, Totals
from txl_jax.runs.build import Built, shardings_of
from txl_jax.runs.run import Run
from txl_jax.runs.scoring_progress import Interrupted, progress_bar
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed
from txl_jax.training.step import TrainState


class NamedDocument(NamedTuple):
    """A document and its name in errors."""

    name: str
    ids: np.ndarray  # Integers [T].


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicModel:
    """A trained model that learns from the text that it scores."""

    # Built as a training at the lengths of evaluation (`dynamic.training_config`), whose optimizer
    # is the update rule.
    built: Built
    # The trained parameters. They are never changed.
    params: Any
    # The sum of squared gradients of training text, for the rule RMS, or None.
    statistics: Any = None

    @property
    def settings(self) -> DynamicConfig:
        """The rule and its settings."""
        return self.built.config.eval.dynamic

    def start(self) -> TrainState:
        """Returns the state before the first segment of a text: the trained parameters."""
        return self._make_state(self.params, self.statistics)

    def _require_statistics(self) -> None:
        """Raises `UserError` if the rule RMS has no statistics."""
        require(
            self.settings.rule is not DynamicRule.RMS or self.statistics is not None,
            "eval.dynamic.rule=rms requires squared gradients of training text, which this model "
            "lacks. Use eval.dynamic.rule=rmsprop, which takes them from the text that it reads.",
        )

    @functools.cached_property
    def _make_state(self) -> Callable[[Any, Any], TrainState]:
        """The jitted function that creates a separate state from parameters and statistics."""

        def make_state(params: Any, statistics: Any) -> TrainState:
            # Copies, because the step donates its state. The rule makes another copy of the
            # parameters that it pulls toward.
            state = self.built.traced_state(jax.tree.map(jnp.copy, params))
            if statistics is None:
                return state
            return dynamic.with_statistics(state, jax.tree.map(jnp.copy, statistics))

        return self.built.jit(make_state, out_shardings=shardings_of(self.built.abstract_state))

    @functools.cached_property
    def step(self) -> EvalStep:
        """The jitted function that scores S segments and learns from each. The state is donated."""
        step = dynamic.make_dynamic_step(self.built.model, self.built.optimizer, self.built.config)
        # The state must leave a call with the shardings that the next one expects.
        shardings = (shardings_of(self.built.abstract_state), None)
        return self.built.jit(step, donate_argnums=1, out_shardings=shardings)

    def score(
        self,
        tokens: Any,
        *,
        name: str,
        measure: Measure = Measure.BPC,
        log: Callable[[str], None],
        stop_requested: Callable[[], Any] = lambda: False,
        token_nats: np.ndarray | None = None,
    ) -> Totals:
        """Computes the losses of a text, and learns from each segment after it is scored.

        The arguments are the same as for `runs.score.score`, without the parameters. The first
        token is not scored.

        Args:
          tokens: Ids [T] of the text.
          name: Name of the text, for progress and errors.
          measure: The measure in which progress is shown.
          log: Receives a line of progress.
          stop_requested: Is called after each call.
          token_nats: Floats [T] that receive each token's loss in nats, or None.

        Returns:
          The sum of the losses, and the number of scored tokens.

        Raises:
          Interrupted: If a stop was requested. The scores so far are logged.
          NonFiniteError: If the loss of a segment is nan or infinite.
          UserError: If the rule RMS has no statistics.
        """
        self._require_statistics()
        batch_size = self.built.config.eval.batch_size
        reader = self.built.evaluation_reader(tokens)
        if reader.n_segments == 1:
            log(
                f"note      {name}: nothing is learned before it is scored, because each of the "
                f"{batch_size} rows has only one segment. Lower --eval.batch_size or "
                "--eval.segment_len."
            )

        def after_call(n_segment: int, totals: Totals) -> None:
            # `stop_requested` is not passed to the bar, which would stop without a line about the
            # scores so far.
            if stop_requested():
                log(
                    f"{name}: {totals.format(measure)} up to segment {n_segment:,} of "
                    f"{reader.n_segments:,} ({totals.tokens:,.0f} tokens)"
                )
                raise Interrupted(name)
            show(n_segment, totals)

        with progress_bar(
            name, reader.n_segments, unit="segment", measure=measure, log=log
        ) as show:
            return evaluate(
                self.step,
                None,
                self.start(),
                reader,
                place=functools.partial(self.built.place, batch_size=batch_size),
                after_call=after_call,
                check_nats=functools.partial(self._check_finite, name),
                token_nats=token_nats,
            )

    def score_documents(self, documents: Iterable[NamedDocument]) -> Iterator[np.ndarray]:
        """Yields the losses of each document in nats [T - 1], scored before they are learned.

        Each document starts from an empty memory and the trained parameters. With
        `eval.dynamic.shared` it starts from the parameters and the rule's state that the previous
        document left.

        The model must be built for the lengths of `document_config` below. One compiled function
        reads a segment of any document. A document's losses are yielded before the next document is
        requested.

        Raises:
          UserError: If the rule RMS has no statistics.
          NonFiniteError: If the loss of a segment is nan or infinite. The losses of the documents
            before it were yielded.
        """
        self._require_statistics()
        config = self.built.config
        # Losses of 16-bit models are float32.
        dtype = np.dtype(jnp.promote_types(jnp.float32, config.model.dtype))
        # The state after the previous document, or None to start from the trained parameters.
        left: TrainState | None = None
        for document in documents:
            # The first token is not scored, so there may be nothing to read.
            nats = np.zeros(max(len(document.ids) - 1, 0), dtype)
            if len(nats):
                state = self.start() if left is None else left
                left = self._read_document(state, document, nats)
                if not self.settings.shared:
                    left = None
            yield nats

    def _read_document(
        self, state: TrainState, document: NamedDocument, nats: np.ndarray
    ) -> TrainState:
        """Scores a document and learns from it. Returns the state after it.

        Args:
          state: The state before the document, which is donated. The first segment's reset bit
            empties its memory.
          document: At least two tokens.
          nats: Floats [T - 1], which receive the losses.

        Raises:
          NonFiniteError: If the loss of a segment is nan or infinite.
        """
        segment_len = self.built.config.eval.segment_len
        reader = self.built.evaluation_reader(document.ids)

        def fetch(number: int, losses: SegmentLosses) -> None:
            self._check_finite(document.name, number, distributed.to_host(losses.nats))
            first = number * segment_len
            n_scored = len(nats[first : first + segment_len])
            # [S, B, L], of one segment and one row.
            nll = distributed.to_host(losses.nll)
            nats[first : first + n_scored] = nll[0, 0, :n_scored]

        # One segment per call, so that short documents do not compute gradients of padding.
        running: SegmentLosses | None = None
        for number in range(reader.n_segments):
            segment = self.built.place(reader.segments(number, 1), batch_size=1)
            state, losses = self.step(None, state, segment)
            # Losses are fetched one call late, so that the device never waits for the host.
            if running is not None:
                fetch(number - 1, running)
            running = losses
        assert running is not None, "a document of two tokens has a segment"
        fetch(reader.n_segments - 1, running)
        return state

    def _check_finite(self, name: str, first_segment: int, nats: np.ndarray) -> None:
        """Raises `NonFiniteError` if the loss of a segment is nan or infinite.

        Args:
          name: Name of the text.
          first_segment: Number of the first segment of a call in the text.
          nats: Floats [S], the losses of the call's segments.
        """
        for number, segment_nats in enumerate(nats.tolist(), start=first_segment):
            if not math.isfinite(segment_nats):
                # The learning rate does not affect the first loss, unless documents share state.
                if number == 0 and not self.settings.shared:
                    raise NonFiniteError(
                        f"{name}: the loss of segment 0 is {segment_nats} before anything is "
                        "learned, so these parameters cannot be used"
                    )
                raise NonFiniteError(
                    f"{name}: the loss of segment {number:,} is {segment_nats}, with "
                    f"eval.dynamic.rule={self.settings.rule} and "
                    f"eval.dynamic.learning_rate={self.settings.learning_rate:g}. "
                    "Lower --eval.dynamic.learning_rate."
                )


def document_config(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config for which `DynamicModel.score_documents` must be built.

    It has the lengths of `eval`, for one document at a time.
    """
    return config_tree.replace(config, {"eval.batch_size": 1})


def build_to_learn(trained: TrainedModel) -> Built:
    """Builds a trained model for dynamic evaluation by its `eval.dynamic`. All processes call it.

    Raises:
      UserError: If settings do not match the devices.
    """
    config = dynamic.training_config(trained.config)
    return built_with_rule(TrainedModel.of(trained, config).build(uses=["training"]))


@dataclasses.dataclass(frozen=True)
class BuiltToLearn(Built):
    """A model that is built for dynamic evaluation. Its optimizer is an update rule.

    Its config is a result of `dynamic.training_config`.
    """

    # Turns gradients into updates.
    rule: optax.GradientTransformation = dataclasses.field(kw_only=True)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The rule."""
        return self.rule


def built_with_rule(built: Built, rule: optax.GradientTransformation | None = None) -> Built:
    """Returns a model built for `dynamic.training_config`, with a rule as its optimizer.

    None means the rule of its settings.
    """
    if rule is None:
        rule = dynamic.make_rule(built.config.eval.dynamic)
    return BuiltToLearn(
        config=built.config,
        model=built.model,
        mesh=built.mesh,
        attention=built.attention,
        remat=built.remat,
        rule=rule,
    )


def check_can_learn(trained: TrainedModel) -> None:
    """Raises `UserError` if a member of an ensemble would learn from averaged checkpoints."""
    settings = trained.config.eval
    is_member = isinstance(trained.source, Run) and trained.source.member is not None
    require(
        settings.dynamic.rule is None or not settings.average_checkpoints or not is_member,
        f"eval.average_checkpoints must be none for eval.dynamic.rule={settings.dynamic.rule} with "
        f"a member of an ensemble, got {settings.average_checkpoints}. Split the member off first "
        "(python -m experiments.ensemble --mode=split).",
    )
