"""A request on the event loop: its jobs in the engine, and their events as one response or as a stream."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from txl_jax.serving import protocol
from txl_jax.serving.engine import Engine, Job
from txl_jax.serving.requests import Completion, Event, Piece, RequestError
from txl_jax.serving.sessions import Session


class CompletionRun:
    """The jobs of one request, and their events on the event loop."""

    def __init__(self, engine: Engine, completion: Completion, session: Session | None, *, model: str, seconds: float):
        """Takes the session, and makes the jobs wait for rows.

        Args:
          engine: runs them.
          completion: the request.
          session: in use by this request, until it ends.
          model: its name for clients.
          seconds: time of the request.

        Raises:
          RequestError: an empty session and an empty prompt, or too many jobs.
        """
        self._engine, self._completion, self._model = engine, completion, model
        self._name, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        until = time.monotonic() + seconds
        self._jobs = [
            Job(choice, self._sink(index), session=session, until=until)
            for index, choice in enumerate(completion.choices)
        ]
        self._writers = [
            protocol.ChoiceWriter(index, choice, completion, engine.vocabulary)
            for index, choice in enumerate(completion.choices)
        ]
        try:
            if session is not None and session.state.pending is None and not len(completion.choices[0].prompt):
                raise RequestError("the session is empty and so is the prompt; give a prompt", param="prompt")
            engine.submit(self._jobs)
        except RequestError:
            if session is not None:
                engine.store.release(session)
            raise

    async def whole(self, request: Request) -> dict[str, Any]:
        """Returns the response when all choices have ended; raises `RequestError` if one could not, or nobody waits."""
        pieces: list[list[Piece]] = [[] for _ in self._jobs]
        collecting = asyncio.ensure_future(self._collect(pieces))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            collecting.result()
        finally:
            collecting.cancel()
            leaving.cancel()
            self.cancel()
        choices = [writer.json_of(own) for writer, own in zip(self._writers, pieces, strict=True)]
        return self._envelope(choices) | {"usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Yields server-sent events; whoever reads them calls `cancel` at the end."""
        try:
            async for index, piece in self._pieces():
                if piece.text or piece.end or self._completion.logprobs is not None or piece.is_prompt:
                    yield _event(self._envelope([self._writers[index].json_of([piece])]))
                else:
                    self._writers[index].count(piece)
            if self._completion.include_usage:
                yield _event(self._envelope([]) | {"usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(protocol.error_json(error))

    def cancel(self) -> None:
        """Ends the jobs that have not ended."""
        self._engine.cancel(self._jobs)

    async def _collect(self, pieces: list[list[Piece]]) -> None:
        async for index, piece in self._pieces():
            pieces[index].append(piece)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all choices as they come; raises the first error."""
        left = len(self._jobs)
        while left:
            index, event = await self._events.get()
            if isinstance(event, RequestError):
                raise event
            left -= event.end is not None
            yield index, event

    def _sink(self, index: int) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return sink

    def _usage(self) -> dict[str, int]:
        return protocol.usage(self._completion, sum(writer.written for writer in self._writers))

    def _envelope(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = {"id": self._name, "object": "text_completion", "created": self._created}
        return found | {"model": self._model, "choices": list(choices)}


async def _left(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(found: dict[str, Any]) -> str:
    return f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
