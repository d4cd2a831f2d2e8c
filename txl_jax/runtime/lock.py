"""Locks that keep a second run out of a workdir.

On this machine, and on file systems that share their locks, it is an operating system lock on
`.lock`, which ends with its process. On gs:// it is the object `.lock`, created only if missing and
never rewritten. Its holder rewrites another object, `.lock-beat-TOKEN`, every 15 s. After a minute
without that another run may take over: it deletes this one `.lock` (by its generation) and creates
its own. The holder stops as soon as it finds a `.lock` that is not its own. Ages are differences of
the server's times. A holder that was killed on this machine is recognised at once.
"""

import contextlib
import datetime
import email.utils
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from txl_jax.errors import UserError
from txl_jax.runtime.output import say
from txl_jax.runtime.remote import call as remote_call
from txl_jax.runtime.remote import file_system, patiently
from txl_jax.runtime.storage import AnyPath, is_remote, lock_now, read, remove

NAME = ".lock"
BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_SECONDS_TO_LOCK = 1.0  # A process that only tests a lock holds it for a moment.


class RunLock(contextlib.ExitStack):
    """The lock of a workdir, not taken yet.

    Use it as a context manager, or call `close`, which releases the lock.
    """

    def __init__(self, folder: AnyPath):
        super().__init__()
        self.notes: list[str] = []  # Lines for the log of the run.
        self._folder = os.fspath(folder)
        self._scheme = self._folder.partition("://")[0] if is_remote(self._folder) else None
        self._path = os.path.join(self._folder, NAME)
        self._record = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "process": os.getpid(),
            "token": secrets.token_hex(8),
        }
        self._lost: str | None = None
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Takes the lock, on gs:// after up to a minute if its holder seems to be gone.

        Raises `UserError` if another run has it, OSError if the bucket cannot be reached.
        """
        if self._scheme is None:
            self._acquire_file()
        elif self._scheme == "gs":
            self._acquire_object()
        else:
            self.notes.append(
                f"this run is not locked, because {self._scheme}:// has no locks: "
                "do not start it twice"
            )

    def check(self) -> None:
        """Raises `UserError` if this process knows that another run has taken the lock over."""
        if self._lost is not None:
            raise UserError(self._lost)

    def confirm(self) -> None:
        """Confirms the lock before a write. Raises `UserError` if another run has it."""
        if self._scheme == "gs":
            self._look()
        self.check()

    def _refused(self, holder: str) -> UserError:
        return UserError(
            f"another run ({holder}) is training in {self._folder}. "
            "Stop it, or pass another --workdir."
        )

    def _acquire_file(self) -> None:
        with contextlib.ExitStack() as stack:
            handle = stack.enter_context(open(self._path, "a+"))
            try:
                missing = lock_now(handle, seconds=_SECONDS_TO_LOCK)
            except BlockingIOError as error:
                handle.seek(0)
                raise self._refused(f"process {handle.read().strip() or 'unknown'}") from error
            if missing is not None:
                self.notes.append(
                    f"this run is not locked, because {missing}: do not start it twice"
                )
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            self.enter_context(stack.pop_all())

    # Objects

    def _acquire_object(self) -> None:
        first: tuple[str, str] | None = None
        began = time.monotonic()
        while not self._create():
            record, lock = self._read(), _stat(self._path)
            if record is None or lock is None:  # It was released meanwhile.
                continue
            holder, alive = str(record.get("holder", "unknown")), _is_alive(record)
            beat, age = _stat(self._beat_of(record)) or lock
            if alive or (first is not None and first != (lock[0], beat)):
                raise self._refused(holder)
            unrenewed = max(age, time.monotonic() - began)
            if alive is False or unrenewed > STALE_SECONDS:
                if self._delete(lock[0]):
                    remove(self._beat_of(record))
                    self.notes.append(
                        f"the lock was taken over from {holder}, which has ended or did "
                        "not renew it"
                    )
                continue
            if first is None:
                say(
                    f"waiting   up to {STALE_SECONDS - unrenewed:.0f} s: "
                    f"{holder} renewed the lock of {self._folder} {age:.0f} s ago, and "
                    "may be training"
                )
            first = lock[0], beat
            time.sleep(_LOOK_SECONDS)
        thread = threading.Thread(target=self._beat, name="run_lock", daemon=True)
        thread.start()
        # `close` calls the last one first.
        for act in (self._release, thread.join, self._ended.set):
            self.callback(act)

    def _release(self) -> None:
        with contextlib.suppress(OSError):  # It ends by itself after a minute.
            lock = _stat(self._path)
            if lock is not None and self._is_own():
                self._delete(lock[0])
            remove(self._beat_of(self._record))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self._lost is None:
            with contextlib.suppress(OSError):  # It is tried again at the next beat.
                remote_call(self._beat_of(self._record), "pipe_file", b"")
                self._look()

    def _look(self) -> None:
        """Finds out whether the lock is still this run's."""
        if self._lost is not None or self._is_own():
            return
        record = self._read()
        other = (
            "it was removed"
            if record is None
            else f"another run ({record.get('holder')}) has taken it over"
        )
        self._lost = (
            f"the lock of {self._folder} was lost, because it was not renewed for a minute: "
            f"{other}. This run stops, and has written nothing since."
        )

    def is_renewed(self) -> bool:
        """Returns whether the object has a holder that is alive, as far as this machine can see.

        Here its process must run. A holder elsewhere must have renewed the lock within a minute.
        """
        record, lock = self._read(), _stat(self._path)
        if record is None or lock is None:
            return False
        alive = _is_alive(record)
        return (
            (_stat(self._beat_of(record)) or lock)[1] <= STALE_SECONDS if alive is None else alive
        )

    def _create(self) -> bool:
        """Creates the object if it does not exist. Returns whether it is this run's."""
        uploads = file_system("gs").base.replace("/storage/v1", "/upload/storage/v1") + "b/{}/o"
        query = {
            "uploadType": "media",
            "name": self._path.split("/", 3)[3],
            "ifGenerationMatch": "0",
        }
        data, headers = (
            json.dumps(self._record).encode(),
            {"Content-Type": "application/octet-stream"},
        )
        try:
            _call("POST", self._path, uploads, data=data, headers=headers, **query)
        except FileExistsError:
            return self._is_own()  # An earlier try may have arrived, and its answer been lost.
        return True

    def _delete(self, generation: str) -> bool:
        """Deletes the object if it still has this generation. Returns whether it had."""
        try:
            _call("DELETE", self._path, ifGenerationMatch=generation)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        """Returns the object's content, which describes its holder, or None if it is missing.

        The result is empty if the content is corrupted.
        """
        try:
            record = json.loads(read(self._path))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _is_own(self) -> bool:
        return (self._read() or {}).get("token") == self._record["token"]

    def _beat_of(self, record: dict[str, Any]) -> str:
        return f"{self._path}-beat-{record.get('token')}"


