"""The optimizer: gradient clipping, update rule, weight decays and learning-rate schedule.

The schedule consists of warm-up and decay.

All update rules are optax's, with two adaptations. Trust ratios, root mean squares and factors are
per layer, although `nn.scan` stacks the layers in one tensor. And a projection of attention is the
matrix that it multiplies by, although its heads are an axis. NVIDIA's LAMB is in
`txl_jax.training.nvidia_lamb`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import (
    ExperimentConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    ScheduleOffset,
)
from txl_jax.config.training import ADAM_B1
from txl_jax.training import nvidia_lamb
from txl_jax.training.param_axes import as_matrices, matrix_axes, matrix_shape, names_of, per_layer

LION_B1, LION_B2 = 0.9, 0.99
MUON_MOMENTUM = 0.95
# Root mean square of a Muon update times this: that of an Adam update, so that one learning rate
# serves both (Liu et al., 2025).
MUON_RMS = 0.2


def learning_rate(
    config: ExperimentConfig, *, peak: float | jax.Array | None = None, multiple: float = 1.0
) -> optax.Schedule:
    """Returns a schedule with a linear warm-up from 0 to the peak, and then a decay.

    The decay is a cosine or a line down to a minimum at the last update.

    With `decay_steps` the minimum is reached there and kept. From `average.start_step` on all is
    times `average.lr_scale`.

    The decay runs from the end of the warm-up, or, as in the original PyTorch script
    (`ScheduleOffset.ORIGINAL`), from update 0, so that the rate jumps down where the warm-up ends.

    `peak` may be traced, and is the config's if it is None. `multiple` raises the peak, but not the
    minimum, which is `min_lr_ratio` of the peak without it.
    """
    optimizer, average = config.optimizer, config.average
    peak, warmup = (
        multiple * (optimizer.learning_rate if peak is None else peak),
        optimizer.warmup_steps,
    )
    steps = optimizer.decay_steps or config.train.steps
    offset = warmup if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP else 0
    end = optimizer.min_lr_ratio / multiple
    decay = optax.cosine_decay_schedule(peak, decay_steps=steps - offset, alpha=end)
    if optimizer.schedule is Schedule.LINEAR:
        decay = optax.linear_schedule(peak, peak * end, transition_steps=steps - offset)

    def rate(count: jax.Array) -> jax.Array:
        falling = jnp.where(count < warmup, peak * count / max(warmup, 1), decay(count - offset))
        if average.lr_scale == 1 or average.start_step is None:
            return falling
        return jnp.where(count < average.start_step, 1, average.lr_scale) * falling

    return rate


def make_optimizer(
    config: ExperimentConfig, *, peak: float | jax.Array | None = None
) -> optax.GradientTransformation:
    """Returns gradient clipping, then the update rule, with weight decays and rates.

    Gradients are clipped by their global norm over all devices.
    """
    optimizer, schedule = config.optimizer, learning_rate(config, peak=peak)
    # Transformations that are off are omitted, so that checkpoints of runs without them do not have
    # their state.
    l2 = [optax.add_decayed_weights(optimizer.l2)] if optimizer.l2 else []
    decay = (
        [optax.add_decayed_weights(optimizer.weight_decay, mask=_decayed)]
        if optimizer.weight_decay
        else []
    )
    rates = optax.scale_by_learning_rate(schedule)
    if optimizer.embedding_lr_multiplier != 1:
        of_embedding = learning_rate(config, peak=peak, multiple=optimizer.embedding_lr_multiplier)
        by_group = {"embedding": optax.scale_by_learning_rate(of_embedding), "others": rates}
        rates = optax.partition(by_group, _group)
    clip, (before, after) = optax.clip_by_global_norm(optimizer.clip_norm), update_rule(config)
    return optax.chain(clip, *l2, before, *decay, *after, rates)


def _decayed(params: Any) -> Any:
    """Returns True for all parameters but biases, u and v among them, and the scales of norms."""

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        names = names_of(path)
        return not names[-1].endswith(("bias", "scale", "content")) and "biases" not in names

    return jax.tree.map_with_path(is_matrix, params)


def _group(params: Any) -> Any:
    """Returns the group of each parameter that shares a learning rate."""
    return jax.tree.map_with_path(
        lambda path, leaf: "embedding" if names_of(path)[0] == "embedding" else "others", params
    )


def update_rule(
    config: ExperimentConfig,
) -> tuple[optax.GradientTransformation, Sequence[optax.GradientTransformation]]:
    """Returns the rule of `optimizer.name` in two parts.

    The first part precedes the decoupled weight decay, and the second part follows it.
    """
    optimizer = config.optimizer
    match optimizer.name:
        case OptimizerName.ADAM | OptimizerName.ADAMW:
            return _adam(optimizer), ()
        case OptimizerName.LAMB_NVIDIA:
            ratio = nvidia_lamb.scale_by_trust_ratio(config.model, optimizer)
            return nvidia_lamb.scale_by_moments(optimizer), (ratio,)
        case OptimizerName.LAMB:
            return _adam(optimizer), (per_layer(optax.scale_by_trust_ratio()),)
        case OptimizerName.ADAFACTOR:
            factored = optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )
            return per_layer(as_matrices(factored)), ()
        case OptimizerName.LION:
            return optax.scale_by_lion(LION_B1, LION_B2), ()
        case OptimizerName.MUON:
            return _muon(optimizer), ()


def _adam(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=ADAM_B1, b2=optimizer.adam_b2, eps=optimizer.adam_eps)


def _muon(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon for the layers' matrices and Adam for all other parameters."""

    def axes_of(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: matrix_axes(names_of(path)), tree)

    def by_size(updates: Any, params: Any) -> Any:
        """Gives each update the root mean square of an Adam update, whatever the matrix's shape."""
        del params

        def scaled(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
            return (
                MUON_RMS * math.sqrt(max(matrix_shape(names_of(path), update.shape)[-2:])) * update
            )

        return jax.tree.map_with_path(scaled, updates)

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: "adam" if matrix_axes(names_of(path)) is None else "muon", params
        )

    muon = optax.contrib.scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=axes_of)
    return optax.partition(
        {"muon": optax.chain(muon, optax.stateless(by_size)), "adam": _adam(optimizer)}, labels
    )
