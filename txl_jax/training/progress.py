"""Training progress: lines, records, throughput (tokens/s) and a check for non-finite numbers."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from txl_jax.errors import NonFiniteError
from txl_jax.flops import StepCost
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime import environment
from txl_jax.runtime.log import RunLog
from txl_jax.training.member_axis import Members
from txl_jax.training.step import UpdateMetrics

_ONE_RUN = Members()
# Of the time: shorter waits are omitted from the lines, not from the records.
_WORTH_A_COLUMN = 0.05
# Of the first steps, before a run states how long it takes.
_SECONDS_TO_TIME = 3.0


@dataclasses.dataclass
class RunningTotals:
    """Sums since the last progress line.

    They are part of a checkpoint, so that resuming changes no line.
    """

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

    def values(self, measure: Measure) -> dict[str, float]:
        """Returns the values of a record."""
        return Totals(self.nats, self.tokens).per_token(measure) | {
            "grad_norm": self.grad_norm / self.updates
        }


@dataclasses.dataclass(eq=False, repr=False)
class Progress:
    """Totals over updates, reported each time `log_every` updates are complete.

    Each report is a record per member, and one line.

    A record of the kind "train" has loss, bpc (of bytes and characters), bits_per_token,
    perplexity, grad_norm (means since the last one), learning_rate, tokens_per_second,
    step_seconds, host_wait_share, and where they are known model_flops_per_second, peak_share and
    device_memory_bytes.
    """

    log: RunLog
    _: dataclasses.KW_ONLY
    steps: int
    log_every: int
    # Of an update.
    cost: StepCost
    measure: Measure = Measure.BPC
    # Of an ensemble, whose metrics have a leading axis.
    members: Members = _ONE_RUN
    # `state()` of an interrupted run.
    running_totals: dataclasses.InitVar[Any] = None
    clock: Callable[[], float] = time.monotonic
    # The most in use, or None if unknown.
    device_memory: Callable[[], int | None] = environment.device_memory_bytes

    def __post_init__(self, running_totals: Any) -> None:
        self._totals = [
            RunningTotals(**(stored or {})) for stored in self.members.from_json(running_totals)
        ]
        self._excluded = 0.0
        self._since = self._now()
        self._timed_updates = 0  # Unlike the running totals', these were all made by this process.
        self._waited = 0.0
        # Updates done by its end, and when that was.
        self._first_call: tuple[int, float] | None = None
        self._has_forecast = False

    def state(self) -> Any:
        """Returns the running totals as JSON values, for a checkpoint."""
        return self.members.to_json([dataclasses.asdict(totals) for totals in self._totals])

    def add(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Takes the metrics of the updates after the first `first_step`.

        The metrics are arrays [S], or [n, S], on the host.

        Raises `NonFiniteError`, which names update and member, if a loss or gradient norm is not
        finite.
        """
        of_members = self.members.split(metrics)
        for index, own in enumerate(of_members):
            _check_finite(first_step, own, self.members.prefix(index))
        for running, own in zip(self._totals, of_members, strict=True):
            running.add(own)
        count = len(of_members[0].nats)
        self._timed_updates += count
        done = first_step + count
        self._forecast(done)
        if done % self.log_every == 0 or done == self.steps:
            self._report(done, [float(own.learning_rate[-1]) for own in of_members])

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the times that are reported."""
        self._excluded += seconds

    def waited(self, seconds: float) -> None:
        """Takes time that the loop has waited for segments, for `host_wait_share`."""
        self._waited += seconds

    def _now(self) -> float:
        return self.clock() - self._excluded

    def _forecast(self, done: int) -> None:
        """Prints how long the run takes, once, when its first steps are timed."""
        now = self._now()
        # It is not counted: it fills buffers, and on GPUs loads kernels.
        if self._first_call is None:
            self._first_call = (done, now)
        updates, seconds = done - self._first_call[0], now - self._first_call[1]
        if self._has_forecast or seconds < _SECONDS_TO_TIME or updates == 0 or done == self.steps:
            return
        self._has_forecast = True
        each, memory = seconds / updates, self.device_memory()
        self.log.print(
            f"time      {environment.brief_number(each)} s per step, about "
            f"{environment.duration((self.steps - done) * each)} for the remaining "
            f"{self.steps - done:,} steps, without evaluations"
            + ("" if memory is None else f"; {environment.megabytes(memory)} per device in use")
        )

    def _report(self, step: int, learning_rates: Sequence[float]) -> None:
        now = self._now()
        seconds = max(now - self._since, 1e-9)
        measured = self._measured(seconds)
        for label, running, learning_rate in zip(
            self.members.labels, self._totals, learning_rates, strict=True
        ):
            values = running.values(self.measure) | {"learning_rate": learning_rate} | measured
            self.log.record("train", step, values, member=label)
        self.log.print("  ".join(self._columns(step, measured)))
        self._totals = [RunningTotals() for _ in self._totals]
        self._since, self._timed_updates, self._waited = now, 0, 0.0

    def _measured(self, seconds: float) -> dict[str, float]:
        """Returns the values of a record that this process measured, by the names in `MEASURED`."""
        cost, updates = self.cost, self._timed_updates
        found = {
            "tokens_per_second": updates * cost.tokens / seconds,
            "step_seconds": seconds / max(updates, 1),
            "host_wait_share": min(self._waited / seconds, 1.0),
        }
        if cost.flops is not None:
            found["model_flops_per_second"] = updates * cost.flops / seconds
            if cost.peak_flops is not None:
                found["peak_share"] = (
                    len(self.members) * found["model_flops_per_second"] / cost.peak_flops
                )
        if (memory := self.device_memory()) is not None:
            found["device_memory_bytes"] = memory
        return found

    def _columns(self, step: int, measured: dict[str, float]) -> list[str]:
        """Returns the parts of a progress line, which fit in 100 columns together."""
        rate = environment.brief_number(measured["tokens_per_second"] * len(self.members))
        columns = [
            f"step {step:>{len(str(self.steps))}}/{self.steps}",
            *self._losses(),
            f"{rate} tokens/s",
        ]
        if "peak_share" in measured:
            columns.append(f"{measured['peak_share']:.0%} peak")
        if measured["host_wait_share"] >= _WORTH_A_COLUMN:
            columns.append(f"host wait {measured['host_wait_share']:.0%}")
        remaining = (self.steps - step) * measured["step_seconds"]
        return [*columns, f"ETA {environment.duration(remaining)}"]

    def _losses(self) -> list[str]:
        if self.members.names:
            return [
                "losses",
                *(f"{running.values(self.measure)['loss']:.4f}" for running in self._totals),
            ]
        [running] = self._totals
        values, measured = (
            running.values(self.measure),
            Totals(running.nats, running.tokens).format(self.measure),
        )
        return [f"loss {values['loss']:.4f}", measured, f"grad norm {values['grad_norm']:.3f}"]


def _check_finite(first_step: int, metrics: UpdateMetrics, prefix: str) -> None:
    """Raises `NonFiniteError` if a loss or gradient norm is not finite.

    The error names the first update whose loss or gradient norm is not finite.
    """
    finite = np.isfinite(metrics.nats) & np.isfinite(metrics.grad_norm)
    if not finite.all():
        bad = int(np.argmin(finite))
        found = f"summed loss {metrics.nats[bad]}, gradient norm {metrics.grad_norm[bad]}"
        rate = f"learning rate {metrics.learning_rate[bad]:.2e}"
        raise NonFiniteError(
            f"{prefix}update {first_step + bad + 1}: {found}, {rate}. Training stops here"
        )
