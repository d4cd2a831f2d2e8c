"""Sessions: memories that clients keep on the server, to go on writing or scoring where they stopped.

A session is the rings of one row, the number of tokens that were read, and the newest token, which is not read yet.
That is all its history comes to, however long it was, so that going on costs the same after any number of tokens.

A session changes when a request that uses it ends, and only then: one that fails, or whose client leaves, leaves it as
it was. Sessions end with the server.
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable

from txl_jax.inference.cache import KVCache
from txl_jax.serving.requests import RequestError


@dataclasses.dataclass(frozen=True)
class State:
    """The memory of a session; never changed, only replaced."""

    rings: KVCache | None  # Of one row, on the host; None: nothing was read yet.
    position: int  # Of the row (`serving.rows.Rows`).
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


class SessionStore:
    """The sessions of a server; may be called from any thread."""

    def __init__(self, *, limit: int, seconds: float, clock: Callable[[], float] = time.time):
        """Begins without sessions.

        Args:
          limit: Maximum number of sessions, over all owners.
          seconds: Time after its last use at which a session expires.
          clock: Returns seconds since 1970.
        """
        self.limit, self.seconds, self._clock = limit, seconds, clock
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()

    @property
    def num_sessions(self) -> int:
        """Number of sessions, of all owners."""
        return len(self._sessions)

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
        """Removes a session; raises `RequestError` (404, 409)."""
        with self._lock:
            del self._sessions[self.begin(name, owner).name]

    def expire(self) -> None:
        """Removes the sessions that were not used for too long."""
        with self._lock:
            before = self._clock() - self.seconds
            for session in [each for each in self._sessions.values() if not each.busy and each.used < before]:
                del self._sessions[session.name]
