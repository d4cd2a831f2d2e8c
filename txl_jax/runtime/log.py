"""The log of a run: `metrics.jsonl` and `log.txt` in its folder, and its sinks, TensorBoard among them.

On object storage the two texts are in parts (`append_file`), and there is a TensorBoard file for each checkpoint.

A resumed run repeats the steps after its last checkpoint. Opening the log drops the records of those steps, so that
`metrics.jsonl` reads as if the run had never stopped; `log.txt` keeps all lines. With several processes, process 0 has
a `RunLog`, and the others a `NoLog`.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Protocol, Self

from txl_jax.errors import LogError, UserError
from txl_jax.runtime.sinks import FanOut, Sink, TensorBoardSink
from txl_jax.runtime.storage import as_path, is_remote, make_folder, names, read, remove, write, write_lines, writing

# -- Text files that a run appends to.
#
# On this machine that is one plain file. Objects cannot be appended to, so on object storage the text of `metrics.jsonl`
# is in parts, which readers join in the order of their names:
#
#     metrics.jsonl.parts/000001       text that was written between two calls of `seal`
#     metrics.jsonl.parts/000002.all   the whole text up to here: what is before it counts no longer
#     metrics.jsonl.parts/000003       replaced every half minute until it is sealed
#
# `cat` of the parts gives the text too, as parts before an `.all` are removed once it is there.

SECONDS_BETWEEN_UPLOADS = 30.0  # Of a part that is not sealed yet.
_PART = re.compile(r"(\d{6,})(\.all)?")


class AppendFile:
    """A text file in UTF-8 to append to; on object storage one process alone may have it open.

    Every method raises OSError when it cannot be written.

    Args:
      path: local or remote; the folder of a local file must exist.
    """

    def __init__(self, path: str):
        self.closed = False
        self._path = path
        self._file: IO[str] | None = None
        self._unsealed: list[str] = []
        self._number, self._uploaded = 0, time.monotonic()
        self._is_uploaded = True
        if is_remote(path):
            self._number = max((_number(part) for part in _parts(path)), default=0) + 1
        else:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def write(self, text: str) -> None:
        """Adds text."""
        if self._file is not None:
            self._file.write(text)
        else:
            self._unsealed.append(text)
            self._is_uploaded = False

    def flush(self) -> None:
        """Shows readers what was written; on object storage at most every half minute."""
        if self._file is not None:
            self._file.flush()
        elif time.monotonic() - self._uploaded >= SECONDS_BETWEEN_UPLOADS:
            self._upload()

    def seal(self) -> None:
        """Shows readers what was written and keeps it; called before each checkpoint, which relies on it."""
        if self._file is not None:
            self._file.flush()
        elif self._unsealed:
            self._upload()
            self._number, self._unsealed = self._number + 1, []

    def close(self) -> None:
        """Seals and closes the file; nothing happens the second time."""
        if not self.closed:
            self.closed = True
            self.seal()
            if self._file is not None:
                self._file.close()

    def _upload(self) -> None:
        if not self._is_uploaded:
            write(f"{self._path}.parts/{self._number:06}", "".join(self._unsealed).encode())
            self._uploaded, self._is_uploaded = time.monotonic(), True


def read_appended(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file that was appended to, or that is there as one object.

    Raises:
      FileNotFoundError: there is none.
      OSError: it cannot be read.
    """
    path = as_path(path)
    if not is_remote(path):
        return read(path)
    while True:
        parts = _parts(path)
        if not parts:
            return read(path)
        with contextlib.suppress(FileNotFoundError):  # A run that starts meanwhile has replaced the parts.
            return b"".join(read(part) for part in _counted(parts))


def replace_appended(path: str, texts: Sequence[str]) -> None:
    """Replaces the whole text of a file, which nobody appends to meanwhile; it changes at once or not at all.

    Raises:
      LogError: a local file cannot be written.
      OSError: a remote one cannot.
    """
    if not is_remote(path):
        write_lines(path, texts)
        return
    before = _parts(path)
    number = max(map(_number, before), default=0) + 1
    write(f"{path}.parts/{number:06}.all", "".join(texts).encode())
    for part in before:
        remove(part)


