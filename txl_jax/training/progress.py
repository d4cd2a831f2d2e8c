"""Training progress: lines, records, throughput (tokens/s) and a check for non-finite numbers."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from txl_jax.errors import NonFiniteError
from txl_jax.flops import StepCost
from txl_jax.metrics import Measure, Totals
from txl_jax.runtime import environment
from txl_jax.runtime.log import RunLog
from txl_jax.training.member_axis import Members
from txl_jax.training.step import UpdateMetrics

_ONE_RUN = Members()
# Waits for a smaller fraction of the time are omitted from the lines, not from the records.
_WORTH_A_COLUMN = 0.05
# The first steps are timed for this long before the log shows how long the run takes.
_SECONDS_TO_TIME = 3.0
_SHORTEST_SECONDS = 1e-9  # A clock may not have moved between two reports.


@dataclasses.dataclass
class RunningTotals:
    """Sums over the updates since the last progress line.

    They are part of a checkpoint, so that resuming does not change any line.
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
        values = Totals(self.nats, self.tokens).per_token(measure)
        return values | {"grad_norm": self.grad_norm / self.updates}


class _FirstCall(NamedTuple):
    """When the first call of the training step in this process ended."""

    step: int  # Updates done by its end.
    time: float  # As `Progress._now` returns it.


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
    # Updates of the whole run.
    steps: int
    log_every: int
    # The work of one update of one run.
    cost: StepCost
    measure: Measure = Measure.BPC
    # The members of an ensemble, whose metrics have a leading member axis. A single run is one
    # member, with the label None and without that axis: `split` gives [metrics].
    members: Members = _ONE_RUN
    # What `state()` returned in an interrupted run, or None for a new run.
    running_totals: dataclasses.InitVar[Any] = None
    # Returns the time in seconds.
    clock: Callable[[], float] = time.monotonic
    # Returns the most bytes in use on a device so far, or None if unknown.
    device_memory: Callable[[], int | None] = environment.device_memory_bytes

    def __post_init__(self, running_totals: Any) -> None:
        # One value per member, for a single run a list of one. A new run has stored nothing, and
        # gets None for each.
        stored_by_member = self.members.from_json(running_totals)
        self._totals = [RunningTotals(**(stored or {})) for stored in stored_by_member]
        # Seconds that were spent on something else since the start.
        self._excluded = 0.0

        # Since the last report: its time, updates by this process (the running totals may contain
        # those of an interrupted one), and seconds of waiting for segments.
        self._since = self._now()
        self._timed_updates = 0
        self._waited = 0.0

        # For the forecast.
        self._first_call: _FirstCall | None = None
        self._has_forecast = False

    def state(self) -> Any:
        """Returns the running totals as JSON values, for a checkpoint."""
        return self.members.to_json([dataclasses.asdict(totals) for totals in self._totals])

    def add(self, first_step: int, metrics: UpdateMetrics) -> None:
        """Adds the metrics of a call, and reports them if a report is due.

        Args:
          first_step: Updates done before the call.
          metrics: Arrays [S], or [n, S] for an ensemble, on the host.

        Raises:
          NonFiniteError: If a loss or gradient norm is not finite. It names update and member, and
            nothing of the call is counted.
        """
        metrics_by_member = self.members.split(metrics)
        for index, member_metrics in enumerate(metrics_by_member):
            _check_finite(first_step, member_metrics, self.members.prefix(index))
        for totals, member_metrics in zip(self._totals, metrics_by_member, strict=True):
            totals.add(member_metrics)

        n_update = len(metrics_by_member[0].nats)
        self._timed_updates += n_update
        step = first_step + n_update
        self._forecast(step)
        if step % self.log_every == 0 or step == self.steps:
            self._report(step, [float(member.learning_rate[-1]) for member in metrics_by_member])

    def exclude(self, seconds: float) -> None:
        """Leaves time spent on something else out of the times that are reported."""
        self._excluded += seconds

    def waited(self, seconds: float) -> None:
        """Adds time that the loop has waited for segments, for `host_wait_share`."""
        self._waited += seconds

    def _now(self) -> float:
        return self.clock() - self._excluded

    def _forecast(self, step: int) -> None:
        """Prints the estimated time of the run once, after its first steps are timed."""
        now = self._now()
        # The first call is not timed: it fills buffers, and on GPUs loads kernels.
        if self._first_call is None:
            self._first_call = _FirstCall(step, now)
        updates = step - self._first_call.step
        seconds = now - self._first_call.time
        is_timed = updates > 0 and seconds >= _SECONDS_TO_TIME
        if self._has_forecast or not is_timed or step == self.steps:
            return

        self._has_forecast = True
        step_seconds = seconds / updates
        remaining = self.steps - step
        line = (
            f"time      {environment.brief_number(step_seconds)} s per step, about "
            f"{environment.duration(remaining * step_seconds)} for the remaining "
            f"{remaining:,} steps, without evaluations"
        )
        memory = self.device_memory()
        if memory is not None:
            line += f"; {environment.megabytes(memory)} per device in use"
        self.log.print(line)

    def _report(self, step: int, learning_rates: Sequence[float]) -> None:
        """Writes a record per member and one line, and begins the next totals."""
        now = self._now()
        measured = self._measured(max(now - self._since, _SHORTEST_SECONDS))
        for index, label in enumerate(self.members.labels):
            values = self._totals[index].values(self.measure)
            values["learning_rate"] = learning_rates[index]
            self.log.record("train", step, values | measured, member=label)
        self.log.print("  ".join(self._columns(step, measured)))

        self._totals = [RunningTotals() for _ in self._totals]
        self._since = now
        self._timed_updates = 0
        self._waited = 0.0

    def _measured(self, seconds: float) -> dict[str, float]:
        """Returns the values of a record that this process measured, by name.

        The names are in `runtime.sinks.MEASURED`. `seconds` is the time since the last report.
        """
        updates = self._timed_updates
        # Tokens and FLOPs are one member's. Tokens that a stride reads again count only as FLOPs.
        measured = {
            "tokens_per_second": updates * self.cost.tokens / seconds,
            "step_seconds": seconds / max(updates, 1),
            "host_wait_share": min(self._waited / seconds, 1.0),
        }
        if self.cost.flops is not None:
            flops_per_second = updates * self.cost.flops / seconds
            measured["model_flops_per_second"] = flops_per_second
            # All members share the peak.
            if self.cost.peak_flops is not None:
                all_members = len(self.members) * flops_per_second
                measured["peak_share"] = all_members / self.cost.peak_flops
        memory = self.device_memory()
        if memory is not None:
            measured["device_memory_bytes"] = memory
        return measured

    def _columns(self, step: int, measured: dict[str, float]) -> list[str]:
        """Returns the parts of a progress line, which fit in 100 columns together."""
        width = len(str(self.steps))
        rate = environment.brief_number(measured["tokens_per_second"] * len(self.members))
        columns = [f"step {step:>{width}}/{self.steps}", *self._losses(), f"{rate} tokens/s"]
        if "peak_share" in measured:
            columns.append(f"{measured['peak_share']:.0%} peak")
        if measured["host_wait_share"] >= _WORTH_A_COLUMN:
            columns.append(f"host wait {measured['host_wait_share']:.0%}")
        remaining = (self.steps - step) * measured["step_seconds"]
        columns.append(f"ETA {environment.duration(remaining)}")
        return columns

    def _losses(self) -> list[str]:
        """Returns an ensemble's losses, or loss, measure and gradient norm of a run by itself."""
        if self.members.names:
            losses = [totals.values(self.measure)["loss"] for totals in self._totals]
            return ["losses", *[f"{loss:.4f}" for loss in losses]]
        [totals] = self._totals
        values = totals.values(self.measure)
        # For example "bpc 1.0600", "bits per byte 1.0600" or "ppl 24.00".
        in_measure = Totals(totals.nats, totals.tokens).format(self.measure)
        return [f"loss {values['loss']:.4f}", in_measure, f"grad norm {values['grad_norm']:.3f}"]


def _check_finite(first_step: int, metrics: UpdateMetrics, prefix: str) -> None:
    """Checks the metrics [S] of the updates after the first `first_step`.

    Raises:
      NonFiniteError: If a loss or gradient norm is not finite. It names the first such update.
    """
    is_finite = np.isfinite(metrics.nats) & np.isfinite(metrics.grad_norm)
    if not is_finite.all():
        bad = int(np.argmin(is_finite))
        raise NonFiniteError(
            f"{prefix}update {first_step + bad + 1}: summed loss {metrics.nats[bad]}, gradient "
            f"norm {metrics.grad_norm[bad]}, learning rate {metrics.learning_rate[bad]:.2e}. "
            "Training stops here"
        )
