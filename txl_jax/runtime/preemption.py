"""SIGTERM and Ctrl-C as a polite request to stop at the next step border, in all processes at the same one."""

import itertools
import os
import signal
from types import FrameType
from typing import Self

from jax.experimental import multihost_utils

from txl_jax.runtime import distributed

# Numbers the questions that this process has asked. They are jax's step numbers: all processes take the same way, so that
# the same number is the same place in each.
_questions = itertools.count(1)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is answered and noted; a second one acts as usual. True once noted.

    With several processes a signal to any of them counts for all: jax spreads it, and picks a question that none of them
    has asked yet: before it the answer is no, from it on yes, everywhere. So all must ask alike. A second SIGTERM changes
    nothing then.

    Attributes:
      signal_number: the signal that has arrived; 0 until then. Several processes always stop by SIGTERM.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._several = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._several = distributed.is_multiprocess()
        # SIGTERM is left alone with several processes: jax has a handler of its own, below Python's.
        ways = {signal.SIGINT: self._pass_on} if self._several else dict.fromkeys(_SIGNALS, self._note)
        for number, way in ways.items():
            self._previous[number] = signal.signal(number, way)
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        if self._several and not self.signal_number and multihost_utils.reached_preemption_sync_point(next(_questions)):
            self.signal_number = signal.SIGTERM
        return self.signal_number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        self._answer(number, "as soon as this step is done")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._answer(number, "with all processes")
        os.kill(os.getpid(), signal.SIGTERM)

    def _answer(self, number: int, when: str) -> None:
        self._restore()
        # Not print: the signal may have come in the middle of one.
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving and stopping {when}; once more stops at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
