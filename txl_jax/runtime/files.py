"""Files of a run: written completely or not at all, behind locks, with errors of one sentence."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from txl_jax.errors import LogError, UserError
from txl_jax.runtime.paths import as_given, as_path, files_below, is_remote

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
