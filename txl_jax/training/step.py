"""The train step: S updates as one pure function, one optimizer update per segment, as in the paper.

With gradient accumulation a segment's batch is split into microbatches (`training.grad_accumulation`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from txl_jax import losses, recurrence
from txl_jax import memory as memory_lib
from txl_jax.config import ExperimentConfig
from txl_jax.memory import Memory
from txl_jax.modules import intermediates
from txl_jax.modules.language_model import LanguageModel
from txl_jax.segments import Segments
from txl_jax.sharding import num_batch_shards
from txl_jax.training import weight_averaging
from txl_jax.training.grad_accumulation import GradAccumulation
from txl_jax.training.state import TrainState


class UpdateMetrics(NamedTuple):
    """Metrics of one update; stacked to [S] by a call."""

    nats: jax.Array  # Summed over the scored tokens of the global batch.
    tokens: jax.Array  # Number of those.
    grad_norm: jax.Array  # Global norm before clipping.
    learning_rate: jax.Array


TrainStep = Callable[[TrainState, Segments], tuple[TrainState, UpdateMetrics]]


def make_train_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: ExperimentConfig,
    *,
    seed: int | jax.Array | None = None,
) -> TrainStep:
    """Returns a function of (state, S segments) that is ready for `jax.jit` with the state donated.

    Args:
      seed: of dropout, which may be traced; None: that of the config.
    """
    train = config.train
    gradient = jax.grad(_make_loss(model, config), has_aux=True)
    seed = config.seed if seed is None else seed

    def update(carry: Any, memory: Memory, segment: Segments) -> tuple[Any, Memory, UpdateMetrics]:
        step, params, opt_state, average = carry
        segment = segment._replace(
            weights=segment.weights * losses.position_weights(train.segment_len, train.loss)[None, :]
        )
        tokens = jnp.sum(segment.weights)
        # The key depends on seed and step alone, so a checkpoint holds no random state.
        dropout_key = jax.random.fold_in(jax.random.key(seed), step)
        accumulation = GradAccumulation(train.grad_accum_steps, num_batch_shards())
        grads, nats, memory = accumulation.gradient(gradient, params, memory, segment, dropout_key, tokens)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = UpdateMetrics(nats, tokens, optax.tree.norm(grads), jnp.asarray(schedule(step), jnp.float32))
            params = optax.apply_updates(params, updates)
            average = weight_averaging.update(average, params, step, config.average)
        return (step + 1, params, opt_state, average), memory, metrics

    def train_step(state: TrainState, segments: Segments) -> tuple[TrainState, UpdateMetrics]:
        carry = (state.step, state.params, state.opt_state, state.average)
        (step, params, opt_state, average), memory, metrics = recurrence.scan_segments(
            update,
            carry,
            state.memory,
            segments,
            reset=functools.partial(memory_lib.reset, start=config.compat.memory_start),
        )
        return TrainState(step, params, opt_state, memory, average), metrics

    return train_step


def _make_loss(model: LanguageModel, config: ExperimentConfig) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the loss of one segment, or of one microbatch of it."""
    train, regularization = config.train, config.regularization
    penalized = regularization.activation_l2 > 0 or regularization.temporal_l2 > 0

    def loss(
        params: Any, memory: Memory, segment: Segments, dropout_key: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns the minimized loss, as a part of the batch's mean over `tokens`; and (summed nats, new memory)."""
        variables, weights = {"params": params}, jnp.asarray(segment.weights)
        (hidden, memory), kept = model.apply(
            variables,
            segment.inputs,
            memory,
            clamp_len=train.clamp_len,
            same_length=train.same_length,
            deterministic=False,
            rngs={"dropout": dropout_key},
            mutable=[intermediates.COLLECTION] if penalized else [],
        )
        nll: Any = model.apply(variables, hidden, segment.targets, method=model.nll)
        nats, _ = losses.weighted_sum(nll, weights)
        mean = nats / jnp.maximum(tokens, 1)
        if penalized:
            new = intermediates.last(kept)[:, -train.new_tokens :]
            penalty = losses.activation_penalty(
                new, activation=regularization.activation_l2, temporal=regularization.temporal_l2
            )
            mean += penalty / train.grad_accum_steps
        return mean, (nats, memory)

    return loss
