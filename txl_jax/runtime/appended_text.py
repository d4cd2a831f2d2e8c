"""Texts that a run appends to: plain files, or parts in a bucket that readers join.

Objects cannot be appended to. In a bucket a thread uploads each text in parts, which readers join
in the order of their names:

    metrics.jsonl.parts/000001       text between two calls of `seal`
    metrics.jsonl.parts/000002.all   the whole text up to here: parts before it no longer count, and
                                     are removed
    metrics.jsonl.parts/000003       replaced every half minute until it is sealed
"""

import concurrent.futures
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from txl_jax.runtime import storage
from txl_jax.runtime.storage import AnyPath, is_remote

# Time between two uploads of a part that is not sealed yet.
SECONDS_BETWEEN_UPLOADS = 30.0
_PART = re.compile(r"(\d{6,})(\.all)?")


class _TextPart(NamedTuple):
    """A part of a text in a bucket."""

    number: int
    url: str
    is_whole: bool  # Whether it has the whole text up to here.


def read_appended(path: AnyPath) -> bytes:
    """Returns the bytes of a text that a run appends to.

    Raises OSError if it is missing or cannot be read.
    """
    path = storage.as_path(path)
    while parts := _parts(path):
        # Only the parts from the last whole text on count.
        urls: list[str] = []
        for part in parts:
            if part.is_whole:
                urls = []
            urls.append(part.url)
        # A run that starts meanwhile has replaced the parts.
        with contextlib.suppress(FileNotFoundError):
            return b"".join(storage.read(url) for url in urls)
    return storage.read(path)


def replace_appended(path: AnyPath, texts: Sequence[str]) -> None:
    """Replaces a text atomically, while nobody appends to it. Raises `LogError` if it cannot."""
    target = os.fspath(path)
    before = _parts(target)
    if is_remote(target):
        target = f"{_part_url(target, _next_number(before))}.all"
    storage.write_lines(target, texts)
    for part in before:
        storage.remove(part.url)


def _parts(path: str) -> list[_TextPart]:
    """Returns the parts of a text in their order. The list is empty for a local text."""
    if not is_remote(path):
        return []
    parts = []
    for name in storage.names(f"{path}.parts", missing_ok=True):
        match = _PART.fullmatch(name)
        if match is not None:
            url = f"{path}.parts/{name}"
            parts.append(_TextPart(int(match[1]), url, is_whole=match[2] is not None))
    return sorted(parts)


def _part_url(path: str, number: int) -> str:
    return f"{path}.parts/{number:06}"


def _next_number(parts: Sequence[_TextPart]) -> int:
    return parts[-1].number + 1 if parts else 1


def open_texts(
    folder: str, names: Sequence[str], *, confirm: Callable[[], None]
) -> "LocalTexts | RemoteTexts":
    """Opens the texts of a directory to append to them.

    `confirm` is called before an upload, and raises if another run writes here.
    """
    return RemoteTexts(folder, names, confirm) if is_remote(folder) else LocalTexts(folder, names)


class LocalTexts:
    """Open files, in which each line is with the system before the next."""

    def __init__(self, folder: str, names: Sequence[str]):
        self._closing = contextlib.ExitStack()
        self._files = {}
        for name in names:
            file = open(os.path.join(folder, name), "a", encoding="utf-8")  # noqa: SIM115
            self._files[name] = self._closing.enter_context(file)

    def append(self, name: str, line: str) -> None:
        """Adds a line to a text. Raises `LogError` if it cannot be written."""
        file = self._files[name]
        with storage.writing(file.name):
            file.write(f"{line}\n")
            file.flush()

    def seal(self) -> None:
        """Returns once all is kept that was appended, which is so already."""

    def close(self) -> None:
        """Closes the files."""
        self._closing.close()


class _UnsealedPart:
    """The part of a text in a bucket that is not sealed yet."""

    def __init__(self, path: str):
        self._path = path
        self._number = _next_number(_parts(path))
        self.lines: list[str] = []

    @property
    def url(self) -> str:
        """The object that has the lines once they are uploaded."""
        return _part_url(self._path, self._number)

    def seal(self) -> None:
        """Lets the next line begin a new part."""
        if self.lines:
            self._number += 1
            self.lines = []


class RemoteTexts:
    """Texts in a bucket, whose parts are uploaded by a thread while the run continues."""

    def __init__(self, folder: str, names: Sequence[str], confirm: Callable[[], None]):
        self._parts = {name: _UnsealedPart(os.path.join(folder, name)) for name in names}
        self._confirm = confirm
        # The thread starts with the first upload.
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "log_upload")
        # The upload in progress, or one that has ended and whose error was not raised yet.
        self._upload: concurrent.futures.Future[None] | None = None
        self._upload_began = time.monotonic()

    def append(self, name: str, line: str) -> None:
        """Adds a line to a text, and begins an upload if the last one is long ago.

        Raises `LogError` if the last upload failed.
        """
        self._parts[name].lines.append(f"{line}\n")
        if self._upload is not None and not self._upload.done():
            return
        self.wait()
        if time.monotonic() - self._upload_began >= SECONDS_BETWEEN_UPLOADS:
            self._begin_upload()

    def seal(self) -> None:
        """Returns once all is uploaded that was appended.

        The uploaded parts are not written again. The next line begins a new part.
        """
        self._upload_all()
        for part in self._parts.values():
            part.seal()

    def wait(self) -> None:
        """Waits for the upload in progress, if any, and raises its error."""
        upload = self._upload
        self._upload = None
        if upload is not None:
            upload.result()

    def close(self) -> None:
        """Uploads the remaining lines, and ends the thread."""
        try:
            self._upload_all()
        finally:
            self._threads.shutdown()

    def _upload_all(self) -> None:
        self.wait()
        self._begin_upload()
        self.wait()

    def _begin_upload(self) -> None:
        # The lines of now: the run adds more while they are uploaded.
        contents = {}
        for part in self._parts.values():
            if part.lines:
                contents[part.url] = "".join(part.lines)

        self._upload_began = time.monotonic()
        if contents:
            self._upload = self._threads.submit(self._upload_parts, contents)

    def _upload_parts(self, contents: dict[str, str]) -> None:
        self._confirm()
        for url, content in contents.items():
            storage.write(url, content.encode())
