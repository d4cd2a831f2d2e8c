"""The optimizer: gradient clipping, update rule, weight decays and learning-rate schedule.

The schedule consists of warm-up and decay.

All update rules come from optax, with two adaptations. Trust ratios, root mean squares and factors
are computed per layer, although `nn.scan` stacks the layers in one tensor. An attention projection
counts as a matrix, although its heads are a separate axis. NVIDIA's LAMB is in
`txl_jax.training.nvidia_lamb`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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

LION_B1 = 0.9
LION_B2 = 0.99
MUON_MOMENTUM = 0.95
# Muon's updates are scaled to the root mean square of Adam's, so that one learning rate serves both
# (Liu et al., 2025).
MUON_RMS = 0.2


class ScheduleLengths(NamedTuple):
    """The lengths of a learning-rate schedule: NumPy scalars, or arrays [] that may be traced.

    The compiled training step takes them as data (`runs.build`), so that it is the same program
    for all values of `train.steps`, `optimizer.decay_steps` and `optimizer.warmup_steps`.

    Some versions of XLA replace a division by a constant with a multiplication by its inverse, and
    others do not. The inverses are data too, so that a rate is the same, bit for bit, with any
    version, and whether the lengths are data or constants.
    """

    warmup_start: Any  # int32, the first update of the warm-up. Earlier ones are at the peak.
    warmup: Any  # int32, the update after the warm-up.
    warmup_inverse: Any  # Float, 1 / warmup, or 1 without a warm-up.
    decay_start: Any  # int32, the update at which the decay starts from the peak.
    decay: Any  # int32, updates from there to the minimum.
    decay_inverse: Any  # Float, 1 / decay.

    @classmethod
    def of(cls, config: ExperimentConfig) -> "ScheduleLengths":
        """Returns the lengths of a config's schedule, on the host."""
        optimizer = config.optimizer
        warmup = optimizer.warmup_steps
        # The original PyTorch script decays from update 0, so that the rate jumps down where the
        # warm-up ends.
        decay_start = 0
        # It sets the rate after an update, for the next one. So update 0, whose rate would be 0, is
        # at the peak, where its decay begins.
        warmup_start = 1
        if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP:
            decay_start = warmup
            warmup_start = 0
        decay_end = optimizer.decay_steps or config.train.steps
        # Above 0, because a valid config's warm-up ends before the decay does.
        decay = decay_end - decay_start
        return cls(
            warmup_start=np.int32(warmup_start),
            warmup=np.int32(warmup),
            warmup_inverse=_inverse(max(warmup, 1)),
            decay_start=np.int32(decay_start),
            decay=np.int32(decay),
            decay_inverse=_inverse(decay),
        )


def _inverse(length: int) -> Any:
    """Returns 1 / length in JAX's default float dtype, as XLA rounds it."""
    dtype = jnp.result_type(float)
    return dtype.type(1) / dtype.type(length)


def learning_rate(
    config: ExperimentConfig,
    *,
    peak: float | jax.Array | None = None,
    multiple: float = 1.0,
    lengths: ScheduleLengths | None = None,
) -> optax.Schedule:
    """Returns a schedule with a linear warm-up from 0 to the peak, and then a decay.

    The decay is a cosine or a line down to a minimum at the last update.

    With `decay_steps` the minimum is reached at that step and kept. From `average.start_step` on,
    the rate is multiplied by `average.lr_scale`.

    The decay runs from the end of the warm-up. In the original PyTorch script
    (`ScheduleOffset.ORIGINAL`) it runs from update 0, so that the rate jumps down where the warm-up
    ends, and update 0 is at the peak.

    Args:
      config: The run's settings.
      peak: Peak learning rate, which may be traced, or None for the config's.
      multiple: Factor on the peak, but not on the minimum, which is `min_lr_ratio` of the peak
        without the factor.
      lengths: Lengths of warm-up and decay, which may be traced, or None for the config's.
    """
    optimizer = config.optimizer
    average = config.average

    if peak is None:
        peak = optimizer.learning_rate
    peak = multiple * peak
    lowest_ratio = optimizer.min_lr_ratio / multiple
    if lengths is None:
        lengths = ScheduleLengths.of(config)

    def warm_up(count: jax.Array) -> jax.Array:
        # XLA multiplies constants first. So that the rate has the same bits if the lengths are
        # data, a peak that is a number is multiplied by the inverse first, and a traced one is not.
        if isinstance(peak, jax.Array):
            return peak * count * lengths.warmup_inverse
        return count * (peak * lengths.warmup_inverse)

    def decay(count: jax.Array) -> jax.Array:
        done = jnp.clip(count - lengths.decay_start, 0, lengths.decay)
        match optimizer.schedule:
            case Schedule.COSINE:
                cosine = jnp.cos(done * (math.pi * lengths.decay_inverse))
                remaining = 0.5 * (1 + cosine)
                return peak * ((1 - lowest_ratio) * remaining + lowest_ratio)
            case Schedule.LINEAR:
                # In float32, like the quotient of two int32 in optax, also where the default dtype
                # is float64.
                remaining = 1 - done * lengths.decay_inverse.astype(jnp.float32)
                lowest = peak * lowest_ratio
                return (peak - lowest) * remaining + lowest

    def rate(count: jax.Array) -> jax.Array:
        falling = decay(count)
        rising = warm_up(count).astype(falling.dtype)
        is_rising = (lengths.warmup_start <= count) & (count < lengths.warmup)
        unscaled = jnp.where(is_rising, rising, falling)
        if average.lr_scale == 1 or average.start_step is None:
            return unscaled
        return jnp.where(count < average.start_step, 1, average.lr_scale) * unscaled

    return rate


