"""`RemotePath`: a path of object storage, read and written through fsspec.

`etils.epath` has such paths too, and joins and names work as there. What it does not do is done here: listings are not
kept (TensorStore and other processes write past such a copy), a call that fails for a passing reason is tried again for
two minutes, and every error is an OSError with one line of text, as those of the system are. With TensorFlow installed
epath would use its file systems instead, with errors of their own.
"""

import errno
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

import fsspec
from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

T = TypeVar("T")

PATIENCE_SECONDS = 120.0  # Of tries of one call; gcsfs tries six times within each, for about 20 s in all.
_BLOCK_BYTES = 16 << 20
_ANSWER_SECONDS = 120
_LONGEST_PAUSE_SECONDS = 15.0
_PASSING_CODES = {408, 429, 500, 502, 503, 504}
_PASSING_ERRORS = re.compile("Connect|Timeout|Disconnect|ProxyError|ClientOSError|ServerError|IncompleteRead|Payload")
_DENIED = re.compile(r"Forbidden|\b40[13]\b|Access ?Denied|Unauthorized|Invalid Credentials|Anonymous caller", re.I)
_KEPT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class RemotePath(PosixGPath):
    """A path such as gs://bucket/run/config.json. Its methods are those of `pathlib.Path`; folders need not be made.

    Every method that reads or writes raises OSError, and `FileNotFoundError` and `PermissionError` where they fit.
    """

    def exists(self) -> bool:
        """Returns whether there is an object of this name, or one below it."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Returns whether there are objects below this name."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Returns whether there is an object of this name."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        """Returns "file" or "directory"; None: there is nothing. fsspec's `exists` is False after other errors too."""
        try:
            return str(_call(self, "info")["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yields what is in this folder.

        Raises:
          FileNotFoundError: nothing is.
        """
        own = _call(self, "_strip_protocol")
        for name in sorted(_call(self, "ls", detail=False)):
            if name.rstrip("/") != own:
                yield self / name.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yields what fits a pattern without "**"."""
        scheme = os.fspath(self).partition("://")[0]
        for name in sorted(_call(self / pattern, "glob")):
            yield type(self)(f"{scheme}://{name}")

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yields all files below this folder whose names fit a pattern; "*" for all."""
        scheme = os.fspath(self).partition("://")[0]
        for name in sorted(_call(self, "find")):
            if (path := type(self)(f"{scheme}://{name}")).match(pattern):
                yield path

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder is there as soon as something is in it."""

    def read_bytes(self) -> bytes:
        """Returns the object's bytes."""
        data: bytes = _call(self, "cat_file")
        return data

    def read_text(self, encoding: str | None = None) -> str:
        """Returns the object's text in UTF-8."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: bytes) -> int:
        """Replaces the object; it changes whole or not at all."""
        _call(self, "pipe_file", data)
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        """Replaces the object by text in UTF-8."""
        self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))
        return len(data)

    def blocks(self) -> Iterator[bytes]:
        """Yields the object's bytes in blocks of 16 MB."""
        length = _call(self, "info")["size"]
        for start in range(0, length, _BLOCK_BYTES):
            yield _call(self, "cat_file", start=start, end=min(start + _BLOCK_BYTES, length))

    def upload(self, local: str | os.PathLike[str]) -> None:
        """Replaces the object by a file of this machine."""
        url = os.fspath(self)
        patiently(lambda: file_system(url.partition("://")[0]).put_file(os.fspath(local), url), url)

    def download(self, local: str | os.PathLike[str]) -> None:
        """Writes the object to a file of this machine."""
        _call(self, "get_file", os.fspath(local))

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Makes an empty object, unless there is one."""
        if not self.exists():
            self.write_bytes(b"")
        elif not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(self))

    def open(self, mode: str = "r", encoding: str | None = None, errors: str | None = None, **kwargs: Any) -> IO[Any]:
        """Opens the object for reading in blocks; `write_bytes` and `upload` write, whole or not at all."""
        if mode not in ("r", "rb"):
            raise ValueError(f"the mode is {mode!r}, and objects are opened to be read; write_bytes replaces one")
        text = {"encoding": encoding or "utf-8", "errors": errors} if mode == "r" else {}
        file: IO[Any] = _call(self, "open", mode, **text, **kwargs)
        return file

    def stat(self) -> StatResult:
        """Returns what epath does: `length` in bytes, `mtime` in seconds, `is_directory`."""
        info = _call(self, "info")
        written = info.get("mtime") or info.get("LastModified")
        return StatResult(
            is_directory=info["type"] == "directory",
            length=info["size"],
            mtime=int(written.timestamp()) if hasattr(written, "timestamp") else int(written or 0),
            owner=None,
            group=None,
            mode=None,
        )

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object."""
        try:
            _call(self, "rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes all objects below this name."""
        try:
            _call(self, "rm", recursive=True)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: Any) -> Any:
        """Raises OSError: object storage has no rename, and a copy of many objects may end halfway."""
        raise OSError(errno.EOPNOTSUPP, "object storage has no rename", os.fspath(self))

    replace = rename


def _call(path: RemotePath, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the file system of a path with its URL."""
    url = os.fspath(path)
    return patiently(lambda: getattr(file_system(url.partition("://")[0]), method)(url, *args, **kwargs), url)


@functools.cache
def file_system(scheme: str) -> Any:
    """Returns fsspec's file system of "gs" or "s3"."""
    # A request without an answer is given up, and tried again.
    limits = {"requests_timeout": _ANSWER_SECONDS} if scheme == "gs" else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, **limits)


def patiently(act: Callable[[], T], url: str) -> T:
    """Runs `act`, again after an error that may pass, for `PATIENCE_SECONDS`; its errors become OSError."""
    until, pause = time.monotonic() + PATIENCE_SECONDS, 0.5
    while True:
        try:
            return act()
        except Exception as error:
            if not is_passing(error) or time.monotonic() + pause > until:
                raise _as_os_error(error, url) from error
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def is_passing(error: BaseException) -> bool:
    """Returns whether an error of a remote call may be gone at the next try: 408, 429, 5xx, or no connection."""
    code = getattr(error, "code", getattr(error, "status", None))
    if code is not None and str(code).isdigit():
        return int(code) in _PASSING_CODES
    return bool(_PASSING_ERRORS.search(type(error).__name__)) and not isinstance(error, _KEPT)


def _as_os_error(error: Exception, url: str) -> OSError:
    """The error in one line, of the type that the system's would have."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 200 else f"{text[:200]} ..."
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url)
    if isinstance(error, _KEPT):
        return type(error)(error.errno or errno.EIO, error.strerror or text, url)
    if _DENIED.search(text):
        return PermissionError(errno.EACCES, f"permission denied: {text}", url)
    return OSError(errno.EIO, text, url)