def is_held(folder: AnyPath) -> bool:
    """Returns whether a run has the lock of a directory, as far as this machine can see.

    Takes no lock.
    """
    path = os.path.join(os.fspath(folder), NAME)
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError), open(path) as handle:
            try:
                lock_now(handle, seconds=0, shared=True)
            except BlockingIOError:
                return True
        return False
    return path.startswith("gs://") and RunLock(folder).is_renewed()


def _call(method: str, url: str, place: str = "b/{}/o/{}", **arguments: Any) -> Any:
    """Calls the server about an object. Returns the headers and the content of its answer."""
    bucket, key = url.split("/", 3)[2:]
    return patiently(lambda: file_system("gs").call(method, place, bucket, key, **arguments), url)


def _stat(url: str) -> tuple[str, float] | None:
    """Returns an object's generation and its age in seconds, or None if it is missing.

    The age is measured by the server's clock.
    """
    try:
        headers, answer = _call("GET", url)
    except FileNotFoundError:
        return None
    found = json.loads(answer)
    now = email.utils.parsedate_to_datetime(headers["Date"])
    return str(found["generation"]), (
        now - datetime.datetime.fromisoformat(found["updated"])
    ).total_seconds()


def _machine() -> str | None:
    """Returns what process numbers are unique in: a start of a machine, and a container on it.

    None if unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_alive(record: dict[str, Any]) -> bool | None:
    """Returns whether the holder's process runs on this machine.

    The result is None if the holder is on another machine.
    """
    if record.get("machine") is None or record["machine"] != _machine():
        return None
    return os.path.exists(f"/proc/{record.get('process')}")
