"""A request on the event loop: its choices in the engine, and their pieces.

The pieces are sent as one response or as a stream.
"""

import asyncio
import concurrent.futures
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
from txl_jax.serving.engine import Completion, Engine, Event, Piece, timed_out
from txl_jax.serving.protocol import ChoiceWriter, CompletionBody
from txl_jax.serving.sessions import EMPTY, Session, State

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
        self._engine = engine
        self._body = body
        # Numbers of choices, and the engine's events about them.
        self._events = asyncio.Queue[tuple[int, Event]]()
        if body.model not in (None, model):
            raise protocol.unknown_model(body.model, model)

        self._prompts = protocol.prompts_of(body, engine.vocabulary, engine.limits)
        # A writer for each choice: the samples of the first prompt, then those of the second.
        self._writers: list[ChoiceWriter] = []
        for prompt in self._prompts:
            # Samples share the text of their prompt.
            text = protocol.prompt_text(prompt, engine.vocabulary)
            for _ in range(prompt.n):
                writer = ChoiceWriter(
                    index=len(self._writers),
                    prompt=prompt,
                    vocabulary=engine.vocabulary,
                    logprobs=body.logprobs,
                    names=names,
                    text=text,
                )
                self._writers.append(writer)
        self._is_cancelled = False
        # The beginning of each object that is sent.
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def submit(self, owner: str) -> None:
        """Makes the choices wait for rows.

        An owner's session is in use until they end, unless it is forked.

        Raises `RequestError` if the session is unknown, the text is empty, or too many choices
        wait.
        """
        self._loop = asyncio.get_running_loop()
        self._until = time.monotonic() + self._engine.limits.seconds
        session = None
        if self._body.session is not None and not self._body.fork:
            session = self._engine.store.begin(self._body.session, owner)
        try:
            self._submit(self._state_before(session, owner), session)
        except BaseException:
            if session is not None:
                self._engine.store.release(session)
            raise

    def _state_before(self, session: Session | None, owner: str) -> State:
        """Returns the memory that the prompts follow."""
        if session is not None:
            return session.state
        # A fork reads the memory, and leaves the session to others.
        if self._body.session is not None:
            return self._engine.store.get(self._body.session, owner).state
        return EMPTY

    def _submit(self, state: State, session: Session | None) -> None:
        has_empty_prompt = any(len(prompt.tokens) == 0 for prompt in self._prompts)
        if len(state.pending) == 0 and has_empty_prompt:
            raise RequestError("prompt must not be empty for an empty session", param="prompt")
        self._completions = []
        for number, prompt in enumerate(self._prompts):
            sink = functools.partial(self._put, number * self._body.n)
            completion = Completion(prompt, sink, self._until, session, state)
            self._completions.append(completion)
        self._engine.submit(self._completions)

    async def whole(self, request: Request) -> bytes:
        """Returns the response when all choices have ended.

        Raises `RequestError` if one failed or nobody waits.
        """
        answering = asyncio.ensure_future(self._answer())
        leaving = asyncio.ensure_future(_wait_until_left(request))
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
                event = await asyncio.to_thread(self._event_of, index, piece)
                if event:
                    yield event
            if self._body.stream_options.include_usage:
                yield _server_sent_event(self._head | {"choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _server_sent_event(protocol.error_json(error))

    def cancel(self) -> None:
        """Ends the choices that have not ended, and the writing of the answer."""
        self._is_cancelled = True
        self._engine.cancel(self._completions)

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
        pieces_of_choices: list[list[Piece]] = [[] for _ in self._writers]
        async for index, piece in self._pieces():
            pieces_of_choices[index].append(piece)
        return await self._loop.run_in_executor(_WRITERS, self._whole, pieces_of_choices)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields the pieces of all choices as they come, or raises an error.

        With each piece comes the number of its choice.
        """
        num_left = len(self._writers)
        while num_left:
            index, event = await self._events.get()
            if isinstance(event, RequestError):
                raise event
            self._check()
            if event.end is not None:
                num_left -= 1
            yield index, event

    def _put(self, first: int, sample: int, event: Event) -> None:
        """Takes an event from the engine's thread, for a sample of a prompt.

        `first` is the number of the prompt's first choice.
        """
        # If the loop is closed, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (first + sample, event))

    def _whole(self, pieces_of_choices: list[list[Piece]]) -> bytes:
        """Returns the response. Raises `RequestError` as soon as nobody wants it (`_check`)."""
        choices: list[bytes] = []
        for writer, pieces in zip(self._writers, pieces_of_choices, strict=True):
            choices.append(writer.whole(pieces, self._check))
            # Their logprobs take as much memory as their text.
            pieces.clear()
        head = json.dumps(self._head).removesuffix("}").encode()
        usage = json.dumps(self._usage()).encode()
        parts = [head, b', "choices": [', b", ".join(choices), b'], "usage": ', usage, b"}"]
        return b"".join(parts)

    def _event_of(self, index: int, piece: Piece) -> bytes:
        """Returns the event of a piece, empty if the piece shows nothing."""
        choice = self._writers[index].json_of([piece])
        if not (choice["text"] or choice["finish_reason"] or choice["logprobs"]):
            return b""
        return _server_sent_event(self._head | {"choices": [choice]})

    def _usage(self) -> dict[str, int]:
        """Returns the numbers of tokens: of each prompt once, and of all samples."""
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        completion_tokens = sum(writer.written for writer in self._writers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


async def _wait_until_left(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _server_sent_event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
