"""Sessions: memories that clients keep on the server, to continue where they stopped.

Clients can continue writing or scoring.

A session is the rings of one row, the number of tokens that were read, and the latest token, which
is not read yet. Its history comes to no more, however long it is, so that continuing costs the same
after any number of tokens.

A session changes only when a request that continues it ends. A request that fails, or whose client
leaves, does not change it. A session that is deleted while a request continues it disappears
immediately, and its memory is freed with that request. Sessions are kept in the server's memory.
When it is full, a new session replaces the one that was idle longest.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable

import jax
import numpy as np

from txl_jax.errors import RequestError
from txl_jax.inference.cache import KVCache


@dataclasses.dataclass(frozen=True)
class State:
    """A row's state after all but the latest token. Never changed, only replaced."""

    # The cache of one row, [1, ..], or None if nothing was read yet.
    rings: KVCache | None
    # The row's position (`serving.rows.Rows`).
    position: int
    # int32 [1], the latest token, which is not read yet, or [0] before the first token.
    pending: np.ndarray
    # Number of tokens of the whole history, the pending one included.
    tokens: int


EMPTY = State(rings=None, position=0, pending=np.zeros(0, np.int32), tokens=0)


@dataclasses.dataclass(eq=False)
class Session:
    """A session of an owner."""

    name: str
    owner: str
    # When it was made and when it was last used, in seconds since 1970.
    created: float
    used: float
    # Its rings are on the host.
    state: State = EMPTY
    # Whether a request continues it.
    busy: bool = False


class SessionStore:
    """The sessions of a server. One thread may use it, and the engine's thread calls `release`."""

    def __init__(
        self,
        *,
        limit: int,
        limit_per_owner: int,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ):
        """Starts without sessions.

        Keeps at most `limit` of all owners, each until `seconds` after its last use.
        """
        self.seconds = seconds
        # Sessions that made room for others.
        self.num_evicted = 0
        self._clock = clock
        self._limit = limit
        self._limit_per_owner = limit_per_owner
        self._sessions: dict[str, Session] = {}

    @property
    def num_sessions(self) -> int:
        """Number of sessions, of all owners."""
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Memory of all sessions."""
        rings = [session.state.rings for session in self._all()]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(rings))

    def create(self, owner: str) -> Session:
        """Makes an empty session, replacing an idle one if there are too many.

        Raises `RequestError` (429).
        """
        self._expire()
        self._make_room(self._of_owner(owner), self._limit_per_owner)
        self._make_room(self._all(), self._limit)
        now = self._clock()
        session = Session(secrets.token_hex(16), owner, now, now)
        self._sessions[session.name] = session
        return session

    def get(self, name: str, owner: str) -> Session:
        """Returns a session.

        Raises `RequestError` (404) if the owner has no such session, or it has expired.
        """
        self._expire()
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise RequestError(
                f"session {name[:40]!r} does not exist. It may have been evicted for others, or "
                f"have expired {self.seconds:g} s after its last use. Create a new session and "
                "send the text again.",
                status=404,
                code="session_not_found",
            )
        session.used = self._clock()
        return session

    def of_owner(self, owner: str) -> list[Session]:
        """Returns the sessions of an owner."""
        self._expire()
        return self._of_owner(owner)

    def begin(self, name: str, owner: str) -> Session:
        """Returns a session for one request, until `release`. Raises `RequestError` (404, 409)."""
        session = self.get(name, owner)
        if session.busy:
            raise RequestError(
                f"session {name} is used by another request. Wait until it ends.",
                status=409,
                code="session_busy",
            )
        session.busy = True
        return session

    def release(self, session: Session, state: State | None = None) -> None:
        """Ends the use of a session, with a new memory, or as it was."""
        if state is not None:
            session.state = state
        # Before `busy`: another thread may look for expired sessions in between.
        session.used = self._clock()
        session.busy = False

    def delete(self, name: str, owner: str) -> None:
        """Removes a session, even while a request continues it. Raises `RequestError` (404).

        That request continues, and nobody can reach its memory any more. A client that stops a
        request and then deletes the session often comes before the server has noticed the stop. If
        it is a page that is closed, it cannot retry.
        """
        del self._sessions[self.get(name, owner).name]

    def _all(self) -> list[Session]:
        return list(self._sessions.values())

    def _of_owner(self, owner: str) -> list[Session]:
        return [session for session in self._all() if session.owner == owner]

    def _make_room(self, sessions: list[Session], limit: int) -> None:
        """Removes the session of these that is idle longest if they are as many as may be kept."""
        if len(sessions) < limit:
            return
        idle = [session for session in sessions if not session.busy]
        if not idle:
            raise RequestError(
                f"all {limit} sessions are used by requests. Wait until a request ends.",
                status=429,
                code="too_many_sessions",
            )
        evicted = min(idle, key=lambda session: session.used)
        del self._sessions[evicted.name]
        self.num_evicted += 1

    def _expire(self) -> None:
        """Removes the sessions that no request uses and whose time is over."""
        oldest = self._clock() - self.seconds
        for session in self._all():
            if not session.busy and session.used < oldest:
                del self._sessions[session.name]
