"""The log of a run: `metrics.jsonl` and `log.txt` in its directory, and sinks such as TensorBoard.

A resumed run repeats the steps after its last checkpoint. Opening the log drops the records of
those steps, so that `metrics.jsonl` reads as if the run had never stopped, while `log.txt` keeps
all lines.

On this machine both are plain files. Objects cannot be appended to: in a bucket a thread uploads
each text in parts, which readers join in the order of their names, and TensorBoard has a file for
each checkpoint.

    metrics.jsonl.parts/000001       text between two calls of `seal`
    metrics.jsonl.parts/000002.all   the whole text up to here: parts before it no longer count, and
                                     are removed
    metrics.jsonl.parts/000003       replaced every half minute until it is sealed
"""

import concurrent.futures
import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from txl_jax.errors import LogError, UserError, escape_control, one_line
from txl_jax.runtime import storage
from txl_jax.runtime.output import print_if_possible
from txl_jax.runtime.sinks import Sink, TensorBoard
from txl_jax.runtime.storage import AnyPath, is_remote

METRICS, LINES = "metrics.jsonl", "log.txt"
SECONDS_BETWEEN_UPLOADS = 30.0  # Of a part that is not sealed yet.
_PART = re.compile(r"(\d{6,})(\.all)?")


def read_metrics(folder: AnyPath) -> list[dict[str, Any]]:
    """Reads the records of a run in the order written, if any. An incomplete last line is skipped.

    `folder` is the workdir, or the file metrics.jsonl in it. Numbers that JSON cannot store come as
    "nan", "inf" and "-inf", which `float()` accepts. Raises `LogError` if a line before the last is
    not a record, or the file cannot be read.
    """
    path = storage.as_path(folder)
    path = path if os.path.basename(path) == METRICS else os.path.join(path, METRICS)
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
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        # Without its newline a line is torn even if what is left parses.
        step = record.get("step") if isinstance(record, dict) and "kind" in record else None
        if line.endswith(b"\n") and isinstance(step, int) and 0 <= step < 1 << 63:
            records.append(record)
        elif number < len(lines):
            wrong = (
                f"line {number} of {path} is corrupted (it must be a JSON object with "
                "kind and step)"
            )
            raise LogError(
                f"{wrong}. Repair or delete that line, or move the file away to start a new one."
            )
    return records


def read_appended(path: AnyPath) -> bytes:
    """Returns the bytes of a text that a run appends to.

    Raises OSError if it is missing or cannot be read.
    """
    path = storage.as_path(path)
    while parts := _parts(path):
        first = max(
            (place for place, (_, part) in enumerate(parts) if part.endswith(".all")), default=0
        )
        # A run that starts meanwhile has replaced the parts.
        with contextlib.suppress(FileNotFoundError):
            return b"".join(storage.read(part) for _, part in parts[first:])
    return storage.read(path)


def replace_appended(path: AnyPath, texts: Sequence[str]) -> None:
    """Replaces a text atomically, while nobody appends to it. Raises `LogError` if it cannot."""
    path = os.fspath(path)
    before = _parts(path)
    storage.write_lines(f"{_part(path, _next(before))}.all" if is_remote(path) else path, texts)
    for _, part in before:
        storage.remove(part)


def _parts(path: str) -> list[tuple[int, str]]:
    """Returns (number, URL) of the parts of a remote text, in their order."""
    if not is_remote(path):
        return []
    found = map(_PART.fullmatch, storage.names(f"{path}.parts", missing_ok=True))
    return sorted((int(match[1]), f"{path}.parts/{match[0]}") for match in found if match)


def _part(path: str, number: int) -> str:
    return f"{path}.parts/{number:06}"


def _next(parts: Sequence[tuple[int, str]]) -> int:
    return parts[-1][0] + 1 if parts else 1