def make_optimizer(
    config: ExperimentConfig,
    *,
    peak: float | jax.Array | None = None,
    lengths: ScheduleLengths | None = None,
) -> optax.GradientTransformation:
    """Returns gradient clipping, then the update rule, with weight decays and rates.

    Gradients are clipped by their global norm over all devices. `peak` is the peak learning rate,
    and `lengths` are the lengths of its schedule. Both may be traced, or None for the config's.
    """
    optimizer = config.optimizer
    rule = update_rule(config)

    # Transformations that are off are omitted, so that checkpoints of runs without them do not have
    # their state.
    chain = [_clip(optimizer)]
    if optimizer.l2:
        chain.append(optax.add_decayed_weights(optimizer.l2))
    # The update rule, such as Adam, has a part on either side of the decoupled weight decay.
    chain += rule.before_decay
    if optimizer.weight_decay:
        chain.append(optax.add_decayed_weights(optimizer.weight_decay, mask=_decayed))
    chain += rule.after_decay
    chain.append(_scale_by_rates(config, peak, lengths))
    return optax.chain(*chain)


def _clip(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Returns gradient clipping by the global norm."""
    if not optimizer.clip_eps:
        return optax.clip_by_global_norm(optimizer.clip_norm)

    def clip(grads: Any, params: Any) -> Any:
        del params
        # As torch.nn.utils.clip_grad_norm_. Adam hides a constant factor, but this one is another
        # for each gradient, which float64 shows.
        factor = jnp.minimum(1, optimizer.clip_norm / (optax.tree.norm(grads) + optimizer.clip_eps))
        return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads)

    return optax.stateless(clip)


def _scale_by_rates(
    config: ExperimentConfig, peak: float | jax.Array | None, lengths: ScheduleLengths | None
) -> optax.GradientTransformation:
    """Returns the step times minus the learning rate. The embedding may have its own rate."""
    multiple = config.optimizer.embedding_lr_multiplier
    usual = optax.scale_by_learning_rate(learning_rate(config, peak=peak, lengths=lengths))
    if multiple == 1:
        return usual
    embedding_rate = learning_rate(config, peak=peak, multiple=multiple, lengths=lengths)
    by_group = {"embedding": optax.scale_by_learning_rate(embedding_rate), "others": usual}
    return optax.partition(by_group, _group)


def _decayed(params: Any) -> Any:
    """Returns True for all parameters except biases, including u and v, and the scales of norms."""

    def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
        names = names_of(path)
        # The paper's u and v are in "biases". Shaw's u is "content", among the layer's positions.
        return not names[-1].endswith(("bias", "scale", "content")) and "biases" not in names

    return jax.tree.map_with_path(is_matrix, params)


def _group(params: Any) -> Any:
    """Returns the group of each parameter that shares a learning rate: embedding or others."""

    def group_of(path: tuple[Any, ...], leaf: Any) -> str:
        return "embedding" if names_of(path)[0] == "embedding" else "others"

    return jax.tree.map_with_path(group_of, params)


class UpdateRule(NamedTuple):
    """Transformations of the clipped gradient, around the decoupled weight decay."""

    before_decay: list[optax.GradientTransformation]
    after_decay: list[optax.GradientTransformation]


def update_rule(config: ExperimentConfig) -> UpdateRule:
    """Returns the rule of `optimizer.name`."""
    optimizer = config.optimizer
    match optimizer.name:
        case OptimizerName.ADAM | OptimizerName.ADAMW:
            # AdamW differs only by the weight decay, which `make_optimizer` adds after the rule.
            return UpdateRule([_adam(optimizer)], [])
        case OptimizerName.LAMB_NVIDIA:
            moments = nvidia_lamb.scale_by_moments(optimizer)
            trust_ratio = nvidia_lamb.scale_by_trust_ratio(config.model, optimizer)
            return UpdateRule([moments], [trust_ratio])
        case OptimizerName.LAMB:
            return UpdateRule([_adam(optimizer)], [per_layer(optax.scale_by_trust_ratio())])
        case OptimizerName.ADAFACTOR:
            factored = optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )
            return UpdateRule([per_layer(as_matrices(factored))], [])
        case OptimizerName.LION:
            return UpdateRule([optax.scale_by_lion(LION_B1, LION_B2)], [])
        case OptimizerName.MUON:
            return UpdateRule([_muon(optimizer)], [])


def _adam(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=ADAM_B1, b2=optimizer.adam_b2, eps=optimizer.adam_eps)


def _muon(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon for the layers' matrices and Adam for all other parameters."""

    def axes_of(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: matrix_axes(names_of(path)), tree)

    def rule_of(path: tuple[Any, ...], leaf: Any) -> str:
        return "adam" if matrix_axes(names_of(path)) is None else "muon"

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(rule_of, params)

    orthogonalized = optax.contrib.scale_by_muon(
        beta=MUON_MOMENTUM, weight_dimension_numbers=axes_of
    )
    muon = optax.chain(orthogonalized, optax.stateless(_scale_by_size))
    return optax.partition({"muon": muon, "adam": _adam(optimizer)}, labels)


def _scale_by_size(updates: Any, params: Any) -> Any:
    """Gives each update the root mean square of an Adam update, whatever the matrix's shape."""
    del params

    def scale_leaf(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        n_row, n_column = matrix_shape(names_of(path), update.shape)[-2:]
        return MUON_RMS * math.sqrt(max(n_row, n_column)) * update

    return jax.tree.map_with_path(scale_leaf, updates)
