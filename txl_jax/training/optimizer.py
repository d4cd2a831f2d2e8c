"""Adam, the learning-rate schedule and the clipping of the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import ExperimentConfig, ScheduleOffset


def learning_rate(config: ExperimentConfig, *, multiple: float = 1.0) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then a cosine down to a floor, which is reached with the last update.

    With `decay_steps` it is reached there and kept. From `average.start_step` on all is times `average.lr_scale`. `multiple`
    raises the peak, but not the minimum, which is `min_lr_ratio` of the peak without it.

    The cosine runs from the end of the warm-up, or, as in the original PyTorch script (`ScheduleOffset.ORIGINAL`),
    from update 0, so that the rate jumps down where the warm-up ends.
    """
    optimizer, average = config.optimizer, config.average
    peak, warmup = multiple * optimizer.learning_rate, optimizer.warmup_steps
    steps = optimizer.decay_steps or config.train.steps
    offset = warmup if optimizer.schedule_offset is ScheduleOffset.AFTER_WARMUP else 0
    cosine = optax.cosine_decay_schedule(peak, decay_steps=steps - offset, alpha=optimizer.min_lr_ratio / multiple)

    def rate(count: jax.Array) -> jax.Array:
        falling = jnp.where(count < warmup, peak * count / max(warmup, 1), cosine(count - offset))
        return (
            falling if average.lr_scale == 1 else jnp.where(count < average.start_step, 1, average.lr_scale) * falling
        )

    return rate


def make_optimizer(whole: ExperimentConfig) -> optax.GradientTransformation:
    """Clip by the global norm over all devices, then Adam, with the decays and the rates of the config."""
    config, schedule = whole.optimizer, learning_rate(whole)
    # What was not asked for leaves nothing here, so that checkpoints of runs without it stay what they were.
    decays = [optax.add_decayed_weights(config.l2)] if config.l2 else []
    after = [optax.add_decayed_weights(config.weight_decay, mask=_matrices)] if config.weight_decay else []
    rates = [optax.scale_by_learning_rate(schedule)]
    if config.embedding_lr_multiplier != 1:
        each = {"embedding": learning_rate(whole, multiple=config.embedding_lr_multiplier), "others": schedule}
        rates = [optax.partition({name: optax.scale_by_learning_rate(rate) for name, rate in each.items()}, _owner)]
    adam = optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), *decays, adam, *after, *rates)


def _matrices(params: Any) -> Any:
    """True for all but biases, u and v among them, and the scales of norms."""

    def is_matrix(path: tuple, leaf: Any) -> bool:
        names = _names(path)
        return not names[-1].endswith(("bias", "scale", "content")) and "biases" not in names

    return jax.tree.map_with_path(is_matrix, params)


def _owner(params: Any) -> Any:
    """Whose learning rate each parameter has."""
    return jax.tree.map_with_path(
        lambda path, leaf: "embedding" if _names(path)[0] == "embedding" else "others", params
    )


def _names(path: tuple) -> list[str]:
    """The names along a path, without the boxes that a parameter may lie in."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
