"""Middleware that every request passes before its route.

It counts the answers, checks the names, and handles the end of unread bodies.
"""

import asyncio
import contextlib
import urllib.parse
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from txl_jax.errors import RequestError
from txl_jax.serving import protocol

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Kubernetes asks for these by the pod's address.
PROBES = ("/healthz", "/readyz")
# Time for which browsers keep the answer to a preflight, as most of them allow.
PREFLIGHT_SECONDS = 600
# A client that sends its body to the end before it reads must get the answer, so the rest of a body
# is taken and dropped: as much as a link of 64 Mbit/s brings in this time, eight times the usual
# largest body.
UNREAD_SECONDS = 2.0
UNREAD_BYTES = 16 << 20


class Counted:
    """Counts answers by their status, whoever gives them, except those to probes."""

    def __init__(self, app: ASGIApp, count: Callable[[int], None]):
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        # 499 stays if the client has left before the answer.
        status = 499

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._count(status)


class ReadsBodies:
    """Closes the connection after an answer to a request whose body was not read to its end.

    Otherwise the server would keep reading it, without end, to find the next request after it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_chunked = "transfer-encoding" in headers
        is_unread = is_chunked or headers.get("content-length", "0") != "0"
        # A request with two lengths may be taken apart in two ways (RFC 9112, 6.1), so that nothing
        # may follow it.
        closes = is_chunked and "content-length" in headers

        async def read() -> Message:
            nonlocal is_unread
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                is_unread = False
            return message

        async def write(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = closes or is_unread
                if closes:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif closes and is_unread and not message.get("more_body", False):
                # The answer is complete for the client. The server only closes after the last part.
                await send({**message, "more_body": True})
                await drop_rest()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        async def drop_rest() -> None:
            dropped = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_SECONDS):
                    while is_unread and dropped < UNREAD_BYTES:
                        dropped += len((await read()).get("body", b""))

        await self._app(scope, read, write)


class OwnPagesOnly:
    """Middleware that rejects other servers' names and requests from other servers' pages.

    A browser's request from another server's page passes only if the page's name is allowed.

    A web page of anybody can be given a name that resolves to this machine (DNS rebinding). A
    browser then takes this server for the page's own, and only the Host header shows it.
    Starlette's `TrustedHostMiddleware` has neither exceptions for probes nor an error that says
    what to do.

    A page with an allowed name may read the answers: browsers ask for that by a preflight
    (OPTIONS), without the key.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        # Names of servers whose pages may send requests. Not loopback: other servers of this
        # machine have pages too.
        self._pages = self._hosts - {*LOOPBACK}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # Only browsers send an origin: the address of the page that sends the request.
        origin = headers.get("origin", "")
        page = origin.partition("://")[2]
        is_foreign = bool(origin) and page != host
        is_allowed = is_foreign and _name(page) in self._pages

        app = self._app
        if scope["path"] not in PROBES:
            if self._hosts and _name(host) not in self._hosts:
                message = (
                    f"{host[:80]!r} is not a name of this server. If it should be, add it to "
                    "--allowed_hosts."
                )
                app = error_response(RequestError(message, status=421, code="unknown_host"))
                is_allowed = False
            elif is_foreign and not is_allowed:
                app = error_response(RequestError(_refusal(origin), status=403, code="cross_site"))

        if not is_allowed:
            await app(scope, receive, send)
            return

        async def share(message: Message) -> None:
            """Lets the page read the answer."""
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Access-Control-Allow-Origin"] = origin
                answered.add_vary_header("Origin")
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            app = _preflight(headers)
        await app(scope, receive, share)


def error_response(error: RequestError) -> JSONResponse:
    """Returns the answer of an error, in OpenAI's format."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(protocol.error_json(error), status_code=error.status, headers=headers)


def _refusal(origin: str) -> str:
    """Returns why requests of another server's page are rejected."""
    name = _name(origin.partition("://")[2])
    if name is None:
        return f"pages without an address ({origin[:80]!r}) are not allowed"
    if name in LOOPBACK:
        return f"pages of other servers on this machine ({origin[:80]!r}) are not allowed"
    return (
        f"pages from {origin[:80]!r} are not allowed. To allow them, add the name to "
        "--allowed_hosts."
    )


def _preflight(headers: Headers) -> Response:
    """Returns the answer to a browser that asks whether an allowed page may send its request."""
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
    }
    requested = headers.get("access-control-request-headers")
    if requested:
        # Whatever the page wants to send: clients such as OpenAI's send headers of their own.
        allowed["Access-Control-Allow-Headers"] = requested
    return Response(status_code=204, headers=allowed)


def _name(address: str) -> str | None:
    """Returns the name or IP address in "name:port" in lower case, or None if it is malformed."""
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit(f"//{address}").hostname
    return None
