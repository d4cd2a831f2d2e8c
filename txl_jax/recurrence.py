"""Segments of a text, the `lax.scan` over them that carries the memory, and their summed losses.

Training has its own scan (`training.step`), because its memory is part of the training state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.errors import UserError


class Segments(NamedTuple):
    """S consecutive segments of L tokens for B rows of a batch (one process's rows).

    Without the axis S, this is one of the segments.
    """

    # int32 [S, B, L]. 0 in padding.
    inputs: np.ndarray
    # int32 [S, B, L]. The token after each input, or 0 in padding.
    targets: np.ndarray
    # float32 [S, B, L]. 1 for a scored target, 0 for padding, warm-up and tokens read twice.
    weights: np.ndarray
    # bool [S, B]. Whether the row restarts with this segment. If so, its memory is emptied first.
    reset: np.ndarray


# (state, memory, one segment) -> (state, memory, what to collect)
SegmentBody = Callable[[Any, Any, Segments], tuple[Any, Any, Any]]


def scan_segments(
    body: SegmentBody,
    state: Any,
    memory: Any,
    segments: Segments,
    *,
    reset: Callable[[Any, Any], Any],
) -> tuple[Any, Any, Any]:
    """Applies `body` to S segments in order.

    Rows whose reset bit is set start from an empty memory.

    Args:
      body: Receives one segment (arrays [B, L], reset [B]) and must return the memory updated with
        it.
      state: Any pytree carried along, e.g. the parameters that are being trained.
      memory: The memory before the first segment, a `Memory` or a `KVCache`.
      segments: The S segments.
      reset: Empties the rows of a memory that a bool [B] marks.

    Returns:
      State and memory after the last segment, and the collected results, stacked along S.
    """

    def step(carry: tuple[Any, Any], segment: Segments) -> tuple[tuple[Any, Any], Any]:
        state, memory = carry
        state, memory, collected = body(state, reset(memory, segment.reset), segment)
        return (state, memory), collected

    (state, memory), collected = jax.lax.scan(step, (state, memory), segments)
    return state, memory, collected


def weighted_sum(nll: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums the losses of scored targets.

    Args:
      nll: Losses [B, L] in nats.
      weights: The loss mask [B, L] (`Segments.weights`). 0 adds exactly 0 even where a loss is not
        finite.

    Returns:
      The sums of the weighted losses and of the weights.

    Raises:
      UserError: If losses and weights have different shapes. Weights [B], for example, would be
        applied to other losses, and their sum would be too small.
    """
    if jnp.shape(weights) != jnp.shape(nll):
        raise UserError(
            f"weights must have the losses' shape {list(jnp.shape(nll))}, one per target, got "
            f"{list(jnp.shape(weights))}. Use jnp.broadcast_to"
        )
    nats = jnp.where(weights > 0, nll * weights, 0)
    return jnp.sum(nats), jnp.sum(weights)
