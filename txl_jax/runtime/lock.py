"""Locks that keep a second run out of a workdir.

On this machine, and on file systems that share their locks, it is an operating system lock on
`.lock`, which ends with its process. On gs:// it is an object (`gcs_lock`).
"""

import contextlib
import os

from txl_jax.errors import UserError
from txl_jax.runtime.gcs_lock import GcsLock
from txl_jax.runtime.storage import AnyPath, is_remote, lock_now

NAME = ".lock"
# A process that only tests a lock holds it for a moment.
_SECONDS_TO_LOCK = 1.0


class RunLock(contextlib.ExitStack):
    """The lock of a workdir, not taken yet.

    Use it as a context manager, or call `close`, which releases the lock.
    """

    def __init__(self, folder: AnyPath):
        super().__init__()
        # Lines for the log of the run.
        self.notes: list[str] = []
        self._folder = os.fspath(folder)
        self._path = os.path.join(self._folder, NAME)
        # The lock of a workdir on gs://.
        self._object: GcsLock | None = None
        if self._folder.startswith("gs://"):
            self._object = GcsLock(self._path)

    def acquire(self) -> None:
        """Takes the lock, on gs:// after up to a minute if its holder seems to be gone.

        Raises `UserError` if another run has it, OSError if the bucket cannot be reached.
        """
        if self._object is not None:
            self.notes += self._object.acquire()
            self.callback(self._object.release)
        elif is_remote(self._folder):
            scheme = self._folder.partition("://")[0]
            self.notes.append(
                f"this run is not locked, because {scheme}:// has no locks: do not start it twice"
            )
        else:
            self._acquire_file()

    def check(self) -> None:
        """Raises `UserError` if this process knows that another run has taken the lock over."""
        if self._object is not None:
            self._object.check()

    def confirm(self) -> None:
        """Confirms the lock before a write. Raises `UserError` if another run has it."""
        if self._object is not None:
            self._object.confirm()

    def _acquire_file(self) -> None:
        with contextlib.ExitStack() as on_error:
            # Opened for appending, the file of another holder keeps its content.
            handle = on_error.enter_context(open(self._path, "a+"))
            try:
                missing = lock_now(handle, seconds=_SECONDS_TO_LOCK)
            except BlockingIOError as error:
                handle.seek(0)
                number = handle.read().strip() or "unknown"
                raise UserError(
                    f"another run (process {number}) is training in {self._folder}. "
                    "Stop it, or pass another --workdir."
                ) from error
            if missing is not None:
                self.notes.append(
                    f"this run is not locked, because {missing}: do not start it twice"
                )

            # The error of a rejected run names this process.
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            # The lock lasts until the file is closed, by `close`.
            self.enter_context(on_error.pop_all())


def has_locks(folder: AnyPath) -> bool:
    """Returns whether runs can lock a directory: on a file system or on gs://."""
    path = os.fspath(folder)
    return path.startswith("gs://") or not is_remote(path)


def is_held(folder: AnyPath) -> bool:
    """Returns whether a run has the lock of a directory, as far as this machine can see.

    Takes no lock.
    """
    path = os.path.join(os.fspath(folder), NAME)
    if is_remote(path):
        return path.startswith("gs://") and GcsLock(path).is_renewed()
    with contextlib.suppress(FileNotFoundError), open(path) as handle:
        try:
            lock_now(handle, seconds=0, shared=True)
        except BlockingIOError:
            return True
    return False
