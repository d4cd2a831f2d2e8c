"""Weight averaging: the mean of the parameters over updates.

The mean is uniform (SWA, NT-ASGD) or exponential (EMA).

Uniform averaging from a step on is the averaged phase of AWD-LSTM (Merity et al., 2018) and of the
PTB recipe. NT-ASGD starts it when validation stops improving. With `ema_decay` the mean is
exponential. The first 1 / (1 - ema_decay) updates have equal weights, so that the mean does not
need a bias correction at its start.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import AverageConfig

_NEVER = 2**31 - 1  # The largest int32: more updates than any run has.


@flax.struct.dataclass
class Average:
    """A mean that is carried from update to update."""

    # The mean, or the parameters themselves before averaging has started.
    params: Any
    # int32 [], or [n] in an ensemble: number of updates before the mean began, or `_NEVER`.
    begun: jax.Array


def init(params: Any, config: AverageConfig) -> Average:
    """Returns the mean before the first update."""
    begun = _NEVER if config.start_step is None else config.start_step
    # Copies, because the parameters and the mean are both donated to the training step.
    return Average(jax.tree.map(jnp.copy, params), jnp.asarray(begun, jnp.int32))


def add(average: Average, params: Any, step: jax.Array, config: AverageConfig) -> Average:
    """Adds the parameters after update number `step` (from 0) to the mean."""
    # Until averaging has started, the count is 1, so that the mean is the parameters themselves.
    count = jnp.maximum(step + 1 - average.begun, 1).astype(jnp.float32)
    # With an EMA decay, the weight of the latest parameters decreases to 1 - decay. With a decay of
    # 1 the mean is uniform.
    ema_decay = 1.0 if config.ema_decay is None else config.ema_decay
    share = jnp.maximum(1 / count, 1 - ema_decay)

    def move(mean: jax.Array, newest: jax.Array) -> jax.Array:
        return mean + share.astype(mean.dtype) * (newest - mean)

    return dataclasses.replace(average, params=jax.tree.map(move, average.params, params))


def has_begun(average: Average, member: int = 0) -> bool:
    """Returns whether the mean of a run or ensemble member has begun or its beginning is set."""
    return int(np.atleast_1d(average.begun)[member]) != _NEVER


def begin(average: Average, step: int, member: int = 0) -> Average:
    """Starts the mean of a run or ensemble member after `step` updates."""
    if average.begun.ndim == 0:
        return dataclasses.replace(average, begun=jnp.full_like(average.begun, step))
    begun = average.begun.at[member].set(step)
    # The compiled step rejects a state with other shardings.
    return dataclasses.replace(average, begun=jax.device_put(begun, average.begun.sharding))


def is_due(losses: Sequence[float], trigger: int) -> bool:
    """Returns whether the latest validation loss is worse than an earlier best (NT-ASGD).

    The best is over all earlier losses except for the last `trigger` of them.
    """
    before = losses[:-1]
    return len(before) > trigger and losses[-1] > min(before[: len(before) - trigger])
