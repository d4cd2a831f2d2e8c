"""Sessions: memories that clients keep on the server, to continue writing or scoring where they stopped.

A session is the rings of one row, the number of tokens that were read, and the latest token, which is not read yet.
Its history comes to no more, however long it is, so that continuing costs the same after any number of tokens.

A session changes only when a request that uses it ends. A request that fails, or whose client leaves, leaves it as it
was. Sessions end with the server.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable

import numpy as np

from txl_jax.errors import RequestError
from txl_jax.inference.cache import KVCache


@dataclasses.dataclass(frozen=True)
class State:
    """The memory of a session; never changed, only replaced."""

    rings: KVCache | None  # Of one row, on the host, or None if nothing was read yet.
    position: int  # Of the row (`serving.rows.Rows`).
    pending: np.ndarray  # int32 [1], the latest token, which is not read yet; [0] if there was none at all.
    tokens: int  # Of the whole history, the pending one included.


EMPTY = State(None, 0, np.zeros(0, np.int32), 0)


@dataclasses.dataclass
class Session:
    """A session of an owner."""

    name: str
    owner: str
    created: float  # Seconds since 1970, as is `used`.
    used: float
    state: State = EMPTY
    busy: bool = False  # Whether a request uses it.


class SessionStore:
    """The sessions of a server. One thread may use it; the engine's thread calls `release`."""

    def __init__(self, *, limit: int, seconds: float, clock: Callable[[], float] = time.time):
        """Begins with no sessions, of at most `limit` over all owners; each expires `seconds` after its last use."""
        self.limit, self.seconds, self._clock = limit, seconds, clock
        self._sessions: dict[str, Session] = {}

    @property
    def num_sessions(self) -> int:
        """Number of sessions, of all owners."""
        return len(self._sessions)

    def create(self, owner: str) -> Session:
        """Makes an empty session; raises `RequestError` (429) if there are too many."""
        self._expire()
        if len(self._sessions) >= self.limit:
            message = f"the server has {self.limit} sessions, and keeps no more; delete one, or wait until one expires"
            raise RequestError(message, status=429, code="too_many_sessions")
        now = self._clock()
        session = Session(secrets.token_hex(16), owner, now, now)
        self._sessions[session.name] = session
        return session

    def get(self, name: str, owner: str) -> Session:
        """Returns a session; raises `RequestError` (404) if the owner has none of this name, or no more."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            lived = f"it may have expired, {self.seconds:g} s after its last use"
            message = f"you have no session {name[:40]!r}; {lived}, so make a new one"
            raise RequestError(message, status=404, code="session_not_found")
        return session

    def of_owner(self, owner: str) -> list[Session]:
        """Returns the sessions of an owner."""
        self._expire()
        return [session for session in self._sessions.values() if session.owner == owner]

    def begin(self, name: str, owner: str) -> Session:
        """Returns a session for one request, until `release`; raises `RequestError` (404, 409)."""
        session = self.get(name, owner)
        if session.busy:
            message = f"the session {name} is used by another request; wait for its end"
            raise RequestError(message, status=409, code="session_busy")
        session.busy, session.used = True, self._clock()
        return session

    def release(self, session: Session, state: State | None = None) -> None:
        """Ends the use of a session, with a new memory, or as it was."""
        session.state = state or session.state
        session.used = self._clock()  # Before `busy`: another thread may look for expired sessions in between.
        session.busy = False

    def delete(self, name: str, owner: str) -> None:
        """Removes a session; raises `RequestError` (404, 409)."""
        del self._sessions[self.begin(name, owner).name]

    def _expire(self) -> None:
        """Removes the sessions that were not used for too long."""
        before = self._clock() - self.seconds
        for session in [each for each in self._sessions.values() if not each.busy and each.used < before]:
            del self._sessions[session.name]
