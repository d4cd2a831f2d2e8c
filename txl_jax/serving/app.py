"""The routes of the server, in Starlette.

    POST /v1/completions            OpenAI's, with `session` besides
    GET  /v1/models                 the one model
    POST, GET /v1/sessions          makes one, lists one's own
    GET, DELETE /v1/sessions/ID
    GET  /tokenizer_info, POST /tokenize, /detokenize
    GET  /healthz, /readyz, /metrics, /

Every error has a body of OpenAI's form with one sentence; what is not foreseen is logged and answered without a
traceback.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import importlib.resources
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from txl_jax.serving import protocol
from txl_jax.serving.completion_run import CompletionRun
from txl_jax.serving.engine import Engine
from txl_jax.serving.prometheus import Metrics
from txl_jax.serving.requests import Limits, RequestError
from txl_jax.serving.sessions import Session

_log = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PROBES = ("/healthz", "/readyz")  # Kubernetes asks for these by the pod's address.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a server, besides its engine."""

    model: str  # Name of the model for clients.
    hosts: tuple[str, ...] = LOOPBACK  # Names that clients may use for this server; empty allows any.
    keys: tuple[str, ...] = ()  # API keys; empty: none is asked for.
    limits: Limits = dataclasses.field(default_factory=Limits)
    created: int = 0  # Seconds since 1970 of the model.


def make_app(engine: Engine, settings: Settings) -> Starlette:
    """Returns the application; it starts the engine, and stops it at its end."""
    server = _Server(engine, settings)
    one_session = "/v1/sessions/{name}"
    routes = [
        Route("/v1/completions", server.answer(server.complete), methods=["POST"]),
        Route("/v1/models", server.answer(server.models)),
        Route("/v1/models/{name:path}", server.answer(server.models)),
        Route("/v1/sessions", server.answer(server.make_session), methods=["POST"]),
        Route("/v1/sessions", server.answer(server.list_sessions), methods=["GET"]),
        Route(one_session, server.answer(server.show_session), methods=["GET"]),
        Route(one_session, server.answer(server.delete_session), methods=["DELETE"]),
        Route("/tokenizer_info", server.answer(server.tokenizer_info)),
        Route("/tokenize", server.answer(server.tokenize), methods=["POST"]),
        Route("/detokenize", server.answer(server.detokenize), methods=["POST"]),
        Route("/healthz", server.health),
        Route("/readyz", server.readiness),
        Route("/metrics", server.metrics_text),
        Route("/", server.page),
    ]
    handlers: Any = {HTTPException: _http_error}
    middleware = [Middleware(_KnownHosts, hosts=settings.hosts)] if settings.hosts else []
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=handlers, middleware=middleware)


