"""The training step: state, loss and update. S updates are one pure function.

Each segment has one optimizer update, as in the paper.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from txl_jax import memory as memory_lib
from txl_jax.config import ExperimentConfig, LossPart, TrainConfig
from txl_jax.inference.scorer import at_temperature
from txl_jax.memory import Memory
from txl_jax.modules import AnyModel
from txl_jax.recurrence import Segments, weighted_sum
from txl_jax.training import grad_accumulation, weight_averaging
from txl_jax.training.grad_accumulation import LossOutputs
from txl_jax.training.weight_averaging import Average


@flax.struct.dataclass
class TrainState:
    """The training state, which a checkpoint stores as a whole.

    Position in the text and random keys are functions of `step`. In an ensemble leaves have a
    leading member axis.
    """

    # int32 [], updates done.
    step: jax.Array
    # Parameters, float32.
    params: Any
    # State of the optimizer.
    opt_state: Any
    # M slots for each row of the batch.
    memory: Memory
    # Mean of the parameters over updates, or None without weight averaging.
    average: Average | None = None

    @property
    def scored_params(self) -> Any:
        """Returns the parameters that are evaluated and kept as the best.

        They are the mean if weights are averaged.
        """
        if self.average is None:
            return self.params
        return self.average.params


def init_params(model: AnyModel, key: jax.Array) -> Any:
    """Returns the initial parameters, on a mesh in boxes that hold their logical axis names."""
    token = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, token, model.init_memory(batch_size=1, mem_len=0))["params"]


def init_state(
    model: AnyModel, optimizer: optax.GradientTransformation, config: ExperimentConfig, params: Any
) -> TrainState:
    """Returns the state before the first update of training that begins with these parameters.

    The optimizer's state is boxed like the parameters. Bare parameters give a bare state.
    """
    average = None
    if config.average.on:
        average = weight_averaging.init(params, config.average)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=model.init_memory(batch_size=config.train.batch_size, mem_len=config.train.mem_len),
        average=average,
    )


class UpdateMetrics(NamedTuple):
    """Metrics of one update. A call stacks them to [S]."""

    nats: jax.Array  # Losses summed over the scored tokens of the global batch.
    tokens: jax.Array  # Number of scored tokens.
    grad_norm: jax.Array  # Global norm of the gradient before clipping.
    learning_rate: jax.Array  # Learning rate of the update, float32.
    # [B, L], losses of all positions before the update, scored or not. Only in evaluation.
    nll: jax.Array | None = None


# (state, one segment) -> (the state after the update, its metrics).
Update = Callable[[TrainState, Segments], tuple[TrainState, UpdateMetrics]]
# (state, S segments) -> (the state after S updates, their metrics [S]).
TrainStep = Callable[[TrainState, Segments], tuple[TrainState, UpdateMetrics]]


def make_train_step(
    model: AnyModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: ExperimentConfig,
    *,
    seed: int | jax.Array | None = None,
) -> TrainStep:
    """Returns a function of (state, S segments) that is ready for `jax.jit` with the state donated.

    `seed` is the dropout seed, which may be traced, or None for the config's.
    """
    update = make_update(model, optimizer, schedule, config, seed=seed)

    def train_step(state: TrainState, segments: Segments) -> tuple[TrainState, UpdateMetrics]:
        """Makes S updates, one per segment."""
        # Not by `recurrence.scan_segments`: the memory is a part of the state.
        return jax.lax.scan(update, state, segments)

    return train_step


def make_update(
    model: AnyModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: ExperimentConfig,
    *,
    seed: int | jax.Array | None = None,
    in_evaluation: bool = False,
) -> Update:
    """Returns the function that makes one update, from one segment.

    Args:
      model: The model.
      optimizer: Turns gradients into updates.
      schedule: The learning rate by update, for the metrics.
      config: All settings.
      seed: The dropout seed, which may be traced, or None for the config's.
      in_evaluation: Whether this is an update of dynamic evaluation (`evaluation.dynamic`): there
        is no dropout, the loss is at `eval.temperature`, and the metrics include the losses of all
        positions.
    """
    if seed is None:
        seed = config.seed
    loss = _make_loss(model, config, in_evaluation=in_evaluation)
    gradient = jax.grad(loss, has_aux=True)

    def update(state: TrainState, segment: Segments) -> tuple[TrainState, UpdateMetrics]:
        # Rows whose text begins again with this segment lose their memory.
        memory = memory_lib.reset(state.memory, jnp.asarray(segment.reset))
        segment = _mask_unscored(segment, config.train)
        # The number of scored targets. The loss is a mean over all of them, also in microbatches.
        tokens = jnp.sum(segment.weights)
        # The key depends only on seed and step, so a checkpoint holds no random state.
        dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)

        if config.train.grad_accum_steps > 1:
            accumulate = grad_accumulation.in_microbatches(gradient, config.train.grad_accum_steps)
            grads, outputs = accumulate(state.params, memory, segment, dropout_key, tokens)
        else:
            grads, outputs = gradient(state.params, memory, segment, dropout_key, tokens)

        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            # Optax counts the updates itself, and has the same count as `state.step`.
            metrics = UpdateMetrics(
                nats=outputs.nats,
                tokens=tokens,
                grad_norm=optax.tree.norm(grads),
                learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
                nll=outputs.nll if in_evaluation else None,
            )
            params = optax.apply_updates(state.params, updates)
            average = state.average
            if average is not None:
                average = weight_averaging.add(average, params, state.step, config.average)

        after = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=outputs.memory,
            average=average,
        )
        return after, metrics

    return update


def _mask_unscored(segment: Segments, train: TrainConfig) -> Segments:
    """Returns a segment whose weights are 0 for all positions that the loss does not score."""
    scored_from = 0
    if train.loss is LossPart.HALF:
        # Table 6 of the paper.
        scored_from = train.segment_len // 2
    is_scored = jnp.arange(train.segment_len) >= scored_from

    loss_mask = segment.weights * is_scored[None, :]
    # Targets below 0 are ignored, and do not count in the mean either. This package's readers never
    # produce them, but callers may pass their own segments.
    loss_mask = loss_mask * (segment.targets >= 0)
    return segment._replace(weights=loss_mask)


def _make_loss(
    model: AnyModel, config: ExperimentConfig, *, in_evaluation: bool
) -> Callable[..., tuple[jax.Array, LossOutputs]]:
    """Returns the loss of one segment, or of one microbatch of it."""
    train = config.train
    activation_l2 = config.regularization.activation_l2
    temporal_l2 = config.regularization.temporal_l2
    is_penalized = activation_l2 > 0 or temporal_l2 > 0

    def loss(
        params: Any, memory: Memory, segment: Segments, dropout_key: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, LossOutputs]:
        """Returns the minimized loss, and the other outputs.

        The loss is a part of the batch's mean over `tokens`.
        """
        variables = {"params": params}
        loss_mask = jnp.asarray(segment.weights)

        # The penalties read the last layer's outputs, which the model sows as "activations". With a
        # list of collections, even an empty one, `apply` also returns what was sown.
        sown_collections = ["activations"] if is_penalized else []
        (hidden, memory), sown = model.apply(
            variables,
            segment.inputs,
            memory,
            clamp_len=train.clamp_len,
            same_length=train.same_length,
            deterministic=in_evaluation,
            rngs={"dropout": dropout_key},
            mutable=sown_collections,
        )
        if in_evaluation:
            scaled_params, hidden = at_temperature(params, hidden, config.eval.temperature)
            variables = {"params": scaled_params}
        nll: Any = model.apply(variables, hidden, segment.targets, method=model.nll)
        # A position of weight 0 adds exactly 0, whatever its loss is. The sum of these weights is
        # not needed: `tokens` counts the whole batch, of which this may be a microbatch.
        nats, _ = weighted_sum(nll, loss_mask)
        mean = nats / jnp.maximum(tokens, 1)

        if is_penalized:
            # With `train.stride` a segment begins with positions that were read before.
            outputs = sown["activations"]["last"][:, -train.new_tokens :]
            penalty = activation_penalty(outputs, activation=activation_l2, temporal=temporal_l2)
            # The penalty is a mean over rows, and microbatches are summed.
            mean += penalty / train.grad_accum_steps
        return mean, LossOutputs(nats=nats, memory=memory, nll=nll)

    return loss


def activation_penalty(outputs: jax.Array, *, activation: float, temporal: float) -> jax.Array:
    """Computes the penalties AR and TAR on the last layer's outputs (Merity et al., 2017).

    The outputs are [B, L, D].

    Activation regularization penalises large outputs, temporal activation regularization fast
    changes. Both take the outputs before dropout, as the authors' PTB release does; AWD-LSTM takes
    AR after dropout.
    """
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    change = outputs[:, 1:] - outputs[:, :-1]
    # A segment of one position has no change: at least 1, for 0 / 1 = 0 instead of 0 / 0.
    n_change = max(change.size, 1)
    return activation * jnp.mean(outputs**2) + temporal * jnp.sum(change**2) / n_change
