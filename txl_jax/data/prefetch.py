"""Prefetches the next segments on a background thread, so that reading overlaps the devices' work.

numpy releases the interpreter's lock while it sorts and gathers, so one thread is enough.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable

from txl_jax.recurrence import Segments

DEPTH = 2  # Number of blocks to prefetch beyond the one asked for.


class Prefetcher(contextlib.AbstractContextManager["Prefetcher"]):
    """A context manager that prefetches blocks of S segments by their first step.

    `prefetcher(step)` returns what `segments(step, S)` returns, and raises what it raises, in the
    caller and only for a step that was asked for. Ask for steps in order, S apart.
    """

    def __init__(
        self, segments: Callable[[int, int], Segments], *, segments_per_call: int, steps: int
    ):
        """Starts no work yet, and never reads a block that ends after `steps`.

        `segments`: (first step, count) -> block is called on a background thread only, so it may
        also put the block on the devices, but must enter its own jax context, such as a mesh.
        """
        self._segments = segments
        self._count = segments_per_call
        self._steps = steps
        self._pending: dict[int, concurrent.futures.Future[Segments]] = {}  # By first step.
        self._thread = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="segments"
        )

    def __call__(self, step: int) -> Segments:
        """Returns the S segments from `step` on."""
        # The next blocks that end within the run, at most DEPTH of them.
        ahead = range(step + self._count, self._steps - self._count + 1, self._count)[:DEPTH]
        for first in (step, *ahead):
            if first not in self._pending:
                self._pending[first] = self._thread.submit(self._segments, first, self._count)
        return self._pending.pop(step).result()

    def close(self, *error: object) -> None:
        """Drops queued blocks and waits for the one that may be running."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    __exit__ = close
