"""Dynamic evaluation: the model continues to learn from the text that it scores.

Krause et al., 2018 (arXiv:1709.07432), and for Transformer-XL 2019 (arXiv:1904.08378). A text is
read segment by segment. Each segment is scored first, with the current parameters. Then one
gradient step of its mean loss changes them, and the memory is carried to the next segment. No token
is therefore scored after it was learned.

The update is training's (`training.step.make_update`) with the lengths of evaluation, without
dropout and penalties, and with one of the rules of `make_rule` as its optimizer. As published, the
memory keeps the states that earlier parameters computed.

With multiple rows, the gradient is the mean over all of their tokens, and all rows share one set of
parameters. The published results use one row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import (
    AverageConfig,
    DynamicConfig,
    DynamicRule,
    ExperimentConfig,
    LossPart,
    RegularizationConfig,
    config_tree,
)
from txl_jax.evaluation.streaming import EvalStep, SegmentLosses
from txl_jax.modules import AnyModel
from txl_jax.recurrence import Segments
from txl_jax.training.step import TrainState, make_update

# Decay of RMSprop's mean of squared gradients for each update: Adam's usual b2.
_RMSPROP_DECAY = 0.999


def training_config(config: ExperimentConfig) -> ExperimentConfig:
    """Returns a config whose training step is the update of dynamic evaluation with `config`.

    It has the lengths and batch size of `eval`, a loss over all positions (without `train.stride`),
    and nothing else that training adds to a gradient. Gradient clipping, weight decay and schedule
    belong to the optimizer, which a rule of `make_rule` replaces.
    """
    lengths = config.eval
    changes = {
        "train.batch_size": lengths.batch_size,
        "train.segment_len": lengths.segment_len,
        "train.mem_len": lengths.mem_len,
        "train.clamp_len": lengths.clamp_len,
        "train.same_length": lengths.same_length,
        "train.stride": None,
        "train.loss": LossPart.FULL,
        "train.grad_accum_steps": 1,
        "regularization": RegularizationConfig(),
        "average": AverageConfig(),
    }
    return config_tree.replace(config, changes)


class RuleState(NamedTuple):
    """The state of a rule."""

    # int32 [], number of updates.
    updates: jax.Array
    # Parameters before the first update, or None if nothing pulls toward them.
    trained: Any
    # Squared gradients of each parameter, or None for SGD. For RMS their sum over segments of
    # training text, which `with_statistics` sets. For RMSprop their moving average, from 0 on.
    squares: Any


def make_rule(dynamic: DynamicConfig) -> optax.GradientTransformation:
    """Returns the update rule of dynamic evaluation as an optimizer.

    With the gradient g, the trained parameters p0 and the learning rate r, elementwise:

        sgd        p <- p - r g                     + min(decay, 1) (p0 - p)
        rms        p <- p - r g / (sqrt(s) + eps)   + min(decay sqrt(s), 1) (p0 - p)
        rmsprop    p <- p - r g / (sqrt(v) + eps)   + min(decay sqrt(v) / mean(sqrt(v)), 1) (p0 - p)

    s is the sum of the squared gradients of segments of training text, as in the authors' scripts
    (their first paper divides by the root of the mean, which is the same up to the scale of
    learning rate, epsilon and decay). v is the moving average of the squared gradients of the text
    that is read, with Adam's correction of its bias, and mean(sqrt(v)) is over all parameters. A
    pull above 1 would oscillate around p0.
    """
    has_pull = dynamic.decay > 0
    has_squares = dynamic.rule is not DynamicRule.SGD

    def init(params: Any) -> RuleState:
        # A copy, because the updated parameters are donated to the next step.
        return RuleState(
            updates=jnp.zeros((), jnp.int32),
            trained=jax.tree.map(jnp.copy, params) if has_pull else None,
            squares=jax.tree.map(jnp.zeros_like, params) if has_squares else None,
        )

    def update(grads: Any, state: RuleState, params: Any = None) -> tuple[Any, RuleState]:
        state = state._replace(updates=state.updates + 1)
        squares = state.squares
        if dynamic.rule is DynamicRule.RMSPROP:
            # Like `optax.scale_by_adam` with b1 = 0, which does not return the roots.
            moving_average = optax.tree.update_moment_per_elem_norm(
                grads, state.squares, _RMSPROP_DECAY, 2
            )
            state = state._replace(squares=moving_average)
            squares = optax.tree.bias_correction(moving_average, _RMSPROP_DECAY, state.updates)

        if dynamic.rule is DynamicRule.SGD:
            steps = grads
            pulls = jax.tree.map(lambda grad: min(dynamic.decay, 1.0), grads)
        else:
            roots = jax.tree.map(jnp.sqrt, squares)
            steps = _divided(grads, roots, dynamic.epsilon)
            strength: float | jax.Array = dynamic.decay
            if dynamic.rule is DynamicRule.RMSPROP:
                # Relative to the mean, the same decay suits texts with large and small gradients.
                # The published decays of RMS are for the roots themselves.
                strength = dynamic.decay / _mean(roots)
            pulls = _at_most_1(strength, roots)

        changes = jax.tree.map(lambda step: -dynamic.learning_rate * step, steps)
        if has_pull:
            changes = jax.tree.map(
                lambda change, pull, trained, now: change + pull * (trained - now),
                changes,
                pulls,
                state.trained,
                params,
            )
        return changes, state

    return optax.GradientTransformation(init, update)


def _divided(grads: Any, roots: Any, epsilon: float) -> Any:
    return jax.tree.map(lambda grad, root: grad / (root + epsilon), grads, roots)


def _at_most_1(strength: float | jax.Array, roots: Any) -> Any:
    """Returns the fraction by which each parameter is pulled back, at most 1."""
    return jax.tree.map(lambda root: jnp.minimum(strength * root, 1), roots)


def _mean(tree: Any) -> jax.Array:
    """Returns the mean over all elements of all arrays, or 1 if all of them are 0.

    With 1, a tree of zeros can be divided by its mean.
    """
    leaves = jax.tree.leaves(tree)
    total = sum(jnp.sum(leaf) for leaf in leaves)
    mean = total / sum(leaf.size for leaf in leaves)
    return jnp.where(mean > 0, mean, 1)


def sum_squared_gradients() -> optax.GradientTransformation:
    """Returns an optimizer that only sums squared gradients in its state, without any update.

    With it, `make_dynamic_step` over training text computes the statistics of the rule RMS: for
    each parameter the sum over segments of the squared gradient of the segment's mean loss.
    """

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        sums = jax.tree.map(lambda squares, grad: squares + grad**2, state, grads)
        no_change = jax.tree.map(jnp.zeros_like, grads)
        return no_change, sums

    return optax.GradientTransformation(init, update)


def with_statistics(state: TrainState, statistics: Any) -> TrainState:
    """Returns the state with the sum of squared gradients that the rule RMS divides by."""
    opt_state = state.opt_state._replace(squares=statistics)
    return dataclasses.replace(state, opt_state=opt_state)


def make_dynamic_step(
    model: AnyModel, rule: optax.GradientTransformation, config: ExperimentConfig
) -> EvalStep:
    """Returns a function that scores S segments and learns from each, ready for `jax.jit`.

    It is an `EvalStep` for `streaming.evaluate`. Instead of prepared parameters it takes None, and
    instead of a memory the whole `TrainState`, with the parameters, the rule's state and the
    memory. That state is to be donated.

    Args:
      model: The model, built for `config`.
      rule: The result of `make_rule` or `sum_squared_gradients`.
      config: The result of `training_config`.
    """
    # Only for the metrics: the rule itself multiplies by the rate.
    schedule = optax.constant_schedule(config.eval.dynamic.learning_rate)
    # Evaluation does not use dropout, and the metrics include the losses of all positions.
    update = make_update(model, rule, schedule, config, in_evaluation=True)

    def score_then_learn(state: TrainState, segment: Segments) -> tuple[TrainState, SegmentLosses]:
        # The gradient is taken at the parameters that have scored the segment.
        after, metrics = update(state, segment)

        # A segment without a scored token, such as warm-up or padding after the text, teaches
        # nothing. Its gradient is 0, but the pull and RMSprop's average would still change the
        # parameters and the rule's state. Only the memory and the number of segments are kept.
        learns = metrics.tokens > 0

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(learns, new, old)

        state = dataclasses.replace(
            after,
            params=jax.tree.map(choose, after.params, state.params),
            opt_state=jax.tree.map(choose, after.opt_state, state.opt_state),
        )
        assert metrics.nll is not None
        return state, SegmentLosses(metrics.nats, metrics.tokens, metrics.nll)

    def dynamic_step(
        prepared: None, state: TrainState, segments: Segments
    ) -> tuple[TrainState, SegmentLosses]:
        del prepared
        return jax.lax.scan(score_then_learn, state, segments)

    return dynamic_step
