"""Text files that a run appends to.

On this machine that is one plain file. Objects cannot be appended to, so on object storage the text of `metrics.jsonl`
is in parts, which readers join in the order of their names:

    metrics.jsonl.parts/000001       text that was written between two calls of `seal`
    metrics.jsonl.parts/000002.all   the whole text up to here: what is before it counts no longer
    metrics.jsonl.parts/000003       replaced every half minute until it is sealed

`cat` of the parts gives the text too, as parts before an `.all` are removed once it is there.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from txl_jax.runtime.files import replace_file
from txl_jax.runtime.paths import as_path, is_remote

SECONDS_BETWEEN_UPLOADS = 30.0  # Of a part that is not sealed yet.
_PART = re.compile(r"(\d{6,})(\.all)?")


class AppendFile:
    """A text file in UTF-8 to append to; on object storage one process alone may have it open.

    Every method raises OSError when it cannot be written.

    Args:
      path: local or remote; the folder of a local file must exist.
    """

    def __init__(self, path: Path):
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
            part = _folder(self._path) / f"{self._number:06}"
            part.write_text("".join(self._unsealed), encoding="utf-8")
            self._uploaded, self._is_uploaded = time.monotonic(), True


def read_appended(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file that was appended to, or that is there as one object.

    Raises:
      FileNotFoundError: there is none.
      OSError: it cannot be read.
    """
    path = as_path(path)
    if not is_remote(path):
        return path.read_bytes()
    while True:
        parts = _parts(path)
        if not parts:
            return path.read_bytes()
        with contextlib.suppress(FileNotFoundError):  # A run that starts meanwhile has replaced the parts.
            return b"".join(part.read_bytes() for part in _counted(parts))


def replace_appended(path: Path, texts: Sequence[str]) -> None:
    """Replaces the whole text of a file, which nobody appends to meanwhile; it changes at once or not at all.

    Raises:
      LogError: a local file cannot be written.
      OSError: a remote one cannot.
    """
    if not is_remote(path):
        replace_file(path, texts)
        return
    before = _parts(path)
    number = max(map(_number, before), default=0) + 1
    (_folder(path) / f"{number:06}.all").write_text("".join(texts), encoding="utf-8")
    for part in before:
        part.unlink(missing_ok=True)


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def _parts(path: Path) -> list[Path]:
    """The parts in their order."""
    try:
        found = [part for part in _folder(path).iterdir() if _PART.fullmatch(part.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda part: (_number(part), part.name))


def _counted(parts: list[Path]) -> list[Path]:
    """The last part with the whole text and those after it; all if there is none."""
    first = max((place for place, part in enumerate(parts) if part.name.endswith(".all")), default=0)
    return parts[first:]


def _number(part: Path) -> int:
    return int(part.name.partition(".")[0])