class _Text:
    """A text that is open: a plain file, or the lines of the part that is not sealed yet."""

    def __init__(self, path: str):
        self.path = path
        # `RunLog` closes it.
        self.file = None if is_remote(path) else open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.number = _next(_parts(path))
        self.lines: list[str] = []


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
        self._failed: list[Sink] = []
        self._confirm = confirm
        # None once the log was opened.
        self._waiting: list[str] | None = []
        # Empty unless it is open.
        self._texts: dict[str, _Text] = {}
        # Starts with the first upload.
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "log_upload")
        self._upload: concurrent.futures.Future[None] | None = None
        self._upload_began = time.monotonic()
        self._closing = contextlib.ExitStack()

    def open(
        self,
        step: int = 0,
        *,
        redone: Collection[str] = (),
        header: Sequence[str] = (),
        opening: Sequence[str] = (),
    ) -> Self:
        """Opens the files, and writes the lines `header` and `opening`, and all earlier lines.

        The lines `header` are written only to log.txt.

        Records after `step`, which the run starts after, are dropped, and at `step` those of the
        kinds `redone`.
        """
        waiting = [*opening, *(self._waiting or ())]
        # From now on no line waits.
        self._waiting = None
        if self._folder is None:
            return self
        with storage.writing(self._folder):
            storage.make_folder(self._folder)
            _drop_repeated(self._folder, step, redone)
            self._texts = {
                name: _Text(os.path.join(self._folder, name)) for name in (METRICS, LINES)
            }
        for text in self._texts.values():
            if text.file is not None:
                self._closing.enter_context(text.file)
        self._sinks.insert(
            0, TensorBoard(os.path.join(self._folder, "tensorboard"), first_step=step)
        )
        # The last one is called first, and each even if one before it fails. A sink that fails adds
        # a line.
        for act in (self._texts.clear, self._threads.shutdown, self._upload_all):
            self._closing.callback(act)
        self._closing.callback(self._each, "close")
        self._closing.callback(self._flush)
        # They contain names and descriptions from files, which may be other people's.
        for line in header:
            self.print(escape_control(line), show=False)
        for line in waiting:
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
            self.note(str(second))  # Raised, it would hide the error that ended the block.

    def settings(self, values: Mapping[str, Any]) -> None:
        """Passes settings by dotted names, and metadata, on to the sinks."""
        self._each("settings", values)

    def record(
        self, kind: str, step: int, values: Mapping[str, float], *, member: str | None = None
    ) -> None:
        """Adds a record to metrics.jsonl.

        The record is the line `{"kind": kind, "step": step, "time": now, **values}`, with `member`
        if passed.
        """
        if taken := {"kind", "step", "member"} & values.keys():
            raise UserError(
                f"a record's values must not have the reserved names {sorted(taken)}. Rename them."
            )
        numbers = {
            name: value if isinstance(value, int) else float(value)
            for name, value in values.items()
        }
        record: dict[str, Any] = {"kind": kind, "step": int(step)} | (
            {} if member is None else {"member": member}
        )
        # A hook's own value of that name wins.
        record["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # json would write NaN, which is not valid JSON, and other readers would stop at the line.
        record |= {
            name: value if math.isfinite(value) else str(value) for name, value in numbers.items()
        }
        self._append(METRICS, json.dumps(record, allow_nan=False))
        self._each("record", kind, int(step), numbers, member)

    def text(self, step: int, tag: str, text: str) -> None:
        """Passes a text, such as a sample, on to the sinks."""
        self._each("text", step, tag, text)

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
        elif self._folder is not None:
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
        # Local files have every line already. Lines of remote texts are uploaded here, as a part
        # that is not written again. The next line begins a new part.
        self._upload_all()
        for text in self._texts.values():
            if text.lines:
                text.number += 1
                text.lines = []
        self._flush()

    def _append(self, name: str, line: str) -> None:
        # Without a directory, and before and after the log is open, there is nothing to write to.
        if not self._texts:
            return
        text = self._texts[name]
        if text.file is not None:
            with storage.writing(text.path):
                text.file.write(f"{line}\n")
                text.file.flush()
            return
        text.lines.append(f"{line}\n")
        if self._upload is None or self._upload.done():
            self._wait()
            if time.monotonic() - self._upload_began >= SECONDS_BETWEEN_UPLOADS:
                self._begin_upload()

    def _upload_all(self) -> None:
        self._wait()
        self._begin_upload()
        self._wait()

    def _begin_upload(self) -> None:
        parts = {
            _part(text.path, text.number): "".join(text.lines)
            for text in self._texts.values()
            if text.lines
        }

        def upload() -> None:
            self._make_sure()
            for part, content in parts.items():
                storage.write(part, content.encode())

        self._upload_began = time.monotonic()
        if parts:
            self._upload = self._threads.submit(upload)

    def _wait(self) -> None:
        """Waits for the upload in progress, if any, and raises its error."""
        upload = self._upload
        self._upload = None
        if upload is not None:
            upload.result()

    def _make_sure(self) -> None:
        with storage.writing(self._folder or ""):
            self._confirm()

    def _flush(self) -> None:
        self._make_sure()
        self._each("flush")

    def _each(self, method: str, *arguments: Any) -> None:
        """Calls a method of each sink. A sink that has failed is only closed."""
        for sink in self._sinks if self._texts else ():
            if sink in self._failed and method != "close":
                continue
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:  # noqa: BLE001
                # A dashboard that is down must not end a run of days.
                if sink in self._failed:
                    continue
                self._failed.append(sink)
                reason = ": ".join(
                    filter(None, (type(error).__name__, str(error).partition("\n")[0][:200]))
                )
                self.note(
                    f"{type(sink).__name__} failed and is skipped until the next start. "
                    f"The run continues ({reason})"
                )


def _drop_repeated(folder: str, last_step: int, redone: Collection[str]) -> None:
    """Removes torn and repeated records of a run. A file without any is not touched."""
    kept = "".join(
        json.dumps(record) + "\n"
        for record in read_metrics(folder)
        if record["step"] < last_step
        or (record["step"] == last_step and record["kind"] not in redone)
    )
    path = os.path.join(folder, METRICS)
    with contextlib.suppress(FileNotFoundError):
        if read_appended(path) != kept.encode():
            replace_appended(path, [kept])
