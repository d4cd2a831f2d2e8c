"""Paths that a user gives: of a file or folder on this machine, or a URL of object storage such as gs://bucket/run.

Object storage has neither folders nor renames: an object appears whole when its upload ends, and replaces one of the
same name. What depends on that asks `is_remote`. The library of a scheme (gcsfs for gs://) is imported with the first
path of that scheme.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import random
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import fsspec
from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

from txl_jax.errors import LogError, UserError

# The schemes that Orbax writes to as well: the module that opens each, and the extra that installs it.
_SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_COLLAPSED = re.compile(rf"({'|'.join(_SCHEMES)}):/+[^/]")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/run.

    >>> is_remote("gs://bucket/run"), is_remote("runs/one")
    (True, False)
    """
    return "://" in os.fspath(path)


def as_path(text: str | os.PathLike[str]) -> Path:
    """Returns an absolute path for what a user gave.

    Returns:
      A `pathlib.Path` with "~" expanded and links resolved; for a URL an `etils.epath.Path`, which has the methods of
      `pathlib.Path` (but not `stat().st_size`; see `size`) and whose errors are all OSError.

    Raises:
      UserError: nothing here can open such a URL.
    """
    name = os.fspath(text)
    if not is_remote(name):
        if _COLLAPSED.match(name):
            raise UserError(f"the path {name} is a URL without its second slash; write it as gs://bucket/folder")
        return Path(name).expanduser().resolve()
    scheme, _, rest = name.partition("://")
    if scheme == "file":
        return as_path(f"/{rest.lstrip('/')}")
    if scheme not in _SCHEMES:
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise UserError(f"the path {name} has the scheme {scheme}://; give a folder of this machine, or one of {known}")
    if not rest.strip("/"):
        raise UserError(f"the path {name} names no bucket; write it as {scheme}://bucket/folder")
    module, extra = _SCHEMES[scheme]
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the path {name} needs the package {module}; install it with: pip install 'txl_jax[{extra}]'")

    return cast(Path, RemotePath(name.rstrip("/")))


class _FirstTime(logging.Filter):
    """Passes the first line of each message once, without its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage().partition("\n")[0]
        is_new = line not in self._seen
        self._seen.add(line)
        record.msg, record.args, record.exc_info = line, None, None
        return is_new


_FIRST_TIME = _FirstTime()


def shorten_storage_logs() -> None:
    """Shows what gcsfs, s3fs and Google's login log once, in a line: they log every try, gcsfs with its traceback.

    The error itself is an OSError. A program calls this once at its start; called again it changes nothing.
    """
    for name in (*(module for module, _ in _SCHEMES.values()), "google.auth._default"):
        logging.getLogger(name).addFilter(_FIRST_TIME)


def as_given(text: str | os.PathLike[str]) -> Path:
    """Returns what `as_path` does for a URL; a local path as it was given, relative, and itself if it is a link."""
    return as_path(text) if is_remote(text) else Path(text)


def size(path: Path) -> int:
    """Returns the bytes of a file; raises OSError if there is none."""
    found = path.stat()
    return int(found.length if is_remote(path) else found.st_size)  # type: ignore[attr-defined]


def modified(path: Path) -> float:
    """Returns when a file was written, in seconds since 1970; raises OSError if there is none."""
    found = path.stat()
    return float(found.mtime if is_remote(path) else found.st_mtime)  # type: ignore[attr-defined]


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and in the folders below it, in the order of their names; none if it is missing."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def local_copy(path: Path, owner: object) -> Path:
    """Returns a copy of a remote file, made on this machine and removed with `owner`; a local path as it is.

    Raises:
      OSError: it cannot be read.
    """
    if not is_remote(path):
        return path
    folder = Path(tempfile.mkdtemp(prefix="txl_jax-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    path.download(folder / path.name)  # type: ignore[attr-defined]
    return folder / path.name


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it; one that is missing is no error."""
    if is_remote(folder):
        folder.rmtree(missing_ok=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder, ignore_errors=True)


def remote_error(what: str, path: Path, error: OSError) -> UserError:
    """Returns the sentence for an error of object storage.

    Args:
      what: what cannot be done, such as "read".
    """
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason, advice = "no such bucket or object", "make the bucket, or give the name of one that is there"
    elif isinstance(error, PermissionError):
        advice = (
            "log in with `gcloud auth application-default login`, or give the account of this machine the role Storage "
            "Object User on the bucket"
        )
    else:
        advice = "start again once it can be reached"
    return UserError(f"cannot {what} {path} ({reason}); {advice}")


# -- `RemotePath`: a path of object storage, read and written through fsspec.
#
# `etils.epath` has such paths too, and joins and names work as there. What it does not do is done here: listings are not
# kept (TensorStore and other processes write past such a copy), a call that fails for a passing reason is tried again for
# two minutes, and every error is an OSError with one line of text, as those of the system are. With TensorFlow installed
# epath would use its file systems instead, with errors of their own.

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


