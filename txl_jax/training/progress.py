"""Progress of training: lines, records and throughput (tokens/s), and the check for non-finite numbers."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from txl_jax.errors import NonFiniteError
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime.environment import duration
from txl_jax.runtime.metrics_log import MetricsLog
from txl_jax.training.members import Members
from txl_jax.training.step import UpdateMetrics

_ONE_RUN = Members()


@dataclasses.dataclass
class RunningTotals:
    """Sums since the last progress line; part of a checkpoint, so that resuming changes no line."""

    nats: float = 0.0
    tokens: float = 0.0
    grad_norm: float = 0.0
    updates: int = 0

    def add(self, metrics: UpdateMetrics) -> None:
        """Adds the metrics [S] of one run."""
        self.nats += float(np.sum(metrics.nats, dtype=np.float64))
        self.tokens += float(np.sum(metrics.tokens, dtype=np.float64))
        self.grad_norm += float(np.sum(metrics.grad_norm, dtype=np.float64))
        self.updates += len(metrics.nats)


class Progress:
    """Sums up updates, and reports each time `log_every` of them are complete.

    Args:
      log: takes a record per member and one line for each report.
      tokens_per_step: of one member.
      members: of an ensemble, whose metrics have a leading axis.
      running_totals: `state()` of an interrupted run.
    """

    def __init__(
        self,
        log: MetricsLog,
        *,
        steps: int,
        log_every: int,
        tokens_per_step: int,
        measure: Measure = Measure.BPC,
        members: Members = _ONE_RUN,
        running_totals: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._totals = [RunningTotals(**(stored or {})) for stored in members.from_json(running_totals)]
        self._log = log
        self._steps = steps
        self._log_every = log_every
        self._tokens_per_step = tokens_per_step
        self._measure = measure
        self._members = members
        self._clock = clock
        self._since = clock()
        self._timed_updates = 0  # Unlike the running totals', these were all made by this process.

    def state(self) -> Any:
        """Returns the running totals as JSON values, for a checkpoint."""
        return self._members.to_json([dataclasses.asdict(totals) for totals in self._totals])

    def update(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Takes the metrics [S], or [n, S], on the host, of the updates after the first `first_step`.

        Raises:
          NonFiniteError: a loss or gradient norm is not finite; names the first such update, and its member.
        """
        of_members = self._members.split(metrics)
        for index, own in enumerate(of_members):
            check_finite(first_step, own, prefix=self._members.prefix(index))
        for totals, own in zip(self._totals, of_members, strict=True):
            totals.add(own)
        count = len(of_members[0].nats)
        self._timed_updates += count
        done = first_step + count
        if done % self._log_every == 0 or done == self._steps:
            self._report(done, [float(own.learning_rate[-1]) for own in of_members])

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the next tokens/s."""
        self._since += seconds

    def _report(self, step: int, learning_rates: Sequence[float]) -> None:
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        rate = self._timed_updates * self._tokens_per_step / seconds
        remaining = (self._steps - step) * seconds / max(self._timed_updates, 1)
        for label, running, learning_rate in zip(self._members.labels, self._totals, learning_rates, strict=True):
            values = _values(running, learning_rate) | {"tokens_per_second": rate}
            self._log.record("train", step, values, member=label)
        self._log.print(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  {self._line(learning_rates[0])}  "
            f"{rate * len(self._members):,.0f} tokens/s  ETA {duration(remaining)}"
        )
        self._totals = [RunningTotals() for _ in self._totals]
        self._since, self._timed_updates = now, 0

    def _line(self, learning_rate: float) -> str:
        of_members = [Totals(running.nats, running.tokens) for running in self._totals]
        if self._members.names:
            return f"losses {'  '.join(f'{totals.nll:.4f}' for totals in of_members)}"
        (totals,), (running,) = of_members, self._totals
        return (
            f"loss {totals.nll:.4f}  {totals.format(self._measure)}  "
            f"grad norm {running.grad_norm / running.updates:.3f}  lr {learning_rate:.2e}"
        )


def _values(running: RunningTotals, learning_rate: float) -> dict[str, float]:
    totals = Totals(running.nats, running.tokens)
    return {
        "loss": totals.nll,
        "bpc": totals.bpc,
        "perplexity": totals.perplexity,
        "grad_norm": running.grad_norm / running.updates,
        "learning_rate": learning_rate,
    }


def check_finite(first_step: int, metrics: UpdateMetrics, *, prefix: str = "") -> None:
    """Raises `NonFiniteError` that names the first update whose loss or gradient norm is not finite."""
    finite = np.isfinite(metrics.nats) & np.isfinite(metrics.grad_norm)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise NonFiniteError(
            f"{prefix}update {first_step + bad + 1}: summed loss {metrics.nats[bad]}, gradient norm "
            f"{metrics.grad_norm[bad]}, learning rate {metrics.learning_rate[bad]:.2e}; training stops here"
        )
