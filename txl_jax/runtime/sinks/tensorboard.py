"""TensorBoard files of a run: scalars, settings and texts, written in the calling thread.

tensorboardX's SummaryWriter is not used: it writes from a thread, which dies on a full disk; ten records later its
queue is full and the training loop waits forever. And its files are named by the second, while TensorBoard reads them
in the order of their names: a run that is resumed within that second would overwrite the file before, and one that is
resumed after the clock went back would be read before it. Hence the number in the names here. On object storage each
file is written on this machine and uploaded when it is flushed.
"""

import contextlib
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_jax.runtime.sinks.sink import Sink, grouped_names

_NUMBERED = re.compile(r"events\.(\d+)\.")
# Columns of TensorBoard's table of settings (HPARAMS).
_RESULTS = ("valid/loss", "test/loss", "test/bpc", "test/perplexity")


class TensorBoardSink(Sink):
    """A new TensorBoard file in a folder, made when it is first used; it hides the later steps of the files before it.

    tensorboardX is imported then and not with this module: the import is slow, and takes PyTorch with it where that is
    installed.

    Args:
      folder: made if missing; its parent must exist.
      first_step: what earlier files hold of later steps is hidden.
      upload: whether the folder is on object storage, so that files are written elsewhere first.

    Every method raises OSError when the file cannot be written, and ImportError without tensorboardX.
    """

    def __init__(self, folder: Path, *, first_step: int, upload: bool = False):
        self._folder = self._local = folder
        self._first_step = first_step
        self._upload = upload
        self._number = 0  # Of the newest file; 0: nothing was written yet.
        self._file: Any = None
        self._settings: Mapping[str, Any] | None = None  # Not written yet.
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def settings(self, values: Mapping[str, Any]) -> None:
        """Keeps the settings until there is something else to write, so that a run's first step waits for no import."""
        self._settings = values

    def record(self, kind: str, step: int, values: Mapping[str, float], member: str | None = None) -> None:
        """Adds a scalar for each value; "=" in the name of a member becomes "_", as TensorBoard wants it."""
        from tensorboardX import summary

        named = grouped_names(kind, values, member)
        self._write(step, *(summary.scalar(name, number) for name, number in named.items()))

    def text(self, step: int, tag: str, text: str) -> None:
        """Adds a text, which TensorBoard shows as Markdown: as a block of code, so that each character is kept."""
        from tensorboardX import summary

        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(step, summary.text(tag, indented))

    def flush(self) -> None:
        """Writes the settings, and uploads what was written to object storage; a local file is written already."""
        self._write_settings()
        if self._temporary is None or self._file is None:
            return
        self._file.close()
        self._file = None
        for path in _event_files(self._local):
            (self._folder / path.name).upload(path)  # type: ignore[attr-defined]
            path.unlink()

    def close(self) -> None:
        """Closes the file."""
        self.flush()
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                # It leaves its file open then, which Python 3.13 reports on standard error.
                with contextlib.suppress(OSError):
                    self._file._py_recordio_writer.close()  # noqa: SLF001
                raise
        if self._temporary is not None:
            self._temporary.cleanup()

    def _write_settings(self) -> None:
        """Adds the settings twice: as a text, and for the table of settings (HPARAMS)."""
        values, self._settings = self._settings, None
        if values is None:
            return
        from tensorboardX import summary

        rows = "".join(f"| {name} | {value} |\n" for name, value in values.items())
        # The plugin takes numbers, booleans and strings.
        plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
        experiment, start, _ = summary.hparams(plain, dict.fromkeys(_RESULTS, 0.0))
        found = (summary.text("settings", f"| setting | value |\n|---|---|\n{rows}"), experiment, start)
        self._write(self._first_step, *found)

    def _write(self, step: int, *summaries: Any) -> None:
        self._write_settings()
        from tensorboardX.proto import event_pb2

        event = event_pb2.Event(wall_time=time.time(), step=step)
        for summary in summaries:
            event.summary.value.extend(summary.value)
        if not self._number:
            self._begin()
        self._write_event(event)

    def _begin(self) -> None:
        """Makes the folder, and begins with an event that hides the later steps of earlier files."""
        from tensorboardX.proto import event_pb2

        if self._upload:
            self._temporary = tempfile.TemporaryDirectory(prefix="tensorboard-")
            self._local = Path(self._temporary.name)
        self._folder.mkdir(exist_ok=True)
        self._number = max(map(_number, _event_files(self._folder)), default=0)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(event_pb2.Event(wall_time=time.time(), step=self._first_step + 1, session_log=start))

    def _write_event(self, event: Any) -> None:
        from tensorboardX import event_file_writer

        if self._file is None:
            self._number += 1
            self._file = event_file_writer.EventsWriter(str(self._local / f"events.{self._number:06}"))
        self._file.write_event(event)
        self._file.flush()


def _event_files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _NUMBERED.match(path.name)]
    except FileNotFoundError:
        return []


def _number(path: Path) -> int:
    found = _NUMBERED.match(path.name)
    assert found
    return int(found[1])
