"""An engine over the tiny model, and requests to it without HTTP."""

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from support import tiny_model
from txl_jax.errors import RequestError
from txl_jax.inference.decode import Scores
from txl_jax.serving.engine import Completion, Engine, Event, Prompt, ServerLimits
from txl_jax.serving.rows import Step
from txl_jax.serving.sessions import EMPTY, Session, SessionStore
from txl_jax.trained_model import LanguageModel

ROWS = 4
BLOCK = 5
SECONDS = 300.0  # Longer is a hang.


def make_store(**changes: Any) -> SessionStore:
    return SessionStore(**{"limit": 8, "limit_per_owner": 8, "seconds": 1000.0, **changes})


@functools.cache
def step_of(model: LanguageModel) -> Step:
    """The compiled functions of a model, for 4 rows that write 5 tokens per call.

    Engines share them.
    """
    return Step(model.components, batch_size=ROWS, block=BLOCK)


@contextlib.contextmanager
def engine(model=None, *, store=None, limits=None, start=True) -> Iterator[Engine]:
    """An engine of the tiny model, with 4 rows that write 5 tokens per call.

    It runs unless `start` is false.
    """
    model = model or tiny_model.make()
    made = Engine(
        step_of(model),
        model.params,
        model.vocabulary,
        store or make_store(),
        limits or ServerLimits(),
    )
    if start:
        made.start()
    yield made
    made.stop()


class Result:
    """The events of a completion, for a test that waits for them."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self.sink = self._events.put
        self.pieces: list[Any] = []

    def next(self) -> Event:
        """The next event, which is kept unless it is an error."""
        event = self._events.get(timeout=SECONDS)
        if not isinstance(event, RequestError):
            self.pieces.append(event)
        return event

    def wait(self) -> "Result":
        """Returns itself when the completion has ended, or raises the error that ended it."""
        while not self.pieces or self.pieces[-1].end is None:
            event = self.next()
            if isinstance(event, RequestError):
                raise event
        return self

    text = property(lambda self: "".join(piece.text for piece in self.pieces))
    end = property(lambda self: self.pieces[-1].end)

    def tokens(self, *, prompt: bool = False) -> list[int]:
        """The tokens that were written, or the prompt's tokens that came back."""
        tokens = []
        for piece in self.pieces:
            if piece.is_prompt is prompt:
                tokens += map(int, piece.tokens)
        return tokens

    def scores(self, *, prompt: bool = False) -> Scores:
        """The scores of `tokens`. A prompt's first token, which follows nothing, has none."""
        parts = []
        for piece in self.pieces:
            if piece.is_prompt is prompt and piece.scores:
                parts.append(piece.scores)
        return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def submit_all(
    made: Engine, prompt: Prompt, session: Session | None = None, *, seconds=SECONDS, start=True
):
    """The completion of a prompt, and the result of each sample to wait for."""
    results = [Result() for _ in range(prompt.n)]

    def sink(sample, event):
        results[sample].sink(event)

    state = session.state if session else EMPTY
    completion = Completion(prompt, sink, time.monotonic() + seconds, session, state)
    if start:
        made.submit([completion])
    return completion, results


def submit(
    made: Engine, prompt: Prompt, session: Session | None = None, **options: Any
) -> tuple[Completion, Result]:
    completion, [result] = submit_all(made, prompt, session, **options)
    return completion, result


def run(made: Engine, prompt: Prompt, session: Session | None = None) -> Result:
    return submit(made, prompt, session)[1].wait()


def refused(status: int, function: Callable, *arguments: Any) -> RequestError:
    """Calls a function, which must raise an error with this status, and returns the error."""
    with pytest.raises(RequestError) as raised:
        function(*arguments)
    assert raised.value.status == status
    return raised.value


def ids(length: int, *, seed: int = 3) -> np.ndarray:
    return tiny_model.documents([length], seed=seed)[0].astype(np.int32)


@contextlib.contextmanager
def gate(owner, name, *, call=1):
    """Makes a function wait at its n-th call.

    Yields two events: the call has begun, and it may continue.
    """
    function = getattr(owner, name)
    reached = threading.Event()
    through = threading.Event()
    calls = itertools.count(1)

    def wait_and_call(*arguments, **named):
        if next(calls) == call:
            reached.set()
            through.wait(SECONDS)
        return function(*arguments, **named)

    with mock.patch.object(owner, name, wait_and_call):
        try:
            yield reached, through
        finally:
            through.set()
