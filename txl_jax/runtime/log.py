"""The log of a run: `metrics.jsonl` and `log.txt` in its directory, and sinks such as TensorBoard.

A resumed run repeats the steps after its last checkpoint. Opening the log drops the records of
those steps, so that `metrics.jsonl` reads as if the run had never stopped, while `log.txt` keeps
all lines.

On this machine both are plain files. In a bucket they are uploaded in parts (`appended_text`), and
TensorBoard has a file for each checkpoint.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from txl_jax.errors import LogError, UserError, escape_control, one_line
from txl_jax.runtime import storage
from txl_jax.runtime.appended_text import (
    LocalTexts,
    RemoteTexts,
    open_texts,
    read_appended,
    replace_appended,
)
from txl_jax.runtime.output import print_if_possible
from txl_jax.runtime.sinks import Sink, TensorBoard
from txl_jax.runtime.storage import AnyPath

METRICS = "metrics.jsonl"
LINES = "log.txt"
# Steps are signed integers of 64 bits, as in TensorBoard's files.
_STEP_LIMIT = 1 << 63


def read_metrics(folder: AnyPath) -> list[dict[str, Any]]:
    """Reads the records of a run in the order written, if any. An incomplete last line is skipped.

    `folder` is the workdir, or the file metrics.jsonl in it. Numbers that JSON cannot store come as
    "nan", "inf" and "-inf", which `float()` accepts. Raises `LogError` if a line before the last is
    not a record, or the file cannot be read.
    """
    path = storage.as_path(folder)
    if os.path.basename(path) != METRICS:
        path = os.path.join(path, METRICS)
    try:
        lines = read_appended(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LogError(
            f"cannot read {path} ({error.strerror}). Allow reading, or move it away."
        ) from error

    records = []
    for number, line in enumerate(lines, start=1):
        record = _parsed_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise LogError(
                f"line {number} of {path} is corrupted (it must be a JSON object with kind and "
                "step). Repair or delete that line, or move the file away to start a new one."
            )
    return records


def _parsed_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line of metrics.jsonl, or None if the line is torn or corrupted."""
    # Without its newline a line is torn even if what is left parses.
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    step = record.get("step")
    if not isinstance(step, int) or not 0 <= step < _STEP_LIMIT:
        return None
    return record


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """Records and lines of one run.

    `open` returns it as a context manager. Before that, lines wait.

    Without a directory it does not log: with several processes only process 0 logs. TensorBoard and
    the sinks get everything too. `confirm` is called before an upload, and raises if another run
    writes here.

    Every method raises `LogError` if metrics.jsonl or log.txt cannot be written, because a run
    relies on its records. A sink that fails is skipped from then on, with a log line.
    """

    def __init__(
        self,
        folder: AnyPath | None,
        *,
        sinks: Sequence[Sink] = (),
        confirm: Callable[[], None] = lambda: None,
    ):
        self._folder = None if folder is None else storage.as_path(folder)
        self._sinks = list(sinks)
        self._failed_sinks: list[Sink] = []
        self._confirm = confirm
        # Lines that wait, or None once the log was opened.
        self._waiting: list[str] | None = []
        # metrics.jsonl and log.txt while the log is open.
        self._texts: LocalTexts | RemoteTexts | None = None
        self._closing = contextlib.ExitStack()

    def open(
        self,
        step: int = 0,
        *,
        redone: Collection[str] = (),
        header: Sequence[str] = (),
        opening: Sequence[str] = (),
    ) -> Self:
        """Opens the files, and writes all lines that wait.

        Args:
          step: The step that the run starts after. Records after it are dropped.
          redone: Kinds of records that are dropped at `step` too.
          header: Lines that are written only to log.txt.
          opening: Lines that are written before the lines that wait.
        """
        lines = [*opening, *(self._waiting or ())]
        # From now on no line waits.
        self._waiting = None
        if self._folder is None:
            return self

        with storage.writing(self._folder):
            storage.make_folder(self._folder)
            _drop_repeated(self._folder, step, redone)
            texts = open_texts(self._folder, (METRICS, LINES), confirm=self._confirm_lock)
        self._texts = texts
        tensorboard = TensorBoard(os.path.join(self._folder, "tensorboard"), first_step=step)
        self._sinks.insert(0, tensorboard)

        # The last callback is called first, and each even if one before it fails. Sinks upload
        # what they have in `_flush`, before they are closed. A sink that fails adds a line, so the
        # texts are closed after the sinks.
        self._closing.callback(self._forget_texts)
        self._closing.callback(texts.close)
        self._closing.callback(self._call_sinks, "close")
        self._closing.callback(self._flush)

        # These lines contain names and descriptions from files, which may be other people's.
        # `print` escapes too, but a newline in a name would begin another line there.
        for line in header:
            self.print(escape_control(line), show=False)
        for line in lines:
            self.print(escape_control(line))
        return self

    def close(self) -> None:
        """Closes files and sinks. A second call does nothing."""
        with storage.writing(self._folder or ""):
            self._closing.close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except LogError as second:
            # On a full disk, closing a file tries again to write the line that could not be
            # written, and fails again.
            if error is None:
                raise
            # Raised, it would hide the error that ended the block.
            self.note(str(second))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Passes settings by dotted names, and metadata, on to the sinks."""
        self._call_sinks("settings", values)

    def record(
        self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None
    ) -> None:
        """Adds a record to metrics.jsonl.

        The record is the line `{"kind": kind, "step": step, "time": now, **values}`, with `member`
        if passed.
        """
        reserved = {"kind", "step", "member"} & values.keys()
        if reserved:
            raise UserError(
                f"a record's values must not have the reserved names {sorted(reserved)}. "
                "Rename them."
            )
        # Values may be arrays of one number.
        numbers: dict[str, float] = {}
        for name, value in values.items():
            numbers[name] = value if isinstance(value, int) else float(value)

        record: dict[str, Any] = {"kind": kind, "step": int(step)}
        if member is not None:
            record["member"] = member
        record["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # A hook's own value named "time" replaces the time.
        for name, number in numbers.items():
            # json would write NaN, which is not valid JSON, and other readers would stop at the
            # line.
            record[name] = number if math.isfinite(number) else str(number)

        self._append(METRICS, json.dumps(record, allow_nan=False))
        self._call_sinks("record", kind, int(step), numbers, member)

    def text(self, step: int, tag: str, text: str) -> None:
        """Passes a text, such as a sample, on to the sinks."""
        self._call_sinks("text", step, tag, text)

    def note(self, line: str) -> None:
        """Prints a remark in one line."""
        self.print(one_line(f"note      {line}"))

    def print(self, line: str, *, show: bool = True) -> None:
        """Prints a line if `show`, and adds it to log.txt with date and time.

        After `close` it only prints.

        Control characters are escaped. A hook may pass several lines at once. What cannot be
        printed, because nobody reads standard output any longer or its encoding lacks a letter,
        does not end a run.
        """
        if self._waiting is not None:
            self._waiting.append(line)
            return
        if self._folder is None:
            return
        lines = [escape_control(part) for part in line.split("\n")]
        if show:
            print_if_possible("\n".join(lines))
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        for part in lines:
            self._append(LINES, f"{now}  {part}")

    def seal(self) -> None:
        """Returns once all is kept that was written.

        Called before a checkpoint or a result, which relies on it.
        """
        if self._texts is not None:
            self._texts.seal()
        self._flush()

    def _append(self, name: str, line: str) -> None:
        # Without a directory, and before and after the log is open, there is nothing to write to.
        if self._texts is not None:
            self._texts.append(name, line)

    def _forget_texts(self) -> None:
        self._texts = None

    def _confirm_lock(self) -> None:
        with storage.writing(self._folder or ""):
            self._confirm()

    def _flush(self) -> None:
        self._confirm_lock()
        self._call_sinks("flush")

    def _call_sinks(self, method: str, *arguments: Any) -> None:
        """Calls a method of each sink while the log is open.

        A sink that has failed is only closed.
        """
        if self._texts is None:
            return
        for sink in self._sinks:
            if sink in self._failed_sinks and method != "close":
                continue
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:  # noqa: BLE001
                # A dashboard that is down must not end a run of days.
                if sink in self._failed_sinks:
                    continue
                self._failed_sinks.append(sink)
                reason = type(error).__name__
                message = str(error).partition("\n")[0][:200]
                if message:
                    reason += f": {message}"
                self.note(
                    f"{type(sink).__name__} failed and is skipped until the next start. "
                    f"The run continues ({reason})"
                )


def _drop_repeated(folder: str, last_step: int, redone: Collection[str]) -> None:
    """Removes torn and repeated records of a run. A file without any is not touched."""
    lines = []
    for record in read_metrics(folder):
        is_later = record["step"] > last_step
        is_redone = record["step"] == last_step and record["kind"] in redone
        if not is_later and not is_redone:
            lines.append(json.dumps(record) + "\n")

    remaining = "".join(lines)
    path = os.path.join(folder, METRICS)
    with contextlib.suppress(FileNotFoundError):
        if read_appended(path) != remaining.encode():
            replace_appended(path, [remaining])
