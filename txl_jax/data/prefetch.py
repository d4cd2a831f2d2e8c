"""Prefetches the next segments on a background thread, so that reading overlaps the devices' work.

numpy releases the interpreter's lock while it sorts and gathers, so one thread is enough.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable

from txl_jax.recurrence import Segments

# Number of blocks to prefetch beyond the requested one.
DEPTH = 2


class Prefetcher(contextlib.AbstractContextManager["Prefetcher"]):
    """A context manager that prefetches blocks of S segments by their first step.

    `prefetcher(step)` returns the result of `segments(step, S)`, or raises its error in the caller,
    but only for requested steps. Request steps in order, S apart.
    """

    def __init__(
        self, segments: Callable[[int, int], Segments], *, segments_per_call: int, steps: int
    ):
        """Creates the prefetcher, without starting work.

        Args:
          segments: Returns a block of segments for its first step and the number of steps. It is
            called only on a background thread, so it may also put the block on the devices, but
            must enter its own jax context, such as a mesh.
          segments_per_call: S.
          steps: The run's last step. A block that ends after it is never prefetched.
        """
        self._segments = segments
        self._segments_per_call = segments_per_call
        self._steps = steps
        # Blocks that are read, or will be, by their first step.
        self._pending: dict[int, concurrent.futures.Future[Segments]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="segments"
        )

    def __call__(self, step: int) -> Segments:
        """Returns the S segments from `step` on."""
        size = self._segments_per_call
        # The next blocks that end within the run, at most DEPTH of them.
        ahead = range(step + size, self._steps - size + 1, size)[:DEPTH]
        for first in (step, *ahead):
            if first not in self._pending:
                self._pending[first] = self._thread.submit(self._segments, first, size)
        return self._pending.pop(step).result()

    def close(self, *error: object) -> None:
        """Drops queued blocks and waits for the one that may be running."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    __exit__ = close
