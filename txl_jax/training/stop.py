"""SIGTERM and Ctrl-C as a polite request to stop at the next step border."""

import signal
from types import FrameType


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is only noted; a second one acts as usual.

    Attributes:
      signal_name: "SIGTERM" or "SIGINT" once one has arrived, until then None.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.signal_number = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in self._SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_name, self.signal_number = signal.Signals(number).name, number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
