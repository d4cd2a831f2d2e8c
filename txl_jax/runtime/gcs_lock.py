"""The lock of a workdir on gs://: an object that only one run can create.

The object `.lock` is created only if missing, and never rewritten. Its holder rewrites another
object, `.lock-beat-TOKEN`, every 15 s. After a minute without that another run may take over: it
deletes this one `.lock` (by its generation) and creates its own. The holder stops as soon as it
finds a `.lock` that is not its own. Ages are differences of the server's times. A holder that was
killed on this machine is recognised at once.
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
from typing import Any, NamedTuple

from txl_jax.errors import UserError
from txl_jax.runtime import remote
from txl_jax.runtime.output import say

BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0


class _Version(NamedTuple):
    """The server's metadata of an object."""

    generation: str  # Another one each time that the object is written.
    age: float  # Seconds since it was written, by the server's clock.


class GcsLock:
    """The lock object of a workdir, not taken yet."""

    def __init__(self, url: str):
        """Does not call the server. `url` is the object's."""
        self._url = url
        self._folder = os.path.dirname(url)
        # The content of the object, if this run creates it.
        self._record: dict[str, Any] = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "process": os.getpid(),
            "token": secrets.token_hex(8),
        }
        self._thread = threading.Thread(target=self._beat, name="run_lock", daemon=True)
        self._ended = threading.Event()
        # The error message once another run has the lock.
        self._lost: str | None = None

    def acquire(self) -> list[str]:
        """Takes the lock, after up to a minute if its holder seems to be gone.

        Returns:
          Lines for the log of the run.

        Raises:
          UserError: If another run has it.
          OSError: If the bucket cannot be reached.
        """
        notes = []
        # Generations of the lock and of its beat, when they were first looked at.
        first: tuple[str, str] | None = None
        began = time.monotonic()
        while not self._create():
            record = self._read()
            lock = _version(self._url)
            # It was released meanwhile.
            if record is None or lock is None:
                continue

            holder = str(record.get("holder", "unknown"))
            is_alive = _is_alive(record)
            beat = _version(self._beat_url(record)) or lock
            seen = (lock.generation, beat.generation)
            has_changed = first is not None and first != seen
            if is_alive or has_changed:
                raise UserError(
                    f"another run ({holder}) is training in {self._folder}. "
                    "Stop it, or pass another --workdir."
                )

            unrenewed = max(beat.age, time.monotonic() - began)
            if is_alive is False or unrenewed > STALE_SECONDS:
                # If several runs take over, one of them deletes the object.
                if self._delete(lock.generation):
                    _remove(self._beat_url(record))
                    notes.append(
                        f"the lock was taken over from {holder}, which has ended or did "
                        "not renew it"
                    )
                continue

            if first is None:
                say(
                    f"waiting   up to {STALE_SECONDS - unrenewed:.0f} s: "
                    f"{holder} renewed the lock of {self._folder} {beat.age:.0f} s ago, and "
                    "may be training"
                )
            first = seen
            time.sleep(_LOOK_SECONDS)
        self._thread.start()
        return notes

    def release(self) -> None:
        """Ends the beats, and deletes the objects if the lock is still this run's."""
        self._ended.set()
        try:
            self._thread.join()
        finally:
            self._delete_own()

    def check(self) -> None:
        """Raises `UserError` if this process knows that another run has taken the lock over."""
        if self._lost is not None:
            raise UserError(self._lost)

    def confirm(self) -> None:
        """Asks the server for the holder. Raises `UserError` if it is another run."""
        self._look()
        self.check()

    def is_renewed(self) -> bool:
        """Returns whether the object has a holder that is alive, as far as this machine can see.

        Here its process must run. A holder elsewhere must have renewed the lock within a minute.
        """
        record = self._read()
        lock = _version(self._url)
        if record is None or lock is None:
            return False
        is_alive = _is_alive(record)
        if is_alive is not None:
            return is_alive
        beat = _version(self._beat_url(record)) or lock
        return beat.age <= STALE_SECONDS

    def _beat(self) -> None:
        """Renews the lock until it is released or lost, in a separate thread."""
        while not self._ended.wait(BEAT_SECONDS) and self._lost is None:
            # After an error it is tried again at the next beat.
            with contextlib.suppress(OSError):
                remote.write(self._beat_url(self._record), b"")
                self._look()

    def _look(self) -> None:
        """Finds out whether the lock is still this run's."""
        if self._lost is not None or self._is_own():
            return
        record = self._read()
        if record is None:
            reason = "it was removed"
        else:
            reason = f"another run ({record.get('holder')}) has taken it over"
        self._lost = (
            f"the lock of {self._folder} was lost, because it was not renewed for a minute: "
            f"{reason}. This run stops, and has written nothing since."
        )

    def _delete_own(self) -> None:
        # If the server cannot be reached, the lock ends by itself after a minute.
        with contextlib.suppress(OSError):
            lock = _version(self._url)
            if lock is not None and self._is_own():
                self._delete(lock.generation)
            _remove(self._beat_url(self._record))

    def _create(self) -> bool:
        """Creates the object if it does not exist. Returns whether it is this run's."""
        base = remote.file_system("gs").base
        uploads = base.replace("/storage/v1", "/upload/storage/v1") + "b/{}/o"
        try:
            _call(
                "POST",
                self._url,
                uploads,
                data=json.dumps(self._record).encode(),
                headers={"Content-Type": "application/octet-stream"},
                uploadType="media",
                name=self._url.split("/", 3)[3],
                ifGenerationMatch="0",
            )
        except FileExistsError:
            # An earlier try may have arrived, and its answer been lost.
            return self._is_own()
        return True

    def _delete(self, generation: str) -> bool:
        """Deletes the object if it still has this generation. Returns whether it had."""
        try:
            _call("DELETE", self._url, ifGenerationMatch=generation)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        """Returns the object's content, which describes its holder, or None if it is missing.

        The result is empty if the content is corrupted.
        """
        try:
            record = json.loads(remote.read(self._url))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _is_own(self) -> bool:
        record = self._read() or {}
        return record.get("token") == self._record["token"]

    def _beat_url(self, record: dict[str, Any]) -> str:
        return f"{self._url}-beat-{record.get('token')}"


def _version(url: str) -> _Version | None:
    """Returns an object's generation and age, or None if it is missing."""
    try:
        headers, content = _call("GET", url)
    except FileNotFoundError:
        return None
    info = json.loads(content)
    now = email.utils.parsedate_to_datetime(headers["Date"])
    updated = datetime.datetime.fromisoformat(info["updated"])
    return _Version(str(info["generation"]), (now - updated).total_seconds())


def _call(method: str, url: str, place: str = "b/{}/o/{}", **arguments: Any) -> Any:
    """Calls the server about an object. Returns the headers and the content of its answer.

    The braces of `place` are filled with the names of the bucket and of the object.
    """
    bucket, name = url.split("/", 3)[2:]
    return remote.patiently(
        lambda: remote.file_system("gs").call(method, place, bucket, name, **arguments), url
    )


def _remove(url: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        remote.remove(url)


def _machine() -> str | None:
    """Returns the scope in which process numbers are unique: a machine's boot, and a container.

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
