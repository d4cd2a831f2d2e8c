"""The protocol of all sinks, and the names that dashboards group records by."""

from collections.abc import Mapping
from typing import Any

# Values of a "train" record that the clock and the device decide: a resumed run repeats all others bit for bit.
MEASURED = (
    "tokens_per_second",
    "step_seconds",
    "host_wait_share",
    "model_flops_per_second",
    "peak_share",
    "device_memory_bytes",
)


class Sink:
    """A receiver of what a run reports. Its methods do nothing: override those that you need.

    A run calls them from its own thread, with several processes in process 0 alone. If a method raises, the run logs
    that in one line, calls the sink no more, and goes on.
    """

    def settings(self, values: Mapping[str, Any]) -> None:
        """Takes the settings by dotted names, and facts such as device and versions; called first, in every start."""

    def record(self, kind: str, step: int, values: Mapping[str, float], member: str | None = None) -> None:
        """Takes one record.

        Args:
          kind: "train", "valid", "test", or a hook's own.
          step: updates done.
          values: numbers by name, nan and infinities among them.
          member: of the ensemble that it is about; None: a run by itself.
        """

    def text(self, step: int, tag: str, text: str) -> None:
        """Takes a text, such as a sample, after `step` updates."""

    def flush(self) -> None:
        """Makes what was taken durable; called at each checkpoint."""

    def close(self) -> None:
        """Ends; called last, also when the run fails."""


def grouped_names(kind: str, values: Mapping[str, float], member: str | None) -> dict[str, float]:
    """Returns the values by the names that dashboards group at the slash: "train/loss", "speed/tokens_per_second".

    >>> grouped_names("train", {"loss": 2.0, "tokens_per_second": 9.0}, None)
    {'train/loss': 2.0, 'speed/tokens_per_second': 9.0}
    >>> grouped_names("valid", {"loss": 2.0}, "seed=2")
    {'seed=2/valid/loss': 2.0}
    """
    prefix = "" if member is None else f"{member}/"
    return {f"{prefix}{'speed' if name in MEASURED else kind}/{name}": value for name, value in values.items()}
