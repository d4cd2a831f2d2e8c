"""Adam, the learning-rate schedule and the clipping of the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from txl_jax.config import CompatConfig, OptimizerConfig, ScheduleOffset


def learning_rate(config: OptimizerConfig, compat: CompatConfig, *, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then a cosine down to `lr_floor` of the peak at update `steps`.

    The cosine runs from the end of the warm-up, or, as in the original PyTorch script
    (`ScheduleOffset.ORIGINAL`), from update 0, so that the rate jumps down where the warm-up ends.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    offset = warmup if compat.schedule_offset is ScheduleOffset.AFTER_WARMUP else 0
    cosine = optax.cosine_decay_schedule(peak, decay_steps=steps - offset, alpha=compat.lr_floor)
    if not warmup:
        return cosine
    return lambda count: jnp.where(count < warmup, peak * count / warmup, cosine(count - offset))


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clip by the global norm over all devices, then Adam, with the decay and the embedding's rate of the config."""
    steps = [
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
    ]
    # Only where they are asked for, so that checkpoints of runs without them stay what they were.
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    if config.embedding_rate != 1:
        steps.append(optax.masked(optax.scale(config.embedding_rate), _of_embedding))
    return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def _matrices(params: Any) -> Any:
    """True for all but biases, u and v among them, and the scales of norms."""

    def is_matrix(path: tuple, leaf: Any) -> bool:
        names = _names(path)
        return not names[-1].endswith(("bias", "scale", "content")) and "biases" not in names

    return jax.tree.map_with_path(is_matrix, params)


def _of_embedding(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, leaf: _names(path)[0] == "embedding", params)


def _names(path: tuple) -> list[str]:
    """The names along a path, without the boxes that a parameter may lie in."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
