"""The training step: state, losses and update. S updates are one pure function.

There is one optimizer update per segment, as in the paper.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from txl_jax import memory as memory_lib
from txl_jax.config import ExperimentConfig, LossPart
from txl_jax.memory import Memory
from txl_jax.modules import AnyModel
from txl_jax.recurrence import Segments, weighted_sum
from txl_jax.training import grad_accumulation, weight_averaging
from txl_jax.training.weight_averaging import Average


@flax.struct.dataclass
class TrainState:
    """The training state, which a checkpoint stores as a whole.

    Position in the text and random keys are functions of `step`. In an ensemble leaves have a
    leading member axis.
    """

    # int32 [], updates done.
    step: jax.Array
    # float32.
    params: Any
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
        return self.params if self.average is None else self.average.params


def init_params(model: AnyModel, key: jax.Array) -> Any:
    """Returns the initial parameters, each in a box that holds its logical axis names."""
    token = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, token, model.init_memory(batch_size=1, mem_len=0))["params"]


def init_state(
    model: AnyModel, optimizer: optax.GradientTransformation, config: ExperimentConfig, params: Any
) -> TrainState:
    """Returns the state before the first update of training that begins with these parameters.

    The optimizer's state is boxed like the parameters. Bare parameters give a bare state.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=model.init_memory(batch_size=config.train.batch_size, mem_len=config.train.mem_len),
        average=weight_averaging.init(params, config.average) if config.average.on else None,
    )


class UpdateMetrics(NamedTuple):
    """Metrics of one update. A call stacks them to [S]."""

    nats: jax.Array  # Summed over the scored tokens of the global batch.
    tokens: jax.Array  # Number of those.
    grad_norm: jax.Array  # Global norm before clipping.
    learning_rate: jax.Array


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
    train = config.train
    gradient = jax.grad(_make_loss(model, config), has_aux=True)
    seed = config.seed if seed is None else seed

    def update(state: TrainState, segment: Segments) -> tuple[TrainState, UpdateMetrics]:
        memory = memory_lib.reset(
            state.memory, jnp.asarray(segment.reset), start=config.model.compat.memory_start
        )
        # Half loss: table 6.
        scored_from = train.segment_len // 2 if train.loss is LossPart.HALF else 0
        weights = segment.weights * (jnp.arange(train.segment_len) >= scored_from)[None, :]
        # Ignored targets do not count in the mean either.
        weights = weights * (segment.targets >= 0)
        segment = segment._replace(weights=weights)
        tokens = jnp.sum(weights)
        # The key depends only on seed and step, so a checkpoint holds no random state.
        dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
        if train.grad_accum_steps > 1:
            accumulate = grad_accumulation.in_microbatches(gradient, train.grad_accum_steps)
            grads, (nats, memory) = accumulate(state.params, memory, segment, dropout_key, tokens)
        else:
            grads, (nats, memory) = gradient(state.params, memory, segment, dropout_key, tokens)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            rate = jnp.asarray(schedule(state.step), jnp.float32)
            metrics = UpdateMetrics(nats, tokens, optax.tree.norm(grads), rate)
            params = optax.apply_updates(state.params, updates)
            average = state.average
            if average is not None:
                average = weight_averaging.add(average, params, state.step, config.average)
        return TrainState(state.step + 1, params, opt_state, memory, average), metrics

    def train_step(state: TrainState, segments: Segments) -> tuple[TrainState, UpdateMetrics]:
        """Makes S updates, one per segment."""
        # Not by `recurrence.scan_segments`: the memory is a part of the state.
        return jax.lax.scan(update, state, segments)

    return train_step


def _make_loss(model: AnyModel, config: ExperimentConfig) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the loss of one segment, or of one microbatch of it."""
    train, penalties = config.train, config.regularization
    penalized = penalties.activation_l2 > 0 or penalties.temporal_l2 > 0

    def loss(
        params: Any, memory: Memory, segment: Segments, dropout_key: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns the minimized loss, and (summed nats, new memory).

        The loss is a part of the batch's mean over `tokens`.
        """
        variables, weights = {"params": params}, jnp.asarray(segment.weights)
        (hidden, memory), kept = model.apply(
            variables,
            segment.inputs,
            memory,
            clamp_len=train.clamp_len,
            same_length=train.same_length,
            deterministic=False,
            rngs={"dropout": dropout_key},
            mutable=["activations"] if penalized else [],
        )
        nll: Any = model.apply(variables, hidden, segment.targets, method=model.nll)
        nats, _ = weighted_sum(nll, weights)
        mean = nats / jnp.maximum(tokens, 1)
        if penalized:
            new = kept["activations"]["last"][:, -train.new_tokens :]
            penalty = activation_penalty(
                new, activation=penalties.activation_l2, temporal=penalties.temporal_l2
            )
            mean += penalty / train.grad_accum_steps
        return mean, (nats, memory)

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
    return activation * jnp.mean(outputs**2) + temporal * jnp.sum(change**2) / max(change.size, 1)
