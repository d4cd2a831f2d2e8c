"""SIGTERM and Ctrl-C as a polite request to stop at the next step border."""

import os
import signal
from types import FrameType
from typing import Self


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is answered and noted; a second one acts as usual.

    Attributes:
      signal_number: the signal that has arrived; 0 until then.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in self._SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        return self.signal_number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        self._restore()
        # Not print: the signal may have come in the middle of one.
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving and stopping as soon as this step is done; once more stops at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
