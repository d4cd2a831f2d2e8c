"""TensorBoard files of a run: scalars, written in the calling thread.

tensorboardX's SummaryWriter is not used: it writes from a thread, which dies on a full disk; ten records later its
queue is full and the training loop waits forever. And its files are named by the second, while TensorBoard reads them
in the order of their names: a run that is resumed within that second would overwrite the file before, and one that is
resumed after the clock went back would be read before it. Hence the number in the names here. On object storage each
file is written on this machine and uploaded when it is sealed.
"""

import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_jax.runtime.paths import is_remote

_NUMBERED = re.compile(r"events\.(\d+)\.")


class ScalarWriter:
    """A new TensorBoard file in a folder; it hides the later steps of the files before it.

    tensorboardX is imported here and not with this module: the import is slow, and takes PyTorch with it where that is
    installed.

    Args:
      folder: made if missing; its parent must exist.
      first_step: what earlier files hold of later steps is hidden.

    Every method raises OSError when the file cannot be written.
    """

    def __init__(self, folder: Path, *, first_step: int):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._writer, self._event, self._scalar = event_file_writer.EventsWriter, event_pb2.Event, summary.scalar
        self._folder, self._local = folder, folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if is_remote(folder):
            self._temporary = tempfile.TemporaryDirectory(prefix="tensorboard-")
            self._local = Path(self._temporary.name)
        folder.mkdir(exist_ok=True)
        self._number = max(map(_number, _event_files(folder)), default=0)
        self._file: Any = None
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of one step."""
        event = self._event(wall_time=time.time(), step=step)
        for name, number in scalars.items():
            event.summary.value.extend(self._scalar(name, number).value)
        self._write(event)

    def seal(self) -> None:
        """Uploads what was written, to object storage; a local file is written already."""
        if self._local is not self._folder and self._file is not None:
            self._file.close()
            self._file = None
            for path in _event_files(self._local):
                (self._folder / path.name).upload(path)  # type: ignore[attr-defined]
                path.unlink()

    def close(self) -> None:
        """Closes the file."""
        self.seal()
        if self._file is not None:
            self._file.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _write(self, event: Any) -> None:
        if self._file is None:
            self._number += 1
            self._file = self._writer(str(self._local / f"events.{self._number:06}"))
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
