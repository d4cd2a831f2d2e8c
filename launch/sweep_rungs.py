"""The [halving] table of a sweep's file: the rungs, numbers of updates at which runs are compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.errors import UserError

_KEYS = ("first", "factor")


def of_table(table: Mapping[str, Any], program: str, runs: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Returns the updates at which runs are compared, and the factor.

    They are `first`, `first` times the factor, and so on, below the last update.

    Args:
      table: [halving].
      program: of the runs.
      runs: as `launch.sweep_file.Run`.

    Raises:
      UserError: a number that cannot be, or runs that cannot be compared there.
    """
    for name in table:
        if name not in _KEYS:
            raise UserError(f"halving has {name!r}, which is not known; it may have {', '.join(_KEYS)}")
    first, factor = table.get("first"), table.get("factor", 3)
    if type(first) is not int or first < 1:
        raise UserError(f"halving has first = {first!r}; give the updates before the first comparison, as first = 500")
    if type(factor) is not int or factor < 2:
        raise UserError(f"halving has factor = {factor!r}; give a whole number of 2 or more: one run in factor goes on")
    if program == "quickstart":
        raise UserError("halving stops runs on the way, and quickstart has no --stop_after; take another program")
    steps = sorted({run.config.train.steps for run in runs})
    if len(steps) > 1 or first >= steps[0]:
        raise UserError(
            f"halving compares runs after {first} updates, and train.steps is {', '.join(map(str, steps))}; give all "
            "runs one number of updates, above the first comparison"
        )
    _check_evaluated(runs, first)
    found = [first]
    while found[-1] * factor < steps[0]:
        found.append(found[-1] * factor)
    return tuple(found), factor


def _check_evaluated(runs: Sequence[Any], first: int) -> None:
    """Raises `UserError` for a run that is not evaluated at the rungs, or may end before them."""
    for run in runs:
        every = run.config.train.eval_every
        if first % every:
            raise UserError(f"halving has first = {first}, no multiple of train.eval_every, {every}, in {run.name}")
        if run.config.train.patience:
            raise UserError(f"train.patience is {run.config.train.patience} in {run.name}; halving ends runs itself")
