"""Successive halving: runs are compared at rungs, numbers of updates, and only the best go on to the next.

Where a sweep is follows from the records of its runs alone: a sweep that is stopped and started again, or continued on
another machine, comes to the same rungs and the same decisions. Runs that differ only in the seed are kept together, by
their mean. A run that goes on resumes in its own folder; it equals a run that was never compared.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from launch.sweep_file import Run, Sweep
from txl_jax.run_report.seed_groups import SEED
from txl_jax.runtime.metrics_log import read_metrics


@dataclasses.dataclass(frozen=True)
class Stage:
    """The rung that a sweep has come to.

    Attributes:
      rung: the update at which its runs are compared; None: they are trained to the end.
      runs: those that are trained at it.
      waiting: those of them that have not reached it.
      dropped: by the name of each run that was dropped, the update at which it was.
    """

    rung: int | None
    runs: tuple[Run, ...]
    waiting: tuple[Run, ...]
    dropped: Mapping[str, int]

    def command(self, run: Run) -> tuple[str, ...]:
        """Returns the command that trains a run as far as the rung."""
        return run.command if self.rung is None else (*run.command, f"--stop_after={self.rung}")


def stage(sweep: Sweep, *, failed: Collection[str] = ()) -> Stage:
    """Returns the rung that the runs' records lead to; without halving the only one, the end.

    Args:
      sweep: of the file.
      failed: names of runs that have failed and are not waited for; they are compared as the worst.
    """
    groups, dropped = _groups(sweep.runs), dict[str, int]()
    for rung in sweep.rungs:
        if len(groups) == 1:  # The last ones go on to the end.
            break
        losses = {run.name: _loss(run, rung) for group in groups for run in group}
        waiting = [run for group in groups for run in group if losses[run.name] is None and run.name not in failed]
        if waiting:
            return Stage(rung, tuple(run for group in groups for run in group), tuple(waiting), dropped)
        ranked = sorted(range(len(groups)), key=lambda i: (_mean([losses[run.name] for run in groups[i]]), i))
        kept = set(ranked[: max(1, len(groups) // sweep.factor)])
        dropped |= {run.name: rung for i, group in enumerate(groups) if i not in kept for run in group}
        groups = [group for i, group in enumerate(groups) if i in kept]
    runs = tuple(run for run in sweep.runs if run.name not in dropped)
    return Stage(None, runs, tuple(run for run in runs if run.results is None and run.name not in failed), dropped)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in the seed alone, in the order of the file."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(repr({name: value for name, value in run.differs.items() if name != SEED}), []).append(run)
    return list(found.values())


def _loss(run: Run, rung: int) -> float | None:
    """The validation loss of a run at a rung; None: it was not evaluated there yet."""
    found = [record for record in read_metrics(run.folder) if (record["kind"], record["step"]) == ("valid", rung)]
    return float(found[-1]["loss"]) if found else None


def _mean(losses: Sequence[float | None]) -> float:
    """The mean; infinite if a run has failed, or its loss is no number."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return sum(known) / len(known) if len(known) == len(losses) else math.inf
