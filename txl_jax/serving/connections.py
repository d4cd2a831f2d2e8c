"""The server's connections: uvicorn's, limited in number and in how long a client may be silent.

uvicorn waits without a limit for the header of a request and for a client that reads nothing, and
takes connections until the process cannot open another file. Then not even probes are answered.
Here a client without a key, or none at all, keeps nothing for long:

- A header must be complete `HEADER_SECONDS` after the connection was opened, or after its first
  byte on a kept one.
- A client that takes nothing of its answer for `STALLED_SECONDS` is disconnected.
- At the limit of connections the oldest of the least advanced ones is closed for a new one
  (`Phase`).

The limits of a body and of a request are in `serving.app` and `serving.engine`.
"""

import asyncio
import enum
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from txl_jax.config.config_tree import require

# Headers are one packet. Browsers open connections ahead of requests, and open them again.
HEADER_SECONDS = 10.0
# As for a body: a network that is interrupted for so long is given up.
STALLED_SECONDS = 30.0
# Time between two looks at all connections, by which a time limit may be late.
SWEEP_SECONDS = 1.0
# Connections that may be open besides one for each choice that runs or waits: idle ones, probes,
# and small requests.
SPARE_CONNECTIONS = 512
# Connections that are accepted at once, before those over the limit are closed. Clients that come
# at the same time wait in the system's queue, of `QUEUE` connections.
ACCEPTED_AT_ONCE = 8
QUEUE = 1024
# Open files besides those of connections: a closed one is gone after up to four rounds of the event
# loop, which accept others, and the engine opens some (compiled programs).
_SPARE_FILES = 4 * ACCEPTED_AT_ONCE + 16
# Connections of a server that is of use.
_FEWEST = 8
# Clients' mistakes are counted in /metrics. A line for each, with advice to install other packages,
# would let anybody fill the log. (The level of a logger below uvicorn's own would be reset with
# their settings.)
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)


class Phase(enum.IntEnum):
    """How far a connection's request is."""

    HEADER = 0  # The header is awaited, or is not complete.
    BODY = 1  # The header is complete, but not the body.
    READER = 2  # The client must receive the written part of the answer.
    WORK = 3  # The answer is made.


class Connections:
    """The open connections of a server. All is called on its event loop."""

    def __init__(
        self,
        most: int,
        *,
        header_seconds: float = HEADER_SECONDS,
        stalled_seconds: float = STALLED_SECONDS,
        sweep_seconds: float = SWEEP_SECONDS,
        count: Callable[[int], None] = lambda status: None,
    ):
        """Starts without connections.

        Args:
          most: Connections that may be open at a time.
          header_seconds: Time in which a header must be complete.
          stalled_seconds: Time after which a client that takes nothing of its answer is
            disconnected.
          sweep_seconds: Time between two looks at all connections.
          count: Is called with the status of each answer that is given without the application.
        """
        self.most = most
        self.header_seconds = header_seconds
        self.stalled_seconds = stalled_seconds
        self.count = count
        self._sweep_seconds = sweep_seconds
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def make(self, **options: Any) -> "Connection":
        """Returns the protocol of a new connection, as uvicorn's setting `http`."""
        return Connection(self, **options)

    def add(self, new: "Connection") -> None:
        """Takes a new connection.

        At the limit, closes one that is less advanced than all others, or the new one.
        """
        if len(self._open) >= self.most:
            oldest = min(self._open, key=lambda connection: (connection.phase, connection.since))
            if oldest.phase is Phase.WORK:
                # All others are being answered.
                new.transport.abort()
                return
            self._open.discard(oldest)
            oldest.transport.abort()
        self._open.add(new)
        if self._sweep is None:
            self._sweep = new.loop.call_later(self._sweep_seconds, self._close_silent, new.loop)

    def remove(self, connection: "Connection") -> None:
        """Forgets a connection that is closed."""
        self._open.discard(connection)

    def abort(self) -> None:
        """Closes all connections at once."""
        for connection in self._open:
            connection.transport.abort()

    def _close_silent(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections that exceed a time limit, and looks again while any is open."""
        now = loop.time()
        for connection in self._open:
            if connection.is_silent(now):
                connection.transport.abort()
        self._sweep = None
        if self._open:
            self._sweep = loop.call_later(self._sweep_seconds, self._close_silent, loop)


class Connection(H11Protocol):
    """A connection that `Connections` may close."""

    def __init__(self, connections: Connections, **options: Any):
        super().__init__(**options)
        self.logger = _log
        # When the phase began. All times are the loop's clock's.
        self.since = 0.0
        self._connections = connections
        # When the first byte of the awaited header came, or the connection was opened. None while
        # no header is awaited, or no byte of it has come.
        self._header_began: float | None = None
        # Bytes of answers that the system had not taken when that was last looked at.
        self._num_left = 0
        # When their number last changed.
        self._moved = 0.0

    @property
    def phase(self) -> Phase:
        """How far the request is."""
        is_complete = self.cycle is None or self.cycle.response_complete
        if self.transport.get_write_buffer_size() and (is_complete or self.flow.write_paused):
            return Phase.READER
        if is_complete:
            return Phase.HEADER
        return Phase.BODY if self.cycle.more_body else Phase.WORK

    def is_silent(self, now: float) -> bool:
        """Returns whether the client has exceeded a time limit."""
        num_left = self.transport.get_write_buffer_size()
        if num_left != self._num_left or not num_left:
            self._num_left = num_left
            self._moved = now
        if now - self._moved > self._connections.stalled_seconds:
            return True
        began = self._header_began
        return began is not None and now - began > self._connections.header_seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first header."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self._header_began = self.since
        self._moved = self.since
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request."""
        before = self.phase
        super().data_received(data)
        self._note_header(before)

    def on_response_complete(self) -> None:
        """Begins to wait for the next header, which may have come in part."""
        before = self.phase
        super().on_response_complete()
        self.since = self.loop.time()
        if self.conn.trailing_data[0]:
            self._note_header(before)

    def send_400_response(self, msg: str) -> None:
        """Answers data that is not HTTP, possibly in the middle of a body."""
        is_in_body = self.cycle is not None and not self.cycle.response_complete
        if is_in_body:
            # The application reads that the client has left. What it still sends is dropped,
            # without a traceback.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if is_in_body and self.cycle.response_started:
            # A second answer would be taken for the rest of the first.
            self.transport.close()
        else:
            self._connections.count(400)
            super().send_400_response(msg)

    def _note_header(self, before: Phase) -> None:
        """Notes whether a header is awaited whose first byte has come."""
        now = self.loop.time()
        if self.phase is not before:
            self.since = now
        if self.cycle is not None and not self.cycle.response_complete:
            self._header_began = None
        elif self._header_began is None:
            self._header_began = now


def most_connections(num_choices: int) -> int:
    """Returns the number of connections that a server should take.

    `num_choices` is the number of its running and waiting choices.

    Raises `UserError` if the process may open too few files.
    """
    wanted = num_choices + SPARE_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    num_used = len(os.listdir("/dev/fd")) + _SPARE_FILES
    require(
        files >= num_used + _FEWEST,
        f"the limit of open files must be at least {num_used + _FEWEST}, got {files}. "
        "Raise it with ulimit -n.",
    )
    return min(wanted, files - num_used)
