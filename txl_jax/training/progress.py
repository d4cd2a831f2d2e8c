"""From the metrics of updates to progress lines, records, and the alarm when a number is not finite."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from txl_jax.errors import NonFiniteError
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime.environment import duration
from txl_jax.runtime.metrics_log import RunLog
from txl_jax.training.step import UpdateMetrics


@dataclasses.dataclass
class Window:
    """Sums since the last progress line; part of a checkpoint, so that resuming changes no line."""

    nats: float = 0.0
    tokens: float = 0.0
    grad_norm: float = 0.0
    updates: int = 0


class Progress:
    """Collects updates, and reports each time `log_every` of them are complete.

    Args:
      run_log: takes a record for each report.
      window: the sums of an interrupted run.
      log: takes a line for each report; None: the run log does.

    Attributes:
      reported: step and values of the last report.
    """

    def __init__(
        self,
        run_log: RunLog,
        *,
        steps: int,
        log_every: int,
        tokens_per_step: int,
        measure: Measure = Measure.BPC,
        window: dict[str, Any] | None = None,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.window = Window(**(window or {}))
        self.reported: dict[str, float] = {}
        self._run_log = run_log
        self._log = log or run_log.print
        self._steps = steps
        self._log_every = log_every
        self._tokens_per_step = tokens_per_step
        self._measure = measure
        self._clock = clock
        self._since = clock()
        self._timed_updates = 0  # Unlike the window's, these were all made by this process.

    def update(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Takes the metrics [S], on the host, of the updates after the first `first_step`.

        Raises:
          NonFiniteError: a loss or gradient norm is not finite; names the first such update.
        """
        check_finite(first_step, metrics)
        window = self.window
        window.nats += float(np.sum(metrics.nats, dtype=np.float64))
        window.tokens += float(np.sum(metrics.tokens, dtype=np.float64))
        window.grad_norm += float(np.sum(metrics.grad_norm, dtype=np.float64))
        window.updates += len(metrics.nats)
        self._timed_updates += len(metrics.nats)
        done = first_step + len(metrics.nats)
        if done % self._log_every == 0 or done == self._steps:
            self._report(done, float(metrics.learning_rate[-1]))

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the next tokens/s."""
        self._since += seconds

    def _report(self, step: int, learning_rate: float) -> None:
        window, now = self.window, self._clock()
        seconds = max(now - self._since, 1e-9)
        rate = self._timed_updates * self._tokens_per_step / seconds
        remaining = (self._steps - step) * seconds / max(self._timed_updates, 1)
        totals, grad_norm = Totals(window.nats, window.tokens), window.grad_norm / window.updates
        values = {
            "loss": totals.nll,
            "bpc": totals.bpc,
            "perplexity": totals.perplexity,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens_per_second": rate,
        }
        self._run_log.record("train", step, values)
        self.reported = {"step": step, **values, "remaining": remaining}
        self._log(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {totals.nll:.4f}  {totals.told(self._measure)}  "
            f"grad norm {grad_norm:.3f}  lr {learning_rate:.2e}  {rate:,.0f} tokens/s  ETA {duration(remaining)}"
        )
        self.window, self._since, self._timed_updates = Window(), now, 0


def check_finite(first_step: int, metrics: UpdateMetrics) -> None:
    """Raises `NonFiniteError` that names the first update whose loss or gradient norm is not finite."""
    finite = np.isfinite(metrics.nats) & np.isfinite(metrics.grad_norm)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise NonFiniteError(
            f"update {first_step + bad + 1}: summed loss {metrics.nats[bad]}, gradient norm {metrics.grad_norm[bad]}, "
            f"learning rate {metrics.learning_rate[bad]:.2e}; training stops here"
        )
