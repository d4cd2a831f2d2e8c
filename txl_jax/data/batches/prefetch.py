"""The next segments are made on a thread of their own, so that reading overlaps the devices' work.

numpy lets go of the interpreter's lock while it sorts and gathers, so one thread is enough; and as a block of segments
is a pure function of its step, nothing has to be undone when the caller goes elsewhere.
"""

import concurrent.futures
from collections.abc import Callable
from types import TracebackType
from typing import Self

from txl_jax.segments import Segments


class Prefetcher:
    """Blocks of S segments by their first step, the following ones already in the making; a context manager.

    `prefetcher(step)` returns what `segments(step, S)` returns, and raises what it raises, in the caller and only for a
    step that was asked for. Any step may be asked for at any time; blocks made for another course are dropped.
    """

    def __init__(
        self,
        segments: Callable[[int, int], Segments],
        *,
        segments_per_call: int,
        steps: int,
        depth: int = 2,
    ):
        """Makes nothing yet.

        Args:
          segments: (first step, count) -> block, as `SegmentReader.segments`; called on the other thread only, so it
            may also put the block on the devices (but a jax setting made by `with` holds on the thread that made it).
          segments_per_call: S.
          steps: no block that ends after this step is made ahead.
          depth: blocks to hold ahead of the one asked for; 0 makes none ahead.
        """
        if segments_per_call < 1 or depth < 0:
            raise ValueError(
                f"segments_per_call is {segments_per_call} and depth is {depth}; give at least 1 and at least 0"
            )
        self._segments = segments
        self._count = segments_per_call
        self._steps = steps
        self._depth = depth
        self._making: dict[int, concurrent.futures.Future] = {}  # By first step.
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="segments")

    def __call__(self, step: int) -> Segments:
        """The S segments from `step` on."""
        ahead = range(step + self._count, self._steps - self._count + 1, self._count)[: self._depth]
        wanted = [step, *ahead]
        for other in self._making.keys() - wanted:
            self._making.pop(other).cancel()
        for first in wanted:
            if first not in self._making:
                self._making[first] = self._thread.submit(self._segments, first, self._count)
        return self._making.pop(step).result()

    def close(self) -> None:
        """Drops what is queued and waits for the one block that may be in the making."""
        self._making.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
