"""Stops of a run at a chosen place, and the records that do not depend on the clock."""

from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.sinks import MEASURED


class StopAfter:
    """Requests a stop at the `calls`-th question."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        self.calls -= 1
        return self.calls <= 0


def numbers(workdir):
    """Returns the records of a run without measured times and rates."""
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in read_metrics(workdir.path)]
