"""TensorBoard files of a run: scalars, written in the calling thread.

tensorboardX's SummaryWriter is not used: it writes from a thread, which dies on a full disk; ten records later its
queue is full and the training loop waits forever. And its files are named by the second, while TensorBoard reads them
in the order of their names: a run that is resumed within that second would overwrite the file before, and one that is
resumed after the clock went back would be read before it. Hence the number in the names here.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path

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

        self._event, self._scalar = event_pb2.Event, summary.scalar
        folder.mkdir(exist_ok=True)
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _NUMBERED.match(path.name))]
        self._file = event_file_writer.EventsWriter(str(folder / f"events.{max(numbers, default=0) + 1:06}"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._file.write_event(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of one step."""
        event = self._event(wall_time=time.time(), step=step)
        for name, number in scalars.items():
            event.summary.value.extend(self._scalar(name, number).value)
        self._file.write_event(event)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
