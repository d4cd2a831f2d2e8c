"""Adam, the learning-rate schedule and the clipping of the gradient."""

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
    """Clip by the global norm over all devices, then Adam without weight decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adam(schedule, b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
    )