def _parts(path: str) -> list[str]:
    """The parts in their order."""
    try:
        found = [f"{path}.parts/{name}" for name in names(f"{path}.parts") if _PART.fullmatch(name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda part: (_number(part), part))


def _counted(parts: list[str]) -> list[str]:
    """The last part with the whole text and those after it; all if there is none."""
    first = max((place for place, part in enumerate(parts) if part.endswith(".all")), default=0)
    return parts[first:]


def _number(part: str) -> int:
    return int(os.path.basename(part).partition(".")[0])


METRICS = "metrics.jsonl"


class MetricsLog(Protocol):
    """Takes the records and lines of a run; `RunLog` writes them, `NoLog` drops them."""

    def record(self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None) -> None:
        """Takes one record; `member` names the member of an ensemble that it is about."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Takes a text, such as a sample, for the sinks."""

    def print(self, line: str) -> None:
        """Takes one line for people."""

    def seal(self) -> None:
        """Keeps what was taken; called before a checkpoint or a result is written, which relies on it."""


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a run in the order written; empty if there are none. A torn last line is left out.

    Numbers that JSON cannot hold come as "nan", "inf" and "-inf": `float()` takes them as it takes numbers.

    Raises:
      LogError: a line before the last is no record, or the file cannot be read.
    """
    return list(_records(os.path.join(as_path(workdir), METRICS)))


class RunLog:
    """Records and lines of one run. Use it as a context manager.

    Args:
      workdir: the run's folder; made if missing.
      first_step: the step that the run starts after (that of the checkpoint it resumes from). Records of later
        steps are dropped.
      redone: kinds of records that this start makes again at `first_step` itself; those are dropped too.
      sinks: get everything too, beside TensorBoard's files in the folder.

    Every method raises LogError when metrics.jsonl or log.txt cannot be written: a run decides by its own records. A
    sink that fails is left out.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        first_step: int = 0,
        redone: Collection[str] = (),
        sinks: Sequence[Sink] = (),
    ):
        self._workdir = as_path(workdir)
        with writing(self._workdir):
            make_folder(self._workdir)
            _drop_repeated(os.path.join(self._workdir, METRICS), first_step, redone)
            self._metrics = AppendFile(os.path.join(self._workdir, METRICS))
            self._lines = AppendFile(os.path.join(self._workdir, "log.txt"))
        tensorboard = TensorBoardSink(os.path.join(self._workdir, "tensorboard"), first_step=first_step)
        self._sinks = FanOut([tensorboard, *sinks], self.print)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; nothing happens the second time."""
        if self._metrics.closed:
            return
        self._sinks.close()
        with writing(self._workdir):
            self._metrics.close()
            self._lines.close()

    def settings(self, values: Mapping[str, Any]) -> None:
        """Passes settings by dotted names, and facts, on to the sinks."""
        self._sinks.settings(values)

    def record(self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None) -> None:
        """Adds one record: a line `{"kind": kind, "step": step, **values}`, with `member` if it is given.

        Raises:
          UserError: a value named "kind", "step" or "member".
        """
        if taken := {"kind", "step", "member"} & values.keys():
            raise UserError(f"a record's values are named {sorted(taken)}, which the record itself uses; rename them")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        # allow_nan=False: json would write NaN, which is no JSON, and other readers would stop at the line.
        record: dict[str, Any] = {"kind": kind, "step": int(step)} | ({} if member is None else {"member": member})
        record |= {name: _plain(number) for name, number in numbers.items()}
        line = json.dumps(record, allow_nan=False)
        with writing(self._workdir):
            self._metrics.write(line + "\n")
            self._metrics.flush()
        self._sinks.record(kind, int(step), numbers, member)

    def text(self, step: int, tag: str, text: str) -> None:
        """Passes a text on to the sinks."""
        self._sinks.text(step, tag, text)

    def print(self, line: str) -> None:
        """Prints a line and adds it to log.txt; after `close` it only prints."""
        print(line, flush=True)
        if self._lines.closed:
            return
        with writing(self._workdir):
            self._lines.write(line + "\n")
            self._lines.flush()

    def seal(self) -> None:
        """Keeps what was written; on this machine it is kept already."""
        with writing(self._workdir):
            self._metrics.seal()
            self._lines.seal()
        self._sinks.flush()


class NoLog:
    """A log that drops everything: with several processes the log of process 0 is that of all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def record(self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None) -> None:
        """Drops a record."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Drops settings."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Drops a text."""

    def print(self, line: str) -> None:
        """Drops a line."""

    def seal(self) -> None:
        """Keeps nothing."""


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Records of a file, without a torn last line."""
    try:
        lines = read_appended(path).splitlines(keepends=True)
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


def _drop_repeated(path: str, last_step: int, redone: Collection[str]) -> None:
    """Removes torn and repeated records from a metrics file; a file without any is not touched."""
    kept = "".join(
        json.dumps(record) + "\n"
        for record in _records(path)
        if record["step"] < last_step or (record["step"] == last_step and record["kind"] not in redone)
    )
    with contextlib.suppress(FileNotFoundError):
        if read_appended(path) != kept.encode():
            replace_appended(path, [kept])


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


# -- A log that opens late: which records it drops depends on the checkpoint that a run resumes from.


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
