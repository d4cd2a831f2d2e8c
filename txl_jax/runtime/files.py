"""Files of a run: written whole or not at all, behind locks, with errors of one sentence."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from txl_jax.errors import LogError


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Replaces the file at `path` by `value` as JSON, or leaves it as it was.

    Raises:
      TypeError, ValueError: a value that JSON cannot hold (nan and infinities among them).
      LogError: the file cannot be written.
    """
    replace_file(Path(path), [json.dumps(value, indent=2, allow_nan=False) + "\n"])


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at `path` by `text`, or leaves it as it was; raises `LogError` if it cannot be written."""
    replace_file(Path(path), [text])


def write_lines(path: str | os.PathLike, lines: Iterable[str]) -> None:
    """The same for lines, each with its newline, that are too many to be held at once."""
    replace_file(Path(path), lines)


class Writing:
    """Turns the OSError of a block into one sentence."""

    def __init__(self, place: Path):
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):
            raise LogError(
                f"cannot write to {error.filename or self._place} ({error.strerror or error}); "
                "free space or allow writing there, or give another folder"
            ) from error


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Writes a whole file under a temporary name in the same folder, and only then gives it its own name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with Writing(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:  # Making the parts may fail, or be interrupted.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes out; waits for one that is in. The lock goes with its process, however that ends."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that is reading the same text", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writable(folder: Path, *, what: str) -> Iterator[None]:
    """Makes the folder; an error of writing to it becomes one sentence.

    Raises:
      OSError: `what` cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if not _of_writing(error, folder):
            raise
        raise OSError(
            f"cannot write {what} to {folder} ({error.strerror or error}); give --cache_dir=... a folder that you may "
            "write to, on a disk with space"
        ) from error


def _of_writing(error: OSError, folder: Path) -> bool:
    """Whether an error came from `folder`: from a file in or above it, or, with no file named, from a full disk."""
    if error.errno is None:
        return False  # Raised by us, or by a library that says more.
    if error.filename is None:
        return True
    path = Path(str(error.filename))
    return path.is_relative_to(folder) or folder.is_relative_to(path)
