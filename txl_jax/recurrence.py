"""The recurrence: a `lax.scan` over segments that carries the memory.

Training and streaming evaluation are bodies of this one scan.
"""

from collections.abc import Callable
from typing import Any

import jax

from txl_jax.segments import Segments

# (state, memory, one segment) -> (state, memory, what to collect)
SegmentBody = Callable[[Any, Any, Segments], tuple[Any, Any, Any]]


def scan_segments(
    body: SegmentBody, state: Any, memory: Any, segments: Segments, *, reset: Callable[[Any, Any], Any]
) -> tuple[Any, Any, Any]:
    """Applies `body` to S segments in order; rows whose reset bit is set start from an empty memory.

    Args:
      body: sees one segment (arrays [B, L], reset [B]) and must return the memory moved on by it.
      state: any pytree carried along, e.g. the parameters that are being trained.
      memory: the memory before the first segment, a `Memory` or a `KVCache`.
      segments: arrays [S, B, L], reset [S, B].
      reset: empties the rows of a memory that a bool [B] marks.

    Returns:
      State and memory after the last segment, and the collected results, stacked along S.
    """

    def step(carry: tuple[Any, Any], segment: Segments) -> tuple[tuple[Any, Any], Any]:
        state, memory = carry
        state, memory, collected = body(state, reset(memory, segment.reset), segment)
        return (state, memory), collected

    (state, memory), collected = jax.lax.scan(step, (state, memory), segments)
    return state, memory, collected
