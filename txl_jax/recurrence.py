"""The walk: a `lax.scan` over segments that carries the memory.

Training, streaming evaluation and the reading of a prompt are bodies of this one walk.
"""

from collections.abc import Callable
from typing import Any

import jax

from txl_jax import memory as memory_lib
from txl_jax.config import MemoryStart
from txl_jax.data.segments import Segments
from txl_jax.memory import Memory

# (state, memory, one segment) -> (state, memory, what to collect)
SegmentBody = Callable[[Any, Memory, Segments], tuple[Any, Memory, Any]]


def scan_segments(
    body: SegmentBody, state: Any, memory: Memory, segments: Segments, *, start: MemoryStart
) -> tuple[Any, Memory, Any]:
    """Applies `body` to S segments in order; rows whose reset bit is set start from an empty memory.

    Args:
      body: sees one segment (arrays [B, L], reset [B]) and must return the memory moved on by it.
      state: any pytree carried along, e.g. the parameters that are being trained.
      memory: what the first segment finds.
      segments: arrays [S, B, L], reset [S, B].
      start: what an empty memory holds.

    Returns:
      State and memory after the last segment, and the collected results, stacked along S.
    """

    def step(carry: tuple[Any, Memory], segment: Segments) -> tuple[tuple[Any, Memory], Any]:
        state, memory = carry
        state, memory, collected = body(state, memory_lib.reset(memory, segment.reset, start), segment)
        return (state, memory), collected

    (state, memory), collected = jax.lax.scan(step, (state, memory), segments)
    return state, memory, collected
