"""A request on the event loop: its choices in the engine, and their pieces.

The pieces are sent as one response or as a stream.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from txl_jax.errors import RequestError
from txl_jax.serving import protocol
from txl_jax.serving.engine import Engine, Event, Job, Piece, timed_out
from txl_jax.serving.protocol import CompletionBody
from txl_jax.serving.sessions import EMPTY

# Threads that write whole answers. Python writes one at a time, so that more of them would gain
# nothing. They are not the ones that parse bodies, so that other requests do not wait behind large
# answers.
_WRITERS = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="answer")


class CompletionRun:
    """The choices of one request, and their pieces on the event loop.

    Texts and JSON are made in other threads.
    """

    def __init__(
        self, engine: Engine, body: CompletionBody, *, model: str, names: protocol.TokenNames
    ):
        """Does not start anything, unlike `submit`.

        `names` are the vocabulary's. Raises `RequestError`.
        """
        self._engine, self._body, self._events = engine, body, asyncio.Queue[tuple[int, Event]]()
        if body.model not in (None, model):
            raise protocol.unknown_model(body.model, model)
        self._prompts = protocol.prompts_of(body, engine.vocabulary, engine.limits)
        self._writers: list[protocol.ChoiceWriter] = []
        for prompt in self._prompts:
            # Samples share the text of their prompt.
            make = functools.partial(
                protocol.ChoiceWriter,
                prompt=prompt,
                vocabulary=engine.vocabulary,
                logprobs=body.logprobs,
                names=names,
                text=protocol.prompt_text(prompt, engine.vocabulary),
            )
            self._writers += [make(len(self._writers) + sample) for sample in range(prompt.n)]
        self._is_cancelled = False
        name, created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "object": "text_completion", "created": created, "model": model}

    def submit(self, owner: str) -> None:
        """Makes the choices wait for rows.

        An owner's session is in use until they end, unless it is forked.

        Raises `RequestError` if the session is unknown, the text is empty, or too many choices
        wait.
        """
        self._loop = asyncio.get_running_loop()
        self._until = time.monotonic() + self._engine.limits.seconds
        store, name, is_fork = self._engine.store, self._body.session, self._body.fork
        session = None if name is None or is_fork else store.begin(name, owner)
        try:
            state = (
                session.state
                if session
                else EMPTY
                if name is None
                else store.get(name, owner).state
            )
            if not len(state.pending) and not all(len(prompt.tokens) for prompt in self._prompts):
                raise RequestError("prompt must not be empty for an empty session", param="prompt")
            sinks = (
                functools.partial(self._put, number * self._body.n) for number in itertools.count()
            )
            self._jobs = [
                Job(prompt, next(sinks), self._until, session, state) for prompt in self._prompts
            ]
            self._engine.submit(self._jobs)
        except BaseException:
            if session is not None:
                store.release(session)
            raise

    async def whole(self, request: Request) -> bytes:
        """Returns the response when all choices have ended.

        Raises `RequestError` if one failed or nobody waits.
        """
        answering = asyncio.ensure_future(self._answer())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientDisconnect
            return answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
            self.cancel()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields server-sent events. The reader must call `cancel` at the end."""
        try:
            async for index, piece in self._pieces():
                if event := await asyncio.to_thread(self._event, index, piece):
                    yield event
            if self._body.stream_options.include_usage:
                yield _event(self._head | {"choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _event(protocol.error_json(error))

    def cancel(self) -> None:
        """Ends the choices that have not ended, and the writing of the answer."""
        self._is_cancelled = True
        self._engine.cancel(self._jobs)

    def _check(self) -> None:
        """Raises `RequestError` if the request cannot continue.

        The request cannot continue if nobody waits for the answer, its time is over, or the server
        cuts requests off.
        """
        if self._is_cancelled:
            raise RequestError("the client has disconnected", status=499, code="cancelled")
        if time.monotonic() > self._until:
            raise timed_out()
        self._engine.check_serving()

    async def _answer(self) -> bytes:
        """Returns the response when all choices have ended."""
        pieces = await self._collect()
        return await self._loop.run_in_executor(_WRITERS, self._whole, pieces)

    async def _collect(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self._writers]
        async for index, piece in self._pieces():
            found[index].append(piece)
        return found

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all choices as they come, or raises an error."""
        left = len(self._writers)
        while left:
            index, event = await self._events.get()
            if isinstance(event, RequestError):
                raise event
            self._check()
            left -= event.end is not None
            yield index, event

    def _put(self, first: int, sample: int, event: Event) -> None:
        """Takes an event from the engine's thread, for a sample of a prompt.

        `first` is the number of the prompt's first choice.
        """
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._events.put_nowait, (first + sample, event))

    def _whole(self, pieces: list[list[Piece]]) -> bytes:
        """Returns the response. Raises `RequestError` as soon as nobody wants it (`_check`)."""
        choices: list[bytes] = []
        for writer, own in zip(self._writers, pieces, strict=True):
            choices.append(writer.whole(own, self._check))
            own.clear()  # Its logprobs take as much memory as their text.
        head = json.dumps(self._head).removesuffix("}").encode()
        usage = json.dumps(self._usage()).encode()
        return b"".join(
            [head, b', "choices": [', b", ".join(choices), b'], "usage": ', usage, b"}"]
        )

    def _event(self, index: int, piece: Piece) -> bytes:
        """Returns the event of a piece, empty if the piece shows nothing."""
        choice = self._writers[index].json_of([piece])
        shown = choice["text"] or choice["finish_reason"] or choice["logprobs"]
        return _event(self._head | {"choices": [choice]}) if shown else b""

    def _usage(self) -> dict[str, int]:
        """Returns the numbers of tokens: of each prompt once, and of all samples."""
        prompt = sum(len(prompt.tokens) for prompt in self._prompts)
        written = sum(writer.written for writer in self._writers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }


async def _left(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(found: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(found, separators=(',', ':'))}\n\n".encode()
