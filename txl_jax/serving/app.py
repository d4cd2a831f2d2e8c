"""The routes of the server, in Starlette. `make_app` lists them.

Every error has a body in OpenAI's format with a message. An unexpected error is logged, and
answered without its traceback.
"""

import asyncio
import contextlib
import difflib
import hashlib
import hmac
import importlib.resources
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from txl_jax.errors import RequestError
from txl_jax.serving import protocol
from txl_jax.serving.completion import CompletionRun
from txl_jax.serving.engine import Engine
from txl_jax.serving.middleware import LOOPBACK, Counted, OwnPagesOnly, ReadsBodies, error_response
from txl_jax.serving.sessions import Session
from txl_jax.version import __version__

_log = logging.getLogger(__name__)
_POLICY = (  # Of the page. In a frame of another site's page, a user would write without knowing.
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # Of the histogram of completions.
_BODIES = (protocol.Body, protocol.CompletionBody, protocol.TokenizeBody, protocol.DetokenizeBody)


def make_app(
    engine: Engine, model: str, *, hosts: Sequence[str] = LOOPBACK, keys: Sequence[str] = ()
) -> Starlette:
    """Returns the application, which starts the engine and stops it at its end.

    `model` is its name for clients. `hosts` are the names that clients may use for this server, or
    empty to allow any. `keys` are the API keys, or empty to require none.
    """
    server = _Server(engine, model, keys)
    routes = [
        server.route("/v1/completions", server.complete, protocol.CompletionBody),
        server.route("/v1/models", server.models),
        server.route("/v1/models/{name:path}", server.models),
        server.route("/v1/sessions", server.make_session, protocol.Body),
        server.route("/v1/sessions", server.list_sessions),
        server.route("/v1/sessions/{name}", server.show_session),
        server.route("/v1/sessions/{name}", server.delete_session, method="DELETE"),
        server.route("/tokenizer_info", server.tokenizer_info),
        server.route("/tokenize", server.tokenize, protocol.TokenizeBody),
        server.route("/detokenize", server.detokenize, protocol.DetokenizeBody),
        server.route("/metrics", server.metrics),
        Route("/healthz", server.health),
        Route("/readyz", server.readiness),
        Route("/openapi.json", server.schema),
        Route("/", server.page),
    ]
    middleware = [
        Middleware(Counted, count=server.count),
        Middleware(ReadsBodies),
        Middleware(OwnPagesOnly, hosts=hosts),
    ]
    handlers = {HTTPException: _http_error}
    app = Starlette(
        routes=routes, lifespan=server.lifespan, exception_handlers=handlers, middleware=middleware
    )
    app.state.count = server.count  # For answers that are given without the application.
    return app


class _Server(Collector):
    """The functions of the routes, and the source of the figures for Prometheus."""

    def __init__(self, engine: Engine, model: str, keys: Sequence[str]):
        self._engine, self._store, self._model = engine, engine.store, model
        self._vocabulary, self._limits = engine.vocabulary, engine.limits
        self._names = protocol.TokenNames(engine.vocabulary)
        self._keys = [_digest(key) for key in keys]
        self._paths: dict[str, Any] = {}  # Of the schema.
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._requests = Counter(
            "txl_requests", "Requests, by status.", ["status"], registry=registry
        )
        self._seconds = Histogram(
            "txl_request_seconds", "Time of completions.", buckets=_SECONDS, registry=registry
        )

    def count(self, status: int) -> None:
        """Counts a request that was answered with this status."""
        self._requests.labels(status).inc()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Runs the engine."""
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.stop)

    def route(
        self,
        path: str,
        handle: Callable[[Request], Awaitable[Response | dict[str, Any]]],
        body: type[protocol.Body] | None = None,
        *,
        method: str = "GET",
    ) -> Route:
        """Returns a route that needs a key.

        With a body's model it is a POST with JSON. Errors are JSON too.

        The function finds the key's owner and the parsed body in `request.state`.
        """

        async def answer(request: Request) -> Response:
            try:
                request.state.owner = self._owner(request)
                if body is not None:
                    content = await self._json(request)
                    request.state.body = await asyncio.to_thread(protocol.parse, content, body)
                found = await handle(request)
                response = (
                    found
                    if isinstance(found, Response)
                    else await asyncio.to_thread(JSONResponse, found)
                )
            except RequestError as error:
                response = error_response(error)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:  # noqa: BLE001 (clients get a sentence, and the log the traceback)
                _log.exception("a request failed")
                response = error_response(
                    RequestError("internal server error", status=500, code="internal")
                )
            return response

        method = "POST" if body else method
        answers = {"default": {"description": "JSON, or text of /metrics"}}
        operation: dict[str, Any] = {"summary": handle.__doc__, "responses": answers}
        if "{" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if body:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        self._paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
        return Route(path, answer, methods=[method])

    async def complete(self, request: Request) -> Response:
        """Continues texts, as OpenAI."""
        options: dict[str, Any] = {"model": self._model, "names": self._names}
        run = await asyncio.to_thread(CompletionRun, self._engine, request.state.body, **options)
        run.submit(request.state.owner)
        if request.state.body.stream:
            return _Stream(run, self._seconds)
        with self._seconds.time():
            return Response(await run.whole(request), media_type="application/json")

    async def models(self, request: Request) -> dict[str, Any]:
        """Describes the one model, in a list or by itself."""
        name = self._model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "txl_jax"}
        if (given := request.path_params.get("name", name)) != name:
            raise protocol.unknown_model(given, name)
        return model if request.path_params else {"object": "list", "data": [model]}

    async def tokenizer_info(self, _request: Request) -> dict[str, Any]:
        """Describes the vocabulary, in the form of vLLM's server."""
        return protocol.tokenizer_info(self._vocabulary)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Returns the token ids of a text."""
        return await asyncio.to_thread(
            protocol.tokenize, request.state.body, self._vocabulary, self._limits
        )

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Returns the text of token ids."""
        return await asyncio.to_thread(
            protocol.detokenize, request.state.body, self._vocabulary, self._limits
        )

    async def make_session(self, request: Request) -> Response:
        """Makes a session. At the limit, the session that was idle longest is evicted."""
        if await request.is_disconnected():
            # Nobody would learn the name of the session, so nobody would delete it.
            raise ClientDisconnect
        return JSONResponse(
            self._described(self._store.create(request.state.owner)), status_code=201
        )

    async def list_sessions(self, request: Request) -> dict[str, Any]:
        """Lists one's own sessions."""
        return {
            "object": "list",
            "data": [*map(self._described, self._store.of_owner(request.state.owner))],
        }

    async def show_session(self, request: Request) -> dict[str, Any]:
        """Describes a session."""
        return self._described(self._store.get(request.path_params["name"], request.state.owner))

    async def delete_session(self, request: Request) -> dict[str, Any]:
        """Removes a session, even while a request continues it."""
        name = request.path_params["name"]
        self._store.delete(name, request.state.owner)
        return {"id": name, "object": "session", "deleted": True}

    async def metrics(self, _request: Request) -> Response:
        """Returns the figures in the format of Prometheus."""
        return Response(
            generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def health(self, _request: Request) -> Response:
        """Answers 200, or 503 once the engine has failed and only a restart of the server helps."""
        return PlainTextResponse(*("failed\n", 503) if self._engine.failed else ("ok\n", 200))

    async def readiness(self, _request: Request) -> Response:
        """Answers 200 once the programs are compiled, or 503 before that and during shutdown."""
        return PlainTextResponse(*("ready\n", 200) if self._engine.ready else ("not ready\n", 503))

    async def schema(self, _request: Request) -> Response:
        """Returns the routes and the models of their bodies, in OpenAPI."""
        template = "#/components/schemas/{model}"
        _, found = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=template
        )
        head = {"openapi": "3.1.0", "info": {"title": "txl_jax", "version": __version__}}
        return JSONResponse(
            head | {"paths": self._paths, "components": {"schemas": found["$defs"]}}
        )

    async def page(self, _request: Request) -> Response:
        """Returns the page to type into."""
        page = (
            importlib.resources.files("txl_jax.serving")
            .joinpath("page.html")
            .read_text(encoding="utf-8")
        )
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    def collect(self) -> Iterable[Metric]:
        """Yields the figures of rows, tokens and sessions, whenever Prometheus asks for them."""
        engine, store, counters = self._engine, self._store, self._engine.counters
        yield GaugeMetricFamily("txl_rows", "Rows of the compiled step.", engine.step.batch_size)
        yield GaugeMetricFamily("txl_rows_busy", "Rows in use.", engine.num_busy)
        yield GaugeMetricFamily(
            "txl_choices_waiting", "Choices waiting for a row.", engine.num_waiting
        )
        yield GaugeMetricFamily("txl_sessions", "Sessions kept.", store.num_sessions)
        yield GaugeMetricFamily("txl_session_bytes", "Memory of the sessions.", store.num_bytes)
        yield CounterMetricFamily(
            "txl_sessions_evicted", "Sessions evicted for others.", store.num_evicted
        )
        yield GaugeMetricFamily("txl_ready", "Whether requests are taken.", engine.ready)
        yield CounterMetricFamily("txl_tokens_read", "Prompt tokens read.", counters.read)
        yield CounterMetricFamily("txl_tokens_written", "Tokens generated.", counters.written)
        ended = CounterMetricFamily(
            "txl_choices_ended", "Choices finished, by reason.", labels=["reason"]
        )
        for reason, count in list(counters.ended.items()):
            ended.add_metric([reason], count)
        yield ended

    def _owner(self, request: Request) -> str:
        """Returns the digest of the request's key, under which its sessions are kept.

        Raises `RequestError` (401).
        """
        if not self._keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Compared with all of them, in a time that does not depend on where they differ.
        known = [hmac.compare_digest(given, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            message = "the API key is missing or invalid. Send it as Authorization: Bearer KEY."
            raise RequestError(message, status=401, code="invalid_api_key")
        return given

    async def _json(self, request: Request) -> bytes:
        """Returns the body.

        Raises `RequestError` if it is not JSON (415), or is too long (413) or slow (408).
        """
        # A page of another site can send a form or plain text to this address, but no JSON without
        # being asked first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"the content type must be application/json, got {kind[:80]!r}"
            raise RequestError(message, status=415, code="unsupported_media_type")
        limits, body = self._limits, bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        message = f"the body must have at most {limits.body_bytes} bytes"
                        raise RequestError(message, status=413, code="body_too_large")
        except TimeoutError:
            message = f"the body must arrive within {limits.body_seconds:g} s"
            raise RequestError(message, status=408, code="timeout") from None
        return bytes(body)

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
    """Streaming response of a run, which also ends the run.

    The response must end the run because the run's iterator does not even begin if the client has
    already left.
    """

    def __init__(self, run: CompletionRun, seconds: Histogram):
        super().__init__(
            run.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self._run, self._seconds = run, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._seconds.time():
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._run.cancel()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answers for paths and methods that do not exist."""
    method, path = request.method[:10], request.url.path[:80]
    if error.status_code != 405:
        near = difflib.get_close_matches(path, [route.path for route in request.app.routes], n=1)
        advice = f"Did you mean {near[0]}? " if near else ""
        message = (
            f"{path} does not exist. {advice}For completions, use POST /v1/completions, and for "
            "probes /healthz."
        )
        return error_response(RequestError(message, status=error.status_code, code="not_found"))
    matching = (
        route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
    )
    # Of all routes of the path.
    allowed = ", ".join(sorted({name for route in matching for name in route.methods}))
    message = f"{method} is not allowed for {path}, only {allowed}"
    response = error_response(RequestError(message, status=405, code="method_not_allowed"))
    response.headers["Allow"] = allowed
    return response


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
