"""Locks that keep a second run out of a workdir.

On this machine, and on file systems that share their locks, it is a lock of the operating system on `.lock`, which ends
with its process. On gs:// it is an object, `.lock`, that is made only if there is none (`ifGenerationMatch=0`) and
rewritten every 15 s by its holder, each time only if it is still the one that the holder wrote. After a minute without
that another run may take it over, again only if it is still the same; the holder stops as soon as it finds out. Ages
are differences of the server's times. A holder that was killed on the same machine is recognised at once.
"""

import contextlib
import datetime
import email.utils
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from txl_jax.errors import UserError
from txl_jax.runtime.storage import file_system, is_remote, lock_now, patiently

NAME = ".lock"
BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0


class RunLock:
    """The lock of a workdir; this class is that of object storage without preconditions, and keeps nobody out.

    Use it as a context manager, or call `close`.

    Attributes:
      notes: lines for the log of the run.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def acquire(self) -> None:
        """Takes the lock; raises `UserError` if another run has it."""
        scheme = self._folder.partition("://")[0]
        self.notes.append(f"no lock protects this run, as {scheme}:// has none: start it once at a time")

    def check(self) -> None:
        """Raises `UserError` if another run has taken the lock over."""

    def confirm(self) -> None:
        """Makes sure of the lock before something is written; raises `UserError` if another run has it."""

    def close(self) -> None:
        """Releases the lock; nothing happens the second time."""

    def checking(self, stop_requested: Callable[[], Any]) -> Callable[[], Any]:
        """Returns `stop_requested` preceded by `check`."""

        def check_first() -> Any:
            self.check()
            return stop_requested()

        return check_first

    def _refused(self, holder: str) -> UserError:
        return UserError(f"another run ({holder}) is training in {self._folder}; stop it, or give another --workdir")


class FileLock(RunLock):
    """A lock of the operating system on a file."""

    _handle: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock; raises `UserError` if another run has it."""
        handle = open(os.path.join(self._folder, NAME), "a+")  # noqa: SIM115 (closed by `close`)
        try:
            lock_now(handle)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            raise self._refused(f"process {holder}") from error
        except OSError as error:  # As on a Google Drive that is mounted in Colab.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            self.notes.append(
                f"no lock protects this run, as the file system has none ({error.strerror}): start it once"
            )
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        self._handle = handle

    def close(self) -> None:
        """Releases the lock; nothing happens the second time."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class _Seen(NamedTuple):
    """The lock object as it was read."""

    generation: str
    record: dict[str, Any]
    age: float  # Seconds since it was written, by the server's clock.


class ObjectLock(RunLock):
    """A lock in an object of gs://, which its holder renews from a thread."""

    def __init__(self, folder: str, *, log: Callable[[str], None] = print):
        super().__init__(folder)
        self._log = log
        self._bucket, _, self._key = os.path.join(folder, NAME).partition("://")[2].partition("/")
        self._record = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "process": os.getpid(),
            "token": secrets.token_hex(8),
        }
        self._generation: str | None = None
        self._renewed = 0.0
        self._lost: str | None = None
        self._mutex, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run_lock", daemon=True)

    def acquire(self) -> None:
        """Takes the lock, after up to a minute if its holder seems to be gone.

        Raises:
          UserError: another run has it, or the bucket cannot be reached.
        """
        first: _Seen | None = None
        began = time.monotonic()
        while not self._write("0"):
            seen = self._read()
            if seen is None or seen.record.get("token") == self._record["token"]:
                self._generation = seen and seen.generation  # An earlier try had arrived, but its answer was lost.
                if seen:
                    break
                continue
            first = first or seen
            holder, alive = str(seen.record.get("holder", "unknown")), _is_alive(seen.record)
            if alive or seen.generation != first.generation:
                raise self._refused(holder)
            unrenewed = max(seen.age, time.monotonic() - began)
            if alive is False or unrenewed > STALE_SECONDS:
                if self._write(seen.generation):
                    self.notes.append(f"the lock of {holder} was taken over: it has ended, or did not renew its lock")
                    break
                continue
            if seen is first:
                self._log(
                    f"waiting   up to {STALE_SECONDS - unrenewed:.0f} s: {holder} renewed the lock of {self._folder} "
                    f"{seen.age:.0f} s ago, and may be training"
                )
            time.sleep(_LOOK_SECONDS)
        self._thread.start()

    def check(self) -> None:
        """Raises `UserError` if another run has taken the lock over."""
        if self._lost is not None:
            raise UserError(self._lost)

    def confirm(self) -> None:
        """Makes sure of the lock before something is written; raises `UserError` if another run has it."""
        if self._generation is not None and time.monotonic() - self._renewed > STALE_SECONDS / 2:
            self._renew()
        self.check()

    def close(self) -> None:
        """Releases the lock; nothing happens the second time."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._generation is not None and self._lost is None:
            with contextlib.suppress(OSError):  # It ends by itself after a minute.
                self._call("DELETE", "b/{}/o/{}", self._bucket, self._key, ifGenerationMatch=self._generation)
        self._generation = None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self._lost is None:
            with contextlib.suppress(OSError):  # It is tried again at the next beat.
                self._renew()

    def _renew(self) -> None:
        with self._mutex:
            if self._lost is not None or self._write(str(self._generation)):
                return
            seen = self._read()
            if seen and seen.record.get("token") == self._record["token"]:
                self._generation, self._renewed = seen.generation, time.monotonic()
                return
            other = (
                f"another run ({seen.record.get('holder', 'unknown')}) has" if seen else "somebody has removed it or"
            )
            self._lost = (
                f"the lock of {self._folder} was lost, as it was not renewed for a minute: {other} taken it over; this "
                "run stops and has written nothing since"
            )

    def _write(self, generation: str) -> bool:
        """Writes the object if it has this generation ("0": if there is none); returns whether it had."""
        try:
            _, answer = self._call(
                "POST",
                file_system("gs").base.replace("/storage/v1", "/upload/storage/v1") + "b/{}/o",
                self._bucket,
                data=json.dumps(self._record).encode(),
                headers={"Content-Type": "application/octet-stream"},
                uploadType="media",
                name=self._key,
                ifGenerationMatch=generation,
            )
        except FileExistsError:
            return False
        self._generation, self._renewed = str(json.loads(answer)["generation"]), time.monotonic()
        return True

    def _read(self) -> _Seen | None:
        """Reads the object; None: there is none."""
        try:
            headers, answer = self._call("GET", "b/{}/o/{}", self._bucket, self._key)
            _, content = self._call("GET", "b/{}/o/{}", self._bucket, self._key, alt="media")
        except FileNotFoundError:
            return None
        found = json.loads(answer)
        try:
            now = email.utils.parsedate_to_datetime(headers["Date"])
            age = (now - datetime.datetime.fromisoformat(found["updated"])).total_seconds()
        except (KeyError, TypeError, ValueError):
            age = 0.0
        try:
            record = json.loads(content)
        except ValueError:
            record = {}
        return _Seen(str(found["generation"]), record if isinstance(record, dict) else {}, age)

    def _call(self, method: str, url: str, *args: str, **params: Any) -> Any:
        return patiently(lambda: file_system("gs").call(method, url, *args, **params), os.path.join(self._folder, NAME))


def run_lock(folder: str | os.PathLike[str]) -> RunLock:
    """Returns the lock of a workdir, not taken yet."""
    folder = os.fspath(folder)
    if not is_remote(folder):
        return FileLock(folder)
    return ObjectLock(folder) if folder.startswith("gs://") else RunLock(folder)


def _machine() -> str | None:
    """Returns what process numbers are unique in: a start of a machine, and a container on it; None: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_alive(record: dict[str, Any]) -> bool | None:
    """Returns whether the holder's process runs on this machine; None: it is on another one."""
    machine, process = record.get("machine"), record.get("process")
    if machine is None or machine != _machine() or not isinstance(process, int):
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
