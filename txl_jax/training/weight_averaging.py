"""The mean of the weights over updates: uniform, exponential, begun at a step or when validation stops improving.

Uniform from a step on is the averaged phase of AWD-LSTM (Merity et al., 2018) and of the PTB recipe; `decay` below 1
makes it an exponential mean, which counts all alike until there are 1 / (1 - decay) of them, so that it needs no
correction at its start.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import AverageConfig

_NEVER = 2**31 - 1


@flax.struct.dataclass
class Average:
    """A mean that is carried from update to update.

    Attributes:
      params: the mean; before it has begun, the parameters themselves.
      begun: int32 [], updates before it began.
    """

    params: Any
    begun: jax.Array


def init(params: Any, config: AverageConfig) -> Average | None:
    """The mean before the first update; None: there is none."""
    if not config.on:
        return None
    begun = _NEVER if config.start_step is None else config.start_step
    return Average(jax.tree.map(jnp.copy, params), jnp.asarray(begun, jnp.int32))


def update(average: Average | None, params: Any, step: jax.Array, config: AverageConfig) -> Average | None:
    """The mean with the parameters after update number `step` (from 0)."""
    if average is None:
        return None
    count = jnp.maximum(step + 1 - average.begun, 1).astype(jnp.float32)
    weight = jnp.maximum(1 / count, 1 - (1.0 if config.ema_decay is None else config.ema_decay))
    return average.replace(
        params=jax.tree.map(lambda mean, new: mean + weight.astype(mean.dtype) * (new - mean), average.params, params)
    )


def has_begun(average: Average) -> bool:
    """Whether the mean has begun, or its beginning is set."""
    return int(average.begun) != _NEVER


def begin(average: Average, step: int) -> Average:
    """The mean begins after `step` updates."""
    return average.replace(begun=jnp.full_like(average.begun, step))


def is_due(losses: Sequence[float], trigger: int) -> bool:
    """Whether the newest validation loss is worse than the best of all but the last `trigger` before it (NT-ASGD)."""
    before = losses[:-1]
    return len(before) > trigger and losses[-1] > min(before[: len(before) - trigger])
