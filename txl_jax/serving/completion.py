"""A request on the event loop: its jobs in the engine, and their events as one response or as a stream."""

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from txl_jax.errors import RequestError
from txl_jax.serving import protocol
from txl_jax.serving.engine import Engine, Event, Job, Piece
from txl_jax.serving.protocol import Completion
from txl_jax.serving.sessions import Session


class CompletionRun:
    """The jobs of one request, and their events on the event loop."""

    def __init__(self, engine: Engine, completion: Completion, session: Session | None, *, model: str):
        """Makes the jobs wait for rows; the session is in use by this request until they end.

        Raises `RequestError` if session and prompt are empty, or there are too many jobs.
        """
        self._engine, self._completion, self._events = engine, completion, asyncio.Queue[tuple[int, Event]]()
        self._loop = asyncio.get_running_loop()
        name, created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "object": "text_completion", "created": created, "model": model}
        until, choices = time.monotonic() + engine.limits.seconds, completion.choices
        self._writers = [protocol.ChoiceWriter(index, completion, engine.vocabulary) for index in range(len(choices))]
        sinks = [functools.partial(self._put, index) for index in range(len(choices))]
        self._jobs = [Job(choice, sink, session, until) for choice, sink in zip(choices, sinks, strict=True)]
        try:
            if session is not None and not len(session.state.pending) and not len(choices[0].prompt):
                raise RequestError("the session is empty and so is the prompt; give a prompt", param="prompt")
            engine.submit(self._jobs)
        except RequestError:
            if session is not None:
                engine.store.release(session)
            raise

    async def whole(self, request: Request) -> dict[str, Any]:
        """Returns the response when all choices have ended; raises `RequestError` if one could not, or nobody waits."""
        collecting, leaving = asyncio.ensure_future(self._collect()), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            pieces = collecting.result()
        finally:
            collecting.cancel()
            leaving.cancel()
            self.cancel()
        choices = [writer.json_of(own) for writer, own in zip(self._writers, pieces, strict=True)]
        return self._head | {"choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Yields server-sent events; whoever reads them calls `cancel` at the end."""
        try:
            async for index, piece in self._pieces():
                choice = self._writers[index].json_of([piece])
                if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                    yield _event(self._head | {"choices": [choice]})
            if self._completion.include_usage:
                yield _event(self._head | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(protocol.error_json(error))

    def cancel(self) -> None:
        """Ends the jobs that have not ended."""
        self._engine.cancel(self._jobs)

    async def _collect(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self._jobs]
        async for index, piece in self._pieces():
            found[index].append(piece)
        return found

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all choices as they come; raises the first error."""
        left = len(self._jobs)
        while left:
            index, event = await self._events.get()
            if isinstance(event, RequestError):
                raise event
            left -= event.end is not None
            yield index, event

    def _put(self, index: int, event: Event) -> None:
        """Takes an event from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _usage(self) -> dict[str, int]:
        """Returns the numbers of tokens: of each prompt once, and of all samples."""
        prompt = sum(len(choice.prompt) for choice in self._completion.choices if choice.sample == 0)
        written = sum(writer.written for writer in self._writers)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


async def _left(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(found: dict[str, Any]) -> str:
    return f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
