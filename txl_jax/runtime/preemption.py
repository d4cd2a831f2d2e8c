"""SIGTERM, Ctrl-C or a notice as a request to stop after the current step, in all processes at the same step."""

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from jax.experimental import multihost_utils

from txl_jax.runtime import distributed

# Counts the calls of `reached_preemption_sync_point` in this process. They are jax's step numbers: all processes make
# the same calls, so that the same number is the same point of the program in each.
_sync_points = itertools.count(1)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ALONE, _TOGETHER = "as soon as this step is done", "with all processes"
_requested = threading.Event()  # Set by `request_stop`, for the rest of the process.


def request_stop(reason: str) -> None:
    """Makes the `StopRequest` that is active, or the next one, true, as SIGTERM would; from any thread.

    It is not a signal, so that the SIGTERM of a machine that is shut down afterwards is the first one and does not end
    the process while it saves.

    Args:
      reason: printed on the error stream, such as "preempted=TRUE".
    """
    _requested.set()
    everywhere = distributed.is_multiprocess()
    _print_now(f"{reason}: saving and stopping {_TOGETHER if everywhere else _ALONE}")
    if everywhere:
        os.kill(os.getpid(), signal.SIGTERM)  # jax's own handler, which may be called any number of times.


class StopRequest:
    """A context that notes the first SIGTERM or SIGINT; a second one acts as usual. True once one was noted.

    With several processes a signal to any of them stops all: JAX agrees on a step at which all processes stop
    (`reached_preemption_sync_point`); every process must ask for the truth value at the same sequence of steps. A
    second SIGTERM changes nothing then.

    Attributes:
      signal_number: the signal that has arrived; 0 until then. Several processes always stop by SIGTERM.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._is_multiprocess = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._is_multiprocess = distributed.is_multiprocess()
        # With several processes SIGTERM is left alone: jax has a handler of its own, below Python's.
        handlers = {signal.SIGINT: self._forward} if self._is_multiprocess else dict.fromkeys(_SIGNALS, self._note)
        for number, handler in handlers.items():
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        if (
            self._is_multiprocess
            and not self.signal_number
            and multihost_utils.reached_preemption_sync_point(next(_sync_points))
        ):
            self.signal_number = signal.SIGTERM
        if not self._is_multiprocess and not self.signal_number and _requested.is_set():
            self.signal_number = signal.SIGTERM
        return self.signal_number != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        self._acknowledge(number, _ALONE)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._acknowledge(number, _TOGETHER)
        os.kill(os.getpid(), signal.SIGTERM)

    def _acknowledge(self, number: int, when: str) -> None:
        self._restore()
        _print_now(f"{signal.Signals(number).name}: saving and stopping {when}; once more stops at once")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _print_now(line: str) -> None:
    """Writes a line to the error stream. Not by print: a signal may have come in the middle of one."""
    os.write(2, f"{line}\n".encode())