class _Server:
    """The routes' functions."""

    def __init__(self, engine: Engine, settings: Settings):
        self._engine, self._settings = engine, settings
        self._owners = {_digest(key): key for key in settings.keys}
        self._metrics = Metrics(engine)
        page = importlib.resources.files("txl_jax.serving").joinpath("page.html")
        self._page = page.read_text(encoding="utf-8")

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Runs the engine."""
        del app
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.stop)

    def answer(self, handle: Callable[[Request, str], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Returns the function of a route: with the owner of the key, and errors as JSON."""

        async def route(request: Request) -> Response:
            try:
                _refuse_other_sites(request)
                response = await handle(request, self._owner(request))
            except RequestError as error:
                response = _error(error)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:  # noqa: BLE001 (clients get a sentence, and the log the traceback)
                _log.exception("a request failed")
                response = _error(RequestError("the server could not answer this request", status=500, code="internal"))
            self._metrics.requests.labels(response.status_code).inc()
            return response

        return route

    async def complete(self, request: Request, owner: str) -> Response:
        """Answers `/v1/completions`."""
        body = await self._json(request)
        parse = protocol.parse_completion
        completion = await asyncio.to_thread(
            parse, body, self._engine.vocabulary, self._settings.limits, model=self._settings.model
        )
        session = None if completion.session is None else self._engine.store.begin(completion.session, owner)
        run = CompletionRun(
            self._engine, completion, session, model=self._settings.model, seconds=self._settings.limits.seconds
        )
        if completion.stream:
            return _Stream(run, self._timed(run.stream()))
        with self._metrics.seconds.time():
            return JSONResponse(await run.whole(request))

    async def models(self, request: Request, owner: str) -> Response:
        """Answers with the one model, in a list or alone."""
        del owner
        name = self._settings.model
        model = {"id": name, "object": "model", "created": self._settings.created, "owned_by": "txl_jax"}
        given = request.path_params.get("name")
        if given is None:
            return JSONResponse({"object": "list", "data": [model]})
        if given != name:
            raise RequestError(
                f"there is no model {given[:80]!r} here, only {name!r}", status=404, code="model_not_found"
            )
        return JSONResponse(model)

    async def tokenizer_info(self, request: Request, owner: str) -> Response:
        """Describes the vocabulary, in the form of vLLM's server."""
        del request, owner
        return JSONResponse(protocol.tokenizer_info(self._engine.vocabulary))

    async def tokenize(self, request: Request, owner: str) -> Response:
        """Returns the token ids of a text."""
        del owner
        body = await self._json(request)
        tokens = await asyncio.to_thread(protocol.tokenize, body, self._engine.vocabulary)
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def detokenize(self, request: Request, owner: str) -> Response:
        """Returns the text of token ids."""
        del owner
        return JSONResponse({"prompt": protocol.detokenize(await self._json(request), self._engine.vocabulary)})

    async def make_session(self, request: Request, owner: str) -> Response:
        """Makes a session."""
        if body := await self._body(request):
            protocol.check_known(protocol.parse_json(body), set())
        return JSONResponse(self._described(self._engine.store.create(owner)), status_code=201)

    async def list_sessions(self, request: Request, owner: str) -> Response:
        """Lists the owner's sessions."""
        del request
        data = [self._described(each) for each in self._engine.store.of_owner(owner)]
        return JSONResponse({"object": "list", "data": data})

    async def show_session(self, request: Request, owner: str) -> Response:
        """Describes a session."""
        return JSONResponse(self._described(self._engine.store.get(request.path_params["name"], owner)))

    async def delete_session(self, request: Request, owner: str) -> Response:
        """Removes a session."""
        name = request.path_params["name"]
        await asyncio.to_thread(self._engine.store.delete, name, owner)
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    async def health(self, request: Request) -> Response:
        """Answers 200, or 503 once the engine has failed and only a restart of the server helps."""
        del request
        failed = self._engine.failed
        return PlainTextResponse("failed\n" if failed else "ok\n", status_code=503 if failed else 200)

    async def readiness(self, request: Request) -> Response:
        """Answers 200 once the programs are compiled, 503 before and while the server shuts down."""
        del request
        ready = self._engine.ready
        return PlainTextResponse("ready\n" if ready else "not ready\n", status_code=200 if ready else 503)

    async def metrics_text(self, request: Request) -> Response:
        """Returns the metrics."""
        del request
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, request: Request) -> Response:
        """Returns the page to type into."""
        del request
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _POLICY})

    async def _timed(self, parts: AsyncIterator[str]) -> AsyncIterator[str]:
        with self._metrics.seconds.time():
            async for part in parts:
                yield part

    def _owner(self, request: Request) -> str:
        """Returns the digest of the request's key, under which its sessions are kept; raises `RequestError` (401)."""
        if not self._owners:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Compared with all of them, in a time that does not depend on where they differ.
        known = [hmac.compare_digest(given, owner) for owner in self._owners]
        if scheme.lower() != "bearer" or not any(known):
            raise RequestError(
                "the API key is missing or not one of this server's; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        return given

    async def _body(self, request: Request) -> bytes:
        """Returns the body; raises `RequestError` for one that is too long (413) or slow (408)."""
        limits, parts, size = self._settings.limits, [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limits.body_bytes:
                        raise RequestError(
                            f"the body has more than {limits.body_bytes} bytes", status=413, code="body_too_large"
                        )
                    parts.append(part)
        except TimeoutError:
            raise RequestError(
                f"the body did not come within {limits.body_seconds:g} s", status=408, code="timeout"
            ) from None
        return b"".join(parts)

    async def _json(self, request: Request) -> dict[str, Any]:
        # A page of another site can send a form or plain text to this address, but no JSON without being asked first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                f"the body is of type {kind[:80]!r}; send application/json", status=415, code="unsupported_media_type"
            )
        return protocol.parse_json(await self._body(request))

    def _described(self, session: Session) -> dict[str, Any]:
        return {
            "id": session.name,
            "object": "session",
            "created": int(session.created),
            "expires_at": int(session.used + self._engine.store.seconds),
            "tokens": session.state.tokens,
            "busy": session.busy,
        }


class _Stream(StreamingResponse):
    """A stream of a run, which ends with it: its iterator does not even begin if the client has left before."""

    def __init__(self, run: CompletionRun, parts: AsyncIterator[str]):
        super().__init__(parts, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.cancel()


class _KnownHosts:
    """Answers 421 to requests for other names than the server's.

    A page of another site can have its own name resolve to this address (DNS rebinding). Browsers then treat its
    requests as same-origin, and only the Host header still shows the name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            given = Headers(scope=scope).get("host", "")
            if _host_name(given) not in self._hosts:
                message = f"this server is not {given[:80]!r}; add that name to --allowed_hosts if it is yours"
                app = _error(RequestError(message, status=421, code="unknown_host"))
        await app(scope, receive, send)


def _host_name(given: str) -> str | None:
    """Returns the name or address of a Host header without its port, in lower case, or None if it is malformed.

    >>> [_host_name(each) for each in ("LocalHost:8000", "[::1]:8000", "[::1", "a b")]
    ['localhost', '::1', None, None]
    """
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d*)?", given.lower())
    return match and (match[1] or match[2])


def _refuse_other_sites(request: Request) -> None:
    """Raises `RequestError` (403) for what a browser sends for a page of another site, which could make sessions."""
    site = request.headers.get("sec-fetch-site", "none")  # Programs other than browsers send none.
    if request.method != "GET" and site not in ("same-origin", "none"):
        raise RequestError(
            f"a page of another site ({site[:20]!r}) may not use this server; open its own page at /",
            status=403,
            code="cross_site",
        )


def _error(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(protocol.error_json(error), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answers for routes and methods that there are none of."""
    method, path = request.method[:10], request.url.path[:80]
    if error.status_code == 405:
        message, code = f"{path} takes no {method}", "method_not_allowed"
    else:
        message, code = f"no such path: {method} {path}; texts are continued at POST /v1/completions", "not_found"
    response = _error(RequestError(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})  # Those that are allowed.
    return response


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
