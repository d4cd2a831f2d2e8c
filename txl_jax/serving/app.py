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
# Content security policy of the page. It must not be in a frame of another site, where users would
# not know which server gets their text.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
# Limits of the bars in the histogram of the completions' times.
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_BODIES = (protocol.Body, protocol.CompletionBody, protocol.TokenizeBody, protocol.DetokenizeBody)


def make_app(
    engine: Engine, model: str, *, hosts: Sequence[str] = LOOPBACK, keys: Sequence[str] = ()
) -> Starlette:
    """Returns the application, which starts the engine and stops it at its end.

    `model` is its name for clients. `hosts` are the names that clients may use for this server, or
    empty to allow any. `keys` are the API keys, or empty to require none.
    """
    server = _Server(engine, model, keys)
    completions = [
        server.route("/v1/completions", server.complete, protocol.CompletionBody),
        server.route("/v1/models", server.models),
        server.route("/v1/models/{name:path}", server.models),
    ]
    sessions = [
        server.route("/v1/sessions", server.make_session, protocol.Body),
        server.route("/v1/sessions", server.list_sessions),
        server.route("/v1/sessions/{name}", server.show_session),
        server.route("/v1/sessions/{name}", server.delete_session, method="DELETE"),
    ]
    tokens = [
        server.route("/tokenizer_info", server.tokenizer_info),
        server.route("/tokenize", server.tokenize, protocol.TokenizeBody),
        server.route("/detokenize", server.detokenize, protocol.DetokenizeBody),
    ]
    operation = [
        server.route("/metrics", server.metrics),
        # No key is needed for these.
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
    app = Starlette(
        routes=[*completions, *sessions, *tokens, *operation],
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _http_error},
        middleware=middleware,
    )
    # For answers that are given without the application.
    app.state.count = server.count
    return app


