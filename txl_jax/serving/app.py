"""The routes of the server, in Starlette; `make_app` lists them.

Every error has a body of OpenAI's form with one sentence. An unforeseen error is logged, and answered without its
traceback.
"""

import asyncio
import contextlib
import hashlib
import hmac
import importlib.resources
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from txl_jax.errors import RequestError
from txl_jax.serving import protocol
from txl_jax.serving.completion import CompletionRun
from txl_jax.serving.engine import Engine
from txl_jax.serving.sessions import Session

_log = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PROBES = ("/healthz", "/readyz")  # Kubernetes asks for these by the pod's address.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # Of the histogram of completions.
_Handler = Callable[[Request, str], Awaitable[Response]]  # Takes the request and the owner of its sessions.


def make_app(engine: Engine, model: str, *, hosts: Sequence[str] = LOOPBACK, keys: Sequence[str] = ()) -> Starlette:
    """Returns the application, which starts the engine and stops it at its end.

    `model` is its name for clients, `hosts` the names that they may use for this server, where empty allows any, and
    `keys` the API keys, where empty asks for none.
    """
    server = _Server(engine, model, keys)
    routes = [
        server.route("/v1/completions", server.complete, "POST"),
        server.route("/v1/models", server.models),
        server.route("/v1/models/{name:path}", server.models),
        server.route("/v1/sessions", server.make_session, "POST"),
        server.route("/v1/sessions", server.list_sessions),
        server.route("/v1/sessions/{name}", server.show_session),
        server.route("/v1/sessions/{name}", server.delete_session, "DELETE"),
        server.route("/tokenizer_info", server.tokenizer_info),
        server.route("/tokenize", server.tokenize, "POST"),
        server.route("/detokenize", server.detokenize, "POST"),
        Route("/healthz", server.health),
        Route("/readyz", server.readiness),
        Route("/metrics", server.metrics),
        Route("/", server.page),
    ]
    handlers = {HTTPException: _http_error}
    middleware = [Middleware(_KnownHosts, hosts=hosts)] if hosts else []
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=handlers, middleware=middleware)


