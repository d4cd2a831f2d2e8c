"""Prefetches the next segments on a background thread, so that reading overlaps the devices' work.

numpy releases the interpreter's lock while it sorts and gathers, so one thread is enough.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable

from txl_jax.recurrence import Segments

# Number of blocks to prefetch beyond the one that is asked for.
DEPTH = 2


class Prefetcher(contextlib.AbstractContextManager["Prefetcher"]):
    """A context manager that prefetches blocks of S segments by their first step.

    `prefetcher(step)` returns what `segments(step, S)` returns, and raises what it raises, in the
    caller and only for a step that was asked for. Ask for steps in order, S apart.
    """

    def __init__(
        self, segments: Callable[[int, int], Segments], *, segments_per_call: int, steps: int
    ):
        """Starts no work yet.

        Args:
          segments: Returns the block of segments from a first step on, by this step and a count. It
            is called on a background thread only, so it may also put the block on the devices, but
            must enter its own jax context, such as a mesh.
          segments_per_call: S.
          steps: The run's last step. A block that ends after it is never prefetched.
        """
        self._segments = segments
        self._segments_per_call = segments_per_call
        self._steps = steps
        # The blocks that are read or will be, by their first step.
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
