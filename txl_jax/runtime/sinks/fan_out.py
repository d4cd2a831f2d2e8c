"""All sinks as one: a sink that fails is reported once and left out from there on, and the run goes on."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from txl_jax.runtime.sinks.sink import Sink


class FanOut(Sink):
    """Passes everything on to each sink in turn.

    Args:
      sinks: those that have not failed yet are called.
      report: takes one line about a sink that failed.
    """

    def __init__(self, sinks: Sequence[Sink], report: Callable[[str], None]):
        self._sinks = list(sinks)
        self._failed: list[Sink] = []
        self._report = report

    def settings(self, values: Mapping[str, Any]) -> None:
        """Passes on the settings."""
        self._each(lambda sink: sink.settings(values))

    def record(self, kind: str, step: int, values: Mapping[str, float], member: str | None = None) -> None:
        """Passes on a record."""
        self._each(lambda sink: sink.record(kind, step, values, member))

    def text(self, step: int, tag: str, text: str) -> None:
        """Passes on a text."""
        self._each(lambda sink: sink.text(step, tag, text))

    def flush(self) -> None:
        """Flushes each sink."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Closes each sink, those that have failed too."""
        self._each(lambda sink: sink.close())
        for sink in self._failed:
            with contextlib.suppress(Exception):
                sink.close()
        self._failed.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 (a dashboard that is down must not end a run of days)
                self._sinks.remove(sink)
                self._failed.append(sink)
                self._report(
                    f"note      {type(sink).__name__} failed and gets nothing more in this start; the run goes on "
                    f"({_brief(error)})"
                )


def _brief(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