class _Server(Collector):
    """The functions of the routes, and the source of the figures for Prometheus."""

    def __init__(self, engine: Engine, model: str, keys: Sequence[str]):
        self._engine, self._store, self._model = engine, engine.store, model
        self._keys = [_digest(key) for key in keys]
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._requests = Counter("txl_requests", "Requests, by status.", ["status"], registry=registry)
        self._seconds = Histogram("txl_request_seconds", "Time of completions.", buckets=_SECONDS, registry=registry)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Runs the engine."""
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.stop)

    def route(self, path: str, handle: _Handler, method: str = "GET") -> Route:
        """Returns a route that needs a key, passes its owner on, and answers errors as JSON."""

        async def answer(request: Request) -> Response:
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
            self._requests.labels(response.status_code).inc()
            return response

        return Route(path, answer, methods=[method])

    async def complete(self, request: Request, owner: str) -> Response:
        """Answers `/v1/completions`."""
        body, engine, model = await self._json(request), self._engine, self._model
        parse = protocol.parse_completion
        completion = await asyncio.to_thread(parse, body, engine.vocabulary, engine.limits, model=model)
        session = None if completion.session is None else self._store.begin(completion.session, owner)
        run = CompletionRun(engine, completion, session, model=model)
        if completion.stream:
            return _Stream(run, self._seconds)
        with self._seconds.time():
            return JSONResponse(await run.whole(request))

    async def models(self, request: Request, _owner: str) -> Response:
        """Answers with the one model, in a list or by itself."""
        name = self._model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "txl_jax"}
        if (given := request.path_params.get("name", name)) != name:
            raise protocol.unknown_model(given, name)
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    async def tokenizer_info(self, _request: Request, _owner: str) -> Response:
        """Describes the vocabulary, in the form of vLLM's server."""
        return JSONResponse(protocol.tokenizer_info(self._engine.vocabulary))

    async def tokenize(self, request: Request, _owner: str) -> Response:
        """Returns the token ids of a text."""
        ids = await asyncio.to_thread(protocol.tokenize, await self._json(request), self._engine.vocabulary)
        return JSONResponse({"tokens": ids.tolist(), "count": len(ids)})

    async def detokenize(self, request: Request, _owner: str) -> Response:
        """Returns the text of token ids."""
        return JSONResponse({"prompt": protocol.detokenize(await self._json(request), self._engine.vocabulary)})

    async def make_session(self, request: Request, owner: str) -> Response:
        """Makes a session."""
        if body := await self._body(request):
            protocol.check_known(protocol.parse_json(body), set())
        return JSONResponse(self._described(self._store.create(owner)), status_code=201)

    async def list_sessions(self, _request: Request, owner: str) -> Response:
        """Lists the owner's sessions."""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._store.of_owner(owner)))})

    async def show_session(self, request: Request, owner: str) -> Response:
        """Describes a session."""
        return JSONResponse(self._described(self._store.get(request.path_params["name"], owner)))

    async def delete_session(self, request: Request, owner: str) -> Response:
        """Removes a session."""
        name = request.path_params["name"]
        self._store.delete(name, owner)
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    async def health(self, _request: Request) -> Response:
        """Answers 200, or 503 once the engine has failed and only a restart of the server helps."""
        return PlainTextResponse(*("failed\n", 503) if self._engine.failed else ("ok\n", 200))

    async def readiness(self, _request: Request) -> Response:
        """Answers 200 once the programs are compiled, 503 before and while the server shuts down."""
        return PlainTextResponse(*("ready\n", 200) if self._engine.ready else ("not ready\n", 503))

    async def metrics(self, _request: Request) -> Response:
        """Returns the figures in the format of Prometheus."""
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    def collect(self) -> Iterable[Metric]:
        """Yields the figures of rows, tokens and sessions, whenever Prometheus asks for them."""
        engine, counters = self._engine, self._engine.counters
        yield GaugeMetricFamily("txl_rows", "Rows of the compiled step.", engine.step.batch_size)
        yield GaugeMetricFamily("txl_rows_busy", "Rows in use.", engine.num_busy)
        yield GaugeMetricFamily("txl_choices_waiting", "Choices that wait for a row.", engine.num_waiting)
        yield GaugeMetricFamily("txl_sessions", "Sessions kept.", engine.store.num_sessions)
        yield GaugeMetricFamily("txl_ready", "Whether requests are taken.", engine.ready)
        yield CounterMetricFamily("txl_tokens_read", "Tokens of prompts that were read.", counters.read)
        yield CounterMetricFamily("txl_tokens_written", "Tokens that were written.", counters.written)
        yield CounterMetricFamily("txl_step_calls", "Calls of the compiled step.", counters.calls)
        yield CounterMetricFamily("txl_row_steps", "Tokens drawn, discarded ones included.", counters.steps)
        ended = CounterMetricFamily("txl_choices_ended", "Choices that have ended, by reason.", labels=["reason"])
        for reason, count in list(counters.ended.items()):
            ended.add_metric([reason], count)
        yield ended

    async def page(self, _request: Request) -> Response:
        """Returns the page to type into."""
        page = importlib.resources.files("txl_jax.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    def _owner(self, request: Request) -> str:
        """Returns the digest of the request's key, under which its sessions are kept; raises `RequestError` (401)."""
        if not self._keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Compared with all of them, in a time that does not depend on where they differ.
        known = [hmac.compare_digest(given, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            message = "the API key is missing or not one of this server's; send it as Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        return given

    async def _body(self, request: Request) -> bytes:
        """Returns the body; raises `RequestError` for one that is too long (413) or slow (408)."""
        limits, body = self._engine.limits, bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        message = f"the body has more than {limits.body_bytes} bytes"
                        raise RequestError(message, status=413, code="body_too_large")
        except TimeoutError:
            message = f"the body did not come within {limits.body_seconds:g} s"
            raise RequestError(message, status=408, code="timeout") from None
        return bytes(body)

    async def _json(self, request: Request) -> dict[str, Any]:
        # A page of another site can send a form or plain text to this address, but no JSON without being asked first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"the body is of type {kind[:80]!r}; send application/json"
            raise RequestError(message, status=415, code="unsupported_media_type")
        return protocol.parse_json(await self._body(request))

    def _described(self, session: Session) -> dict[str, Any]:
        return {
            "id": session.name,
            "object": "session",
            "created": int(session.created),
            "expires_at": int(session.used + self._store.seconds),
            "tokens": session.state.tokens,
            "busy": session.busy,
        }


class _Stream(StreamingResponse):
    """A run's stream, which ends the run: its iterator does not even begin if the client has left before."""

    def __init__(self, run: CompletionRun, seconds: Histogram):
        super().__init__(run.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._run, self._seconds = run, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._seconds.time():
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
        message = f"a page of another site ({site[:20]!r}) may not use this server; open its own page at /"
        raise RequestError(message, status=403, code="cross_site")


def _error(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(protocol.error_json(error), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answers for paths and methods that do not exist."""
    place = f"{request.method[:10]} {request.url.path[:80]}"
    message = f"{place} does not exist here ({error.detail}); texts are continued at POST /v1/completions"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    response = _error(RequestError(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})  # The methods that are allowed.
    return response


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
