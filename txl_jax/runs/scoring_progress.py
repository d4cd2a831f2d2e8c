"""Progress of scoring: a bar or lines, the request to stop, and the check of the result."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from txl_jax.errors import NonFiniteError
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime import environment

_SECONDS_BETWEEN_LINES = 20.0


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """A stop was requested while a text was being scored."""


@contextlib.contextmanager
def progress_bar(
    name: str,
    total: int,
    *,
    unit: str,
    measure: Measure,
    log: Callable[[str], None],
    stop_requested: Callable[[], Any] = lambda: False,
) -> Iterator[Callable[[float, Totals], None]]:
    """Shows the progress of scoring: a bar on a terminal, otherwise a line every 20 seconds.

    Yields a function that receives the completed part of `total`, and the scores so far. It raises
    `Interrupted` if a stop is requested.
    """
    # disable=None: no bar unless the error stream is a terminal. leave=False: the result's line
    # takes its place.
    with tqdm.tqdm(total=total, desc=name, unit=unit, leave=False, disable=None) as bar:
        progress = _ScoringProgress(
            bar=bar,
            name=name,
            total=total,
            measure=measure,
            log=log,
            stop_requested=stop_requested,
            last_line=time.monotonic(),
        )
        yield progress.show


@dataclasses.dataclass
class _ScoringProgress:
    """The progress of scoring one text."""

    bar: Any  # A bar of tqdm, which is disabled if lines are logged instead.
    name: str
    total: int  # Total amount in the bar's unit, such as tokens or segments.
    measure: Measure
    log: Callable[[str], None]
    stop_requested: Callable[[], Any]
    last_line: float  # Seconds of the monotonic clock at the last line, or at the start.
    first: tuple[float, float] | None = None  # (seconds of that clock, `done`) at the first call.

    def show(self, done: float, totals: Totals) -> None:
        """Shows that `done` of `total` is done, with the scores so far.

        `done` is a float because scores count tokens by their weights.

        Raises:
          Interrupted: If a stop was requested.
        """
        if self.stop_requested():
            raise Interrupted(self.name)
        now = time.monotonic()
        if self.first is None:
            self.first = (now, done)
        # No score is available for warm-up tokens, nor for callers that only read a text.
        score_so_far = totals.format(self.measure) if totals.tokens else ""
        if not self.bar.disable:
            self.bar.set_postfix_str(score_so_far, refresh=False)
            self.bar.update(done - self.bar.n)
        elif now - self.last_line >= _SECONDS_BETWEEN_LINES:
            self.last_line = now
            # The time until the first call includes compilation, so the speed is measured after it.
            # At the first call the remaining time is nan, which is shown as "unknown".
            first_time, first_done = self.first
            remaining = math.nan
            if done > first_done:
                remaining = (now - first_time) / (done - first_done) * (self.total - done)
            shown_score = f"  {score_so_far} so far" if score_so_far else ""
            self.log(
                f"{self.name}: {done / self.total:.0%}{shown_score}  "
                f"ETA {environment.duration(remaining)}"
            )


def check_finite(totals: Totals, name: str) -> None:
    """Raises `NonFiniteError` if the loss of a text is nan or infinite."""
    if not math.isfinite(totals.nats):
        raise NonFiniteError(
            f"{name}: the summed loss is {totals.nats}, so these parameters cannot be used"
        )
