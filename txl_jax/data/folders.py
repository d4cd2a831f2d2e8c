"""Folders that several processes fill: one writes while others wait, and a failure names the flag that mends it."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


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