class _Server(Collector):
    """The functions of the routes, and the source of the figures for Prometheus."""

    def __init__(self, engine: Engine, model: str, keys: Sequence[str]):
        self._engine = engine
        self._store = engine.store
        self._model = model
        self._vocabulary = engine.vocabulary
        self._limits = engine.limits
        self._names = protocol.TokenNames(engine.vocabulary)
        # Digests of the API keys. Empty if no key is needed.
        self._keys = [_digest(key) for key in keys]
        # The paths of the schema, and the operations of each.
        self._paths: dict[str, Any] = {}

        self._registry = CollectorRegistry()
        # `collect` is called for each answer of /metrics.
        self._registry.register(self)
        self._requests = Counter(
            "txl_requests", "Requests, by status.", ["status"], registry=self._registry
        )
        self._seconds = Histogram(
            "txl_request_seconds",
            "Time of completions.",
            buckets=_SECONDS,
            registry=self._registry,
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
                result = await handle(request)
                if isinstance(result, Response):
                    return result
                return await asyncio.to_thread(JSONResponse, result)
            except RequestError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:  # noqa: BLE001 (clients get a sentence, and the log the traceback)
                _log.exception("a request failed")
                return error_response(
                    RequestError("internal server error", status=500, code="internal")
                )

        method = "POST" if body else method
        self._describe_route(path, method, handle.__doc__, body)
        return Route(path, answer, methods=[method])

    def _describe_route(
        self, path: str, method: str, summary: str | None, body: type[protocol.Body] | None
    ) -> None:
        """Adds a route to the schema."""
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"default": {"description": "JSON, or text of /metrics"}},
        }
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
        operations = self._paths.setdefault(path.replace(":path", ""), {})
        operations[method.lower()] = operation

    async def complete(self, request: Request) -> Response:
        """Continues texts, with OpenAI's protocol."""
        # Prompts are encoded in another thread, so that other requests do not wait.
        run = await asyncio.to_thread(
            CompletionRun,
            self._engine,
            request.state.body,
            model=self._model,
            names=self._names,
        )
        run.submit(request.state.owner)
        if request.state.body.stream:
            return _Stream(run, self._seconds)
        with self._seconds.time():
            return Response(await run.whole(request), media_type="application/json")

    async def models(self, request: Request) -> dict[str, Any]:
        """Describes the model, in a list or by itself."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "txl_jax"}
        if "name" not in request.path_params:
            return {"object": "list", "data": [model]}
        name = request.path_params["name"]
        if name != self._model:
            raise protocol.unknown_model(name, self._model)
        return model

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
        """Creates a session. At the limit, the session that was idle longest is evicted."""
        if await request.is_disconnected():
            # Nobody would learn the name of the session, so nobody would delete it.
            raise ClientDisconnect
        session = self._store.create(request.state.owner)
        return JSONResponse(self._described(session), status_code=201)

    async def list_sessions(self, request: Request) -> dict[str, Any]:
        """Lists the sessions of the request's API key."""
        sessions = self._store.of_owner(request.state.owner)
        return {"object": "list", "data": [self._described(session) for session in sessions]}

    async def show_session(self, request: Request) -> dict[str, Any]:
        """Describes a session."""
        session = self._store.get(request.path_params["name"], request.state.owner)
        return self._described(session)

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
        if self._engine.failed:
            return PlainTextResponse("failed\n", status_code=503)
        return PlainTextResponse("ok\n")

    async def readiness(self, _request: Request) -> Response:
        """Answers 200 once all functions are compiled, or 503 before that and during shutdown."""
        if self._engine.ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", status_code=503)

    async def schema(self, _request: Request) -> Response:
        """Returns the routes and the models of their bodies, in OpenAPI."""
        _, schemas = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
        )
        return JSONResponse(
            {
                "openapi": "3.1.0",
                "info": {"title": "txl_jax", "version": __version__},
                "paths": self._paths,
                "components": {"schemas": schemas["$defs"]},
            }
        )

    async def page(self, _request: Request) -> Response:
        """Returns the page for trying the model in a browser."""
        folder = importlib.resources.files("txl_jax.serving")
        page = folder.joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    def collect(self) -> Iterable[Metric]:
        """Yields the figures of rows, tokens and sessions, whenever Prometheus asks for them."""
        engine = self._engine
        store = self._store
        counters = engine.counters
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
        yield GaugeMetricFamily("txl_ready", "Whether requests are accepted.", engine.ready)
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
        digest = _digest(key.strip())
        # Compared with all of them, in a time that does not depend on where they differ.
        matches = [hmac.compare_digest(digest, valid) for valid in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestError(
                "the API key is missing or invalid. Send it as Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )
        return digest

    async def _json(self, request: Request) -> bytes:
        """Returns the body.

        Raises `RequestError` if it is not JSON (415), or is too long (413) or slow (408).
        """
        # A page of another site can send a form or plain text to this address, but no JSON without
        # being asked first.
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RequestError(
                f"the content type must be application/json, got {content_type[:80]!r}",
                status=415,
                code="unsupported_media_type",
            )
        limits = self._limits
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise RequestError(
                            f"the body must have at most {limits.body_bytes} bytes",
                            status=413,
                            code="body_too_large",
                        )
        except TimeoutError:
            raise RequestError(
                f"the body must arrive within {limits.body_seconds:g} s", status=408, code="timeout"
            ) from None
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
        self._run = run
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._seconds.time():
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._run.cancel()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answers for paths and methods that do not exist."""
    if error.status_code == 405:
        return _method_not_allowed(request)
    path = request.url.path[:80]
    similar = difflib.get_close_matches(path, [route.path for route in request.app.routes], n=1)
    advice = f"Did you mean {similar[0]}? " if similar else ""
    message = (
        f"{path} does not exist. {advice}For completions, use POST /v1/completions, and for "
        "probes /healthz."
    )
    return error_response(RequestError(message, status=error.status_code, code="not_found"))


def _method_not_allowed(request: Request) -> Response:
    # All routes of the path, each with its own methods.
    methods: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= route.methods
    allowed = ", ".join(sorted(methods))
    message = f"{request.method[:10]} is not allowed for {request.url.path[:80]}, only {allowed}"
    response = error_response(RequestError(message, status=405, code="method_not_allowed"))
    response.headers["Allow"] = allowed
    return response


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
