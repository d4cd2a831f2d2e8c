"""What a run says about itself: `metrics.jsonl`, `log.txt` and TensorBoard files in its folder.

A resumed run repeats the steps after its last checkpoint. Opening the log drops what was recorded of them, so that
`metrics.jsonl` reads as if the run had never stopped; `log.txt` keeps everything, being the story rather than the
numbers. With several processes one keeps a RunLog, and the others a `NoLog`.
"""

import json
import math
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from txl_jax.errors import LogError
from txl_jax.runtime.files import Writing, replace_file

METRICS = "metrics.jsonl"
_EVENTS = re.compile(r"events\.(\d+)\.")


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a run in the order written; empty if there are none. A torn last line is left out.

    Numbers that JSON cannot hold come as "nan", "inf" and "-inf": `float()` takes them as it takes numbers.

    Raises:
      LogError: a line before the last is no record, or the file cannot be read.
    """
    return list(_records(Path(workdir) / METRICS))


class RunLog:
    """Records, lines and TensorBoard scalars of one run. Use it as a context manager.

    Args:
      workdir: the run's folder; made if missing.
      first_step: the step that the run starts after (that of the checkpoint it resumes from). Records of later
        steps are dropped.
      redone: kinds of records that this start makes again at `first_step` itself; those are dropped too.
      label: stands before each line that is printed.

    Every method raises LogError when a file cannot be written.
    """

    def __init__(
        self, workdir: str | os.PathLike, *, first_step: int = 0, redone: Collection[str] = (), label: str = ""
    ):
        self._label = label
        self._workdir = Path(workdir)
        with Writing(self._workdir):
            self._workdir.mkdir(parents=True, exist_ok=True)
            _drop_repeated(self._workdir / METRICS, first_step, redone)
            self._metrics = open(self._workdir / METRICS, "a", encoding="utf-8")
            self._lines = open(self._workdir / "log.txt", "a", encoding="utf-8")
            self._events = _open_events(self._workdir / "tensorboard", first_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; nothing happens the second time."""
        with Writing(self._workdir):
            self._metrics.close()
            self._lines.close()
            if self._events is not None:
                self._events.close()
                self._events = None

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Adds one record: a line `{"kind": kind, "step": step, **values}` and a scalar `kind/name` per value.

        Raises:
          ValueError: a value named "kind" or "step".
        """
        if taken := {"kind", "step"} & values.keys():
            raise ValueError(f"a record's values are named {sorted(taken)}, which the record itself uses; rename them")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        # allow_nan=False: json would write NaN, which is no JSON, and other readers would stop at the line.
        record = {"kind": kind, "step": int(step)} | {name: _plain(number) for name, number in numbers.items()}
        line = json.dumps(record, allow_nan=False)
        event = Event(wall_time=time.time(), step=int(step))
        for name, number in numbers.items():
            event.summary.value.extend(scalar(f"{kind}/{name}", number).value)
        with Writing(self._workdir):
            self._metrics.write(line + "\n")
            self._metrics.flush()
            self._events.write_event(event)
            self._events.flush()

    def log(self, line: str, *, shown: bool = True) -> None:
        """Prints a line, unless it is not to be `shown`, and adds it to log.txt; after `close` it only prints."""
        if shown:
            print(self._label + line, flush=True)
        if self._lines.closed:
            return
        with Writing(self._workdir):
            self._lines.write(line + "\n")
            self._lines.flush()


class NoLog:
    """Takes what a RunLog takes and drops it: with several processes the first one's log is that of all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        pass

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Drops a record."""

    def log(self, line: str, *, shown: bool = True) -> None:
        """Drops a line."""


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, without a torn last line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LogError(f"cannot read {path} ({error.strerror}); allow reading, or move it away") from error
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is not None:
            yield record
        elif number < len(lines):
            raise LogError(
                f"line {number} of {path} is damaged (expected a JSON object with kind and step); "
                "repair or delete that line, or move the file away to start a new one"
            )


def _record(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a torn line. Without its newline a line is torn even if what is left parses."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and {"kind", "step"} <= record.keys()
    return record if whole else None


def _drop_repeated(path: Path, last_step: int, redone: Collection[str]) -> None:
    """Takes torn and repeated records out of a metrics file, and leaves a file without any untouched."""
    kept = "".join(
        json.dumps(record) + "\n"
        for record in _records(path)
        if record["step"] < last_step or (record["step"] == last_step and record["kind"] not in redone)
    )
    if path.exists() and path.read_bytes() != kept.encode():
        replace_file(path, [kept])


def _open_events(folder: Path, first_step: int) -> EventsWriter:
    """A TensorBoard file that hides what earlier files in the folder hold of later steps.

    tensorboardX's SummaryWriter is not used: it writes from a thread, which dies on a full disk; ten records later
    its queue is full and the training loop waits forever. And its files are named by the second, while TensorBoard
    reads them in the order of their names: a run that is resumed within that second would overwrite the file before,
    and one that is resumed after the clock went back would be read before it. Hence the number in the name.
    """
    folder.mkdir(exist_ok=True)
    number = max((int(match[1]) for path in folder.iterdir() if (match := _EVENTS.match(path.name))), default=0) + 1
    events = EventsWriter(str(folder / f"events.{number:06}"))
    start = Event(wall_time=time.time(), step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
    events.write_event(start)
    events.flush()
    return events


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
