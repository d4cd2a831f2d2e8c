"""The optimizer: gradient clipping, an update rule, weight decays, and the learning-rate schedule (warm-up, cosine)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ExperimentConfig, ScheduleOffset
from txl_jax.training.param_axes import names_of
from txl_jax.training.state_axes import with_axis_names
from txl_jax.training.update_rules import update_rule


def learning_rate(
    config: ExperimentConfig, *, peak: float | jax.Array | None = None, multiple: float = 1.0
) -> optax.Schedule:
    """Returns a linear warm-up from 0 to the peak, then a cosine down to a minimum at the last update.

    With `decay_steps` the minimum is reached there and kept. From `average.start_step` on all is times
    `average.lr_scale`.

    The cosine runs from the end of the warm-up, or, as in the original PyTorch script (`ScheduleOffset.ORIGINAL`),
    from update 0, so that the rate jumps down where the warm-up ends.

    Args:
      peak: the peak learning rate, which may be traced; None: that of the config.
      multiple: raises the peak, but not the minimum, which is `min_lr_ratio` of the peak without it.
    """
    optimizer, average = config.optimizer, config.average
    peak, warmup = multiple * (optimizer.learning_rate if peak is None else peak), optimizer.warmup_steps
    steps = optimizer.decay_steps or config.train.steps
    offset = warmup if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP else 0
    cosine = optax.cosine_decay_schedule(peak, decay_steps=steps - offset, alpha=optimizer.min_lr_ratio / multiple)

    def rate(count: jax.Array) -> jax.Array:
        falling = jnp.where(count < warmup, peak * count / max(warmup, 1), cosine(count - offset))
        if average.lr_scale == 1 or average.start_step is None:
            return falling
        return jnp.where(count < average.start_step, 1, average.lr_scale) * falling

    return rate


def make_optimizer(config: ExperimentConfig, *, peak: float | jax.Array | None = None) -> optax.GradientTransformation:
    """Returns clipping by the global norm over all devices, then the update rule, with weight decays and rates.

    Args:
      config: the settings.
      peak: as in `learning_rate`.
    """
    optimizer, schedule = config.optimizer, learning_rate(config, peak=peak)
    # Transformations that are off are left out, so that checkpoints of runs without them have no state of theirs.
    l2 = [optax.add_decayed_weights(optimizer.l2)] if optimizer.l2 else []
    decay = [optax.add_decayed_weights(optimizer.weight_decay, mask=_decayed)] if optimizer.weight_decay else []
    rates = [optax.scale_by_learning_rate(schedule)]
    if optimizer.embedding_lr_multiplier != 1:
        of_embedding = learning_rate(config, peak=peak, multiple=optimizer.embedding_lr_multiplier)
        by_group = {
            "embedding": optax.scale_by_learning_rate(of_embedding),
            "others": optax.scale_by_learning_rate(schedule),
        }
        rates = [optax.partition(by_group, _group)]
    rule = update_rule(config)
    clip = optax.clip_by_global_norm(optimizer.clip_norm)
    return with_axis_names(optax.chain(clip, *l2, *rule.before, *decay, *rule.after, *rates))


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