# -- Files of a run: written completely or not at all, behind locks, with errors of one sentence.

_SECONDS_TO_LOCK = 1.0  # A process that only tests a lock holds it for a moment.


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replaces the file at `path` by `value` as JSON, or leaves it as it was.

    Raises:
      TypeError, ValueError: a value that JSON cannot hold (nan and infinities among them).
      LogError: the file cannot be written.
    """
    replace_file(as_given(path), [json.dumps(value, indent=2, allow_nan=False) + "\n"])


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces the file at `path` by `text`, or leaves it as it was; raises `LogError` if it cannot be written."""
    replace_file(as_given(path), [text])


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at `path` by bytes, or leaves it as it was; raises `LogError` if it cannot be written."""
    with _replacement(as_given(path), "wb") as file:
        file.write(data)


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Replaces the file at `path` by lines, each with its newline; they may be too many for the memory."""
    replace_file(as_given(path), lines)


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Replaces a file by parts of text, in UTF-8, or leaves it as it was; raises `LogError` if it cannot be written."""
    with _replacement(path, "w", encoding="utf-8") as file:
        file.writelines(parts)


@contextlib.contextmanager
def _replacement(path: Path, mode: str, encoding: str | None = None) -> Iterator[IO[Any]]:
    """Yields a file under a temporary name in the same folder; when the block ends, syncs it to disk and renames it.

    An object appears whole when its upload ends: it is written on this machine, then uploaded.
    """
    if is_remote(path):
        with writing(path), tempfile.NamedTemporaryFile(mode, encoding=encoding) as file:
            yield file
            file.flush()
            path.upload(file.name)  # type: ignore[attr-defined]
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(temporary, mode, encoding=encoding) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:  # Making the parts may fail, or be interrupted.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a `LogError` that names the file."""
    try:
        yield
    except OSError as error:
        raise LogError(
            f"cannot write to {error.filename or path} ({error.strerror or error}); "
            "free space or allow writing there, or give another folder"
        ) from error


def check_new_folder(folder: Path) -> None:
    """Raises `UserError` unless `folder` is missing or empty, so that it may be written."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or (not is_remote(folder) and folder.is_symlink()):
        what = "is there already and is not empty" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {what}; nothing is written over, so give the path of a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the name of `folder` when the block ends: it is there whole or not at all.

    After an error nothing of it is left. A process that is killed leaves a hidden folder beside it, `.NAME.PID.tmp`.
    On object storage the files are made on this machine and uploaded one by one when the block ends, in the order in
    which they were made: the last one is there once all are.

    Raises:
      UserError: `folder` is there already and is not empty.
      LogError: it cannot be written.
    """
    check_new_folder(folder)
    if is_remote(folder):
        with tempfile.TemporaryDirectory() as local, writing(folder):
            yield Path(local)
            for path in sorted(files_below(Path(local)), key=lambda path: path.stat().st_mtime_ns):
                (folder / path.relative_to(local)).upload(path)  # type: ignore[attr-defined]
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # Of a killed process that had this number.
        temporary.mkdir()
        try:
            yield temporary
            _sync_folder(temporary)
            os.replace(temporary, folder)  # Also over an empty folder.
            _sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Returns the sha256 of a file's bytes in hexadecimal; raises OSError if it cannot be read."""
    if is_remote(path):
        found = hashlib.sha256()
        for block in as_path(path).blocks():  # type: ignore[attr-defined]
            found.update(block)
        return found.hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path, *, log: Callable[[str], None] = print) -> Iterator[None]:
    """Holds an exclusive lock; waits for a process that has it. The lock ends with its process, however that ends."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process, which holds the lock {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writable(folder: Path, *, what: str) -> Iterator[None]:
    """Makes the folder; an error of writing to it becomes one sentence.

    Raises:
      UserError: `what` cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if not _is_from_writing(error, folder):
            raise
        raise UserError(
            f"cannot write {what} to {folder} ({error.strerror or error}); give --cache_dir=... a folder that you may "
            "write to, on a disk with space"
        ) from error


def _is_from_writing(error: OSError, folder: Path) -> bool:
    """Returns whether an error is of `folder`: of a file in or above it, or, with no file named, of a full disk."""
    if error.errno is None:
        return False  # Raised by a library, with a sentence of its own.
    if error.filename is None:
        return True
    path = Path(str(error.filename))
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def lock_now(handle: IO[str]) -> None:
    """Locks an open file until it is closed.

    Raises:
      BlockingIOError: another process holds the lock; one that only tests it holds it for a moment.
      OSError: the file system has no locks.
    """
    until = time.monotonic() + _SECONDS_TO_LOCK
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)
