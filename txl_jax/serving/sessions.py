"""Sessions: memories that clients keep on the server, to go on writing or scoring where they stopped.

A session is the rings of one row, the number of tokens that were read, and the newest token, which is not read yet.
That is all its history comes to, however long it was, so that going on costs the same after any number of tokens.

A session changes when a request that uses it ends, and only then: one that fails, or whose client leaves, leaves it as
it was. On disk it is one file, written under another name and renamed, with the digest of all its bytes at its end: a
process that is killed leaves the session before or the session after, whole.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.errors import LogError
from txl_jax.runtime.files import write_bytes
from txl_jax.serving.requests import RequestError
from txl_jax.serving.row_step import Rings

_FORMAT = 1
_SUFFIX = ".session"
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True)
class State:
    """The memory of a session; never changed, only replaced."""

    rings: Rings | None  # Of one row, on the host; None: nothing was read yet.
    position: int  # Of the row (`serving.row_step.Rows`).
    pending: int | None  # The newest token, which is not read yet; None: none at all.
    tokens: int  # Of the whole history, the pending one included.


EMPTY = State(None, 0, None, 0)


@dataclasses.dataclass
class Session:
    """A session of an owner."""

    name: str
    owner: str
    created: float  # Seconds since 1970, as is `used`.
    used: float
    state: State = EMPTY
    busy: bool = False  # Whether a request uses it.
    saved: State | None = None  # What is on disk; None: nothing.


class SessionStore:
    """The sessions of a server; may be called from any thread."""

    def __init__(
        self,
        *,
        limit: int,
        seconds: float,
        folder: Path | None,
        model_digest: str,
        clock: Callable[[], float] = time.time,
    ):
        """Begins without sessions; `restore` reads those on disk.

        Args:
          limit: sessions at a time, of all owners.
          seconds: a session expires so long after its last use.
          folder: where they are saved; None: nowhere.
          model_digest: of the model and its lengths; the files of others are left alone.
          clock: seconds since 1970.
        """
        self.limit, self.seconds, self._folder = limit, seconds, folder
        self._model_digest, self._clock = model_digest, clock
        self._sessions: dict[str, Session] = {}
        self._expired: list[Session] = []  # Those that may still have a file.
        self._lock = threading.RLock()
        self._disk = threading.Lock()  # One writer at a time; never waited for with the other lock held.

    @property
    def num_sessions(self) -> int:
        """Number of sessions, of all owners."""
        return len(self._sessions)

    @property
    def can_save(self) -> bool:
        """True if there is a folder to save them in."""
        return self._folder is not None

    def create(self, owner: str) -> Session:
        """Makes an empty session; raises `RequestError` (429) if there are too many."""
        with self._lock:
            self.expire()
            if len(self._sessions) >= self.limit:
                raise RequestError(
                    f"the server keeps {self.limit} sessions and has as many; delete one, or wait until one expires",
                    status=429,
                    code="too_many_sessions",
                )
            now = self._clock()
            session = Session(secrets.token_hex(16), owner, now, now)
            self._sessions[session.name] = session
            return session

    def get(self, name: str, owner: str) -> Session:
        """Returns a session; raises `RequestError` (404) if the owner has none of this name, or no more."""
        with self._lock:
            self.expire()
            session = self._sessions.get(name)
            if session is None or session.owner != owner:
                raise RequestError(
                    f"there is no session {name[:40]!r} of yours; it may have expired ({self.seconds:g} s after its "
                    "last use), so make a new one",
                    status=404,
                    code="session_not_found",
                )
            return session

    def of_owner(self, owner: str) -> list[Session]:
        """Returns the sessions of an owner."""
        with self._lock:
            self.expire()
            return [session for session in self._sessions.values() if session.owner == owner]

    def begin(self, name: str, owner: str) -> Session:
        """Returns a session for one request, until `commit` or `release`; raises `RequestError` (404, 409)."""
        with self._lock:
            session = self.get(name, owner)
            if session.busy:
                raise RequestError(
                    f"the session {name} is used by another request; wait for its end", status=409, code="session_busy"
                )
            session.busy, session.used = True, self._clock()
            return session

    def commit(self, session: Session, state: State) -> None:
        """Sets the memory after a request."""
        with self._lock:
            session.state = state
            self.release(session)

    def release(self, session: Session) -> None:
        """Ends the use of a session, whose memory stays as it is."""
        with self._lock:
            session.busy, session.used = False, self._clock()

    def delete(self, name: str, owner: str) -> None:
        """Removes a session and its file; raises `RequestError` (404, 409)."""
        with self._lock:
            session = self.begin(name, owner)
            del self._sessions[session.name]
        self._remove(session)

    def expire(self) -> None:
        """Removes the sessions that were not used for too long; `save_changed` removes their files, which may wait."""
        with self._lock:
            before = self._clock() - self.seconds
            for session in [each for each in self._sessions.values() if not each.busy and each.used < before]:
                self._expired.append(self._sessions.pop(session.name))

    def save(self, session: Session) -> None:
        """Writes a session to disk.

        Raises:
          RequestError: there is no folder (400), or it cannot be written (507).
        """
        if self._folder is None:
            raise RequestError(
                "this server keeps no sessions on disk; start it with --sessions_dir=FOLDER", code="no_sessions_dir"
            )
        with self._disk:
            with self._lock:  # What is written is one moment of it.
                state, described = session.state, self._describe(session)
                alive = self._sessions.get(session.name) is session
            if not alive or session.saved is state:
                return
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_bytes(self._path(session.name), b"".join(_dump(described, state)))
            except (LogError, OSError) as error:
                raise RequestError(
                    f"the session {session.name} cannot be saved ({error}); it stays in the server's memory",
                    status=507,
                    code="cannot_save",
                ) from error
            session.saved = state

    def save_changed(self) -> list[RequestError]:
        """Saves what has changed since it was saved last, and removes files of expired sessions; returns the errors."""
        errors: list[RequestError] = []
        with self._lock:
            self.expire()
            expired, self._expired = self._expired, []
            changed = [each for each in self._sessions.values() if each.saved is not each.state]
        for session in changed:
            try:
                self.save(session)
            except RequestError as error:
                errors.append(error)
        for session in expired:
            self._remove(session)
        return errors

    def restore(self) -> list[str]:
        """Reads the sessions on disk that have not expired, the newest first; returns one clause for each left out."""
        left_out: list[str] = []
        if self._folder is None or not self._folder.is_dir():
            return left_out
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f".*{_SUFFIX}.*.tmp"):  # Of a process that was killed.
                path.unlink()
        found: list[Session] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                found.append(_load(path, self._model_digest))
            except (OSError, ValueError, KeyError, TypeError) as error:
                left_out.append(f"{path.name}: {error}")
        with self._lock:
            for session in sorted(found, key=lambda each: -each.used):
                if len(self._sessions) < self.limit:
                    self._sessions[session.name] = session
                else:
                    left_out.append(f"{session.name}{_SUFFIX}: more than {self.limit} sessions")
            self.expire()
        return left_out

    def _describe(self, session: Session) -> dict[str, Any]:
        facts = {"format": _FORMAT, "model": self._model_digest, "name": session.name, "owner": session.owner}
        return facts | {"created": session.created, "used": session.used}

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}{_SUFFIX}"

    def _remove(self, session: Session) -> None:
        if self._folder is not None:
            with self._disk, contextlib.suppress(OSError):
                os.unlink(self._path(session.name))


def _dump(described: dict[str, Any], state: State) -> Iterator[bytes]:
    """Yields the parts of a session's file: a line of JSON, the arrays, and the sha256 of both."""
    arrays: Sequence[np.ndarray] = jax.tree.leaves(state.rings)
    header = described | {
        "position": state.position,
        "pending": state.pending,
        "tokens": state.tokens,
        "layers": len(state.rings.keys) if state.rings is not None else 0,
        "arrays": [[array.dtype.name, list(array.shape)] for array in arrays],
    }
    digest = hashlib.sha256()
    for part in ((json.dumps(header) + "\n").encode(), *map(_bytes_of, arrays)):
        digest.update(part)
        yield part
    yield digest.digest()


def _bytes_of(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _load(path: Path, model_digest: str) -> Session:
    """Reads a session's file; raises ValueError with one clause for one that is damaged, or of another model."""
    content = path.read_bytes()
    body, digest = memoryview(content)[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("it is damaged (its sha256 is not the one at its end)")
    line, _, _ = content.partition(b"\n")
    header = json.loads(line)
    if header["format"] != _FORMAT or header["model"] != model_digest:
        raise ValueError("it is of other weights, or of other lengths or types of evaluation")
    arrays, at = [], len(line) + 1
    for name, shape in header["arrays"]:
        dtype = jnp.dtype(name)
        size = int(np.prod(shape)) * dtype.itemsize
        arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
        at += size
    layers = header["layers"]
    rings = Rings(tuple(arrays[:layers]), tuple(arrays[layers:])) if layers else None
    state = State(rings, header["position"], header["pending"], header["tokens"])
    return Session(header["name"], header["owner"], header["created"], header["used"], state, saved=state)
