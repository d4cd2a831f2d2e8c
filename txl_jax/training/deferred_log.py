"""A log that opens late: which records it drops depends on the checkpoint that a run resumes from."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from txl_jax.runtime.metrics_log import NoLog, RunLog


class DeferredLog:
    """Takes notes before the log of a run is open, and passes everything on to it afterwards."""

    def __init__(self) -> None:
        self._log: RunLog | NoLog = NoLog()
        self._is_open = False
        self._pending_lines: list[str] = []

    @contextlib.contextmanager
    def opened(self, open_log: Callable[[], RunLog | NoLog]) -> Iterator[None]:
        """Opens the log for a block; afterwards it only prints."""
        with open_log() as self._log:
            self._is_open = True
            yield

    def flush_notes(self) -> None:
        """Writes the notes that were taken before the log was open."""
        for line in self._pending_lines:
            self.note(line)
        self._pending_lines.clear()

    def note(self, line: str) -> None:
        """Writes a remark, now or once the log is open."""
        if self._is_open:
            self.print(f"note      {line}")
        else:
            self._pending_lines.append(line)

    def print(self, line: str) -> None:
        """Prints a line and adds it to log.txt."""
        self._log.print(line)

    def record(self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None) -> None:
        """Adds a record to metrics.jsonl."""
        self._log.record(kind, step, values, member=member)

    def seal(self) -> None:
        """Keeps what was written, before a checkpoint or a result that relies on it."""
        self._log.seal()

    def settings(self, values: Mapping[str, Any]) -> None:
        """Passes settings on to the sinks."""
        self._log.settings(values)

    def text(self, step: int, tag: str, text: str) -> None:
        """Passes a text on to the sinks."""
        self._log.text(step, tag, text)
