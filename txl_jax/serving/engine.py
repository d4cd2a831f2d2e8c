"""The engine: a thread that owns the device, with requests that join and leave its rows between calls.

A round of the thread admits waiting choices to free rows, reads one segment for each row that has more of its prompt to
read, and draws up to K tokens of all others in one call. Work per token in Python is little: a row's new tokens are
decoded, searched for stop strings and passed on once per call.
"""

import collections
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from txl_jax.data.vocabulary import TextStream, Vocabulary
from txl_jax.errors import RequestError
from txl_jax.inference.decode import Scores, row_key
from txl_jax.serving.rows import WIDTHS, Rows, Step
from txl_jax.serving.sessions import EMPTY, Session, SessionStore, State


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    body_bytes: int = 8 << 20  # Of a request.
    prompt_tokens: int = 200_000  # Maximum prompt tokens per request, summed over its choices.
    new_tokens: int = 4096  # Maximum `max_tokens` of a request.
    choices: int = 128  # Prompts times samples of a request.
    stop_strings: int = 16  # Of a request.
    stop_length: int = 256  # Characters of a stop string.
    waiting: int = 512  # Choices that wait for a row, of all requests; 429 beyond.
    seconds: float = 600  # Time of a request, in which it must be answered.
    body_seconds: float = 30  # Time in which its body must have come.


@dataclasses.dataclass(frozen=True)
class Choice:
    """One text to read and to continue."""

    prompt: np.ndarray  # int32 [T], at least one token unless a session has one that is not read yet.
    max_tokens: int  # Tokens to write, or 0 to read and score the prompt only.
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0  # Taken modulo 2**32.
    sample: int = 0  # Number of the sample, among those of the same prompt and seed.
    stop: tuple[str, ...] = ()  # Strings that end the text, which does not include them.
    logprobs: bool = False  # Whether tokens come with their logprobs.
    echo: bool = False  # Whether the prompt's tokens do too.


class Piece(NamedTuple):
    """The tokens and the text that one call has added to a choice."""

    text: str  # What is certain of the text now.
    tokens: np.ndarray  # int32 [n], the tokens that were read, with `echo`, or written.
    scores: Scores | None  # Of these tokens, or None without logprobs and for a memory's first token, which has none.
    is_prompt: bool = False  # Whether the tokens are of the prompt.
    end: str | None = None  # "stop" or "length" with the last piece, None before.


Event = Piece | RequestError


@dataclasses.dataclass
class Counters:
    """Figures of the engine since its start."""

    read: int = 0  # Tokens of prompts.
    written: int = 0  # Tokens that were passed on.
    calls: int = 0  # Of the program that writes.
    steps: int = 0  # Of all rows that had something to draw, in these.
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # By reason.


@dataclasses.dataclass(eq=False)
class Job:
    """A choice on its way: waiting, in a row, or ended."""

    choice: Choice
    sink: Callable[[Event], None]  # Takes each piece, from the engine's thread. The last has an `end`, or is an error.
    session: Session | None  # Whose memory it continues, and changes when it ends.
    until: float  # Moment of `time.monotonic` at which it is ended.
    cancelled: bool = False


class _Row:
    """A job in a row."""

    def __init__(self, job: Job, vocabulary: Vocabulary):
        choice = job.choice
        self.job, self.choice = job, choice
        self.before = EMPTY if job.session is None else job.session.state
        self.left = np.concatenate([self.before.pending, choice.prompt])  # Tokens to read, the latest one included.
        self.position = self.before.position
        self.number = 0  # Tokens written.
        self.text = TextStream(vocabulary.decode, choice.stop)
        self.key = row_key(np.uint32(choice.seed % (1 << 32)), choice.sample)

    @property
    def reads(self) -> bool:
        """True while there are tokens to read before the next one can be drawn."""
        return len(self.left) > 1


class Engine:
    """Runs jobs on one device, in the R rows of a `Step`."""

    def __init__(self, step: Step, params: Any, vocabulary: Vocabulary, store: SessionStore, limits: Limits):
        """Begins nothing; `start` does. `store` takes the sessions' memories, `limits.waiting` limits waiting jobs."""
        self.step, self.vocabulary, self.store, self.limits = step, vocabulary, store, limits
        self.counters = Counters()
        self._params = params
        self._rows: dict[int, _Row] = {}  # Those in use, by their numbers.
        self._waiting: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._refusal: str | None = None  # Why new jobs are refused.
        self.ready = False  # Whether the programs are compiled, and jobs are taken.
        self.failed = False  # Whether the thread has ended with an error.

    def start(self) -> None:
        """Starts the thread, which compiles the programs first."""
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Makes jobs wait for rows; raises `RequestError` (400, 429, 503) and takes none if there are too many."""
        with self._changed:
            if self._refusal is not None:
                # A new exception each time: one that is raised again collects the traceback of every request.
                raise RequestError(self._refusal, status=503, code="unavailable")
            most = self.limits.waiting + self.step.batch_size
            if len(jobs) > most:
                message = f"the request has {len(jobs)} choices and this server takes {most} at a time; send fewer"
                raise RequestError(message, param="n")
            if len(self._waiting) + len(jobs) > most:
                message = f"{len(self._waiting)} choices wait and at most {self.limits.waiting} may; try again later"
                raise RequestError(message, status=429, code="overloaded")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Ends jobs whose results nobody wants; their sessions stay as they were."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def refuse(self, reason: str) -> None:
        """Refuses new jobs from now on; those that were taken continue."""
        with self._changed:
            self.ready = False
            self._refusal = reason

    def cut_off(self) -> None:
        """Ends all jobs and the thread, without waiting for it."""
        self.refuse("the server is shutting down")
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """Ends all jobs and the thread, and returns when it has ended."""
        self.cut_off()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a row."""
        return len(self._waiting)

    @property
    def num_busy(self) -> int:
        """Number of rows in use."""
        return len(self._rows)

    def _run(self) -> None:
        try:
            self._compile()
            self.ready = self._refusal is None
            while self._wait():
                self._drop_ended()
                self._admit()
                for number, row in self._rows.items():
                    if row.reads:
                        self._read(number, row)
                self._write()
        except BaseException:  # noqa: BLE001 (whatever it is, clients must get an answer)
            traceback.print_exc()
            self.failed = True
            self.refuse("the server has failed and must be started again")
        with self._changed:
            left = [row.job for row in self._rows.values()] + list(self._waiting)
            self._waiting.clear()
            self._rows.clear()
        for job in left:
            self._finish(job, RequestError(str(self._refusal), status=503, code="unavailable"))

    def _compile(self) -> None:
        """Prepares the parameters, and runs every program once."""
        self._weights = self.step.prepare_params(self._params)
        self._params = None  # The prepared ones are copies.
        self._cache = self.step.init_cache(self._weights)
        self._beginning = self.step.empty_row(self._weights)
        self._cache, _, _ = self.step.write(self._weights, self._cache, Rows.idle(self.step.batch_size))
        for width in WIDTHS:
            tokens = np.zeros(width + 1, np.int32)
            self._cache, _ = self.step.read(self._weights, self._cache, 0, 0, tokens, scored=False)
        if self._beginning is not None:
            self._cache = self.step.put(self._cache, 0, self._beginning)

    def _wait(self) -> bool:
        """Waits for work; returns whether the thread continues."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._rows)
            return not self._stopping

    def _drop_ended(self) -> None:
        """Ends jobs that were cancelled or have no time left."""
        now = time.monotonic()
        with self._changed:
            ended = [job for job in self._waiting if job.cancelled or now > job.until]
            for job in ended:
                self._waiting.remove(job)
            for number, row in list(self._rows.items()):
                if row.job.cancelled or now > row.job.until:
                    ended.append(self._rows.pop(number).job)
        for job in ended:
            if job.cancelled:
                error = RequestError("the client has left", status=499, code="cancelled")
            else:
                error = RequestError("the time for a request is over; ask for less", status=504, code="timeout")
            self._finish(job, error)

    def _admit(self) -> None:
        """Puts waiting jobs into free rows, and passes on a prompt's first token, which nothing precedes."""
        for number in sorted(set(range(self.step.batch_size)) - self._rows.keys()):
            with self._changed:
                if not self._waiting:
                    return
                row = self._rows[number] = _Row(self._waiting.popleft(), self.vocabulary)
            state = row.before.rings or self._beginning
            if state is not None:
                self._cache = self.step.put(self._cache, number, state)
            if row.choice.echo and row.choice.logprobs and not len(row.before.pending):
                row.job.sink(Piece("", row.choice.prompt[:1], None, is_prompt=True))

    def _read(self, number: int, row: _Row) -> None:
        """Reads one segment of a row's prompt."""
        scored = row.choice.logprobs and row.choice.echo
        self._cache, scores = self.step.read(self._weights, self._cache, number, row.position, row.left, scored=scored)
        count = len(scores.nats)
        self.counters.read += count
        tokens, row.left = row.left[1 : count + 1], row.left[count:]
        row.position += count
        if scored:
            row.job.sink(Piece("", tokens, scores, is_prompt=True))

    def _write(self) -> None:
        """Draws up to K tokens of each row that has read its prompt; ends those that want none."""
        rows, writing = Rows.idle(self.step.batch_size), []
        for number, row in list(self._rows.items()):
            choice = row.choice
            rows.position[number] = row.position  # A slot of a row that reads must not be overwritten.
            if not row.reads and not choice.max_tokens:
                self._end(number, row, Piece("", row.left[:0], None, end="length"))
            elif not row.reads:
                writing.append((number, row))
                rows.last[number], rows.number[number], rows.key[number] = row.left[0], row.number, row.key
                rows.steps[number] = min(self.step.block, choice.max_tokens - row.number)
                rows.temperature[number], rows.top_p[number] = choice.temperature, choice.top_p
                rows.scored[number] = choice.logprobs
        if not writing:
            return
        self._cache, tokens, scores = self.step.write(self._weights, self._cache, rows)
        self.counters.calls += 1
        self.counters.steps += int(rows.steps.sum())
        for number, row in writing:
            count = int(rows.steps[number])
            own = Scores(*(each[number, :count] for each in scores)) if rows.scored[number] else None
            self._pass_on(number, row, tokens[number, :count], own)

    def _pass_on(self, number: int, row: _Row, tokens: np.ndarray, scores: Scores | None) -> None:
        """Passes a row's new tokens on, up to the one that completes a stop string."""
        count = len(tokens)
        if row.choice.stop:  # Token by token, to know which one completes a stop string.
            pieces: list[str] = []
            while len(pieces) < len(tokens) and not row.text.ended:
                pieces.append(row.text.add(tokens[len(pieces)][None]))
            count, text = len(pieces), "".join(pieces)
        else:
            text = row.text.add(tokens)
        tokens, scores = tokens[:count], None if scores is None else Scores(*(each[:count] for each in scores))
        row.number += count
        row.position += count
        row.left = tokens[-1:]
        self.counters.written += count
        if row.text.ended:
            self._end(number, row, Piece(text, tokens, scores, end="stop"))
        elif row.number == row.choice.max_tokens:
            self._end(number, row, Piece(text + row.text.finish(), tokens, scores, end="length"))
        else:
            row.job.sink(Piece(text, tokens, scores))

    def _end(self, number: int, row: _Row, last: Piece) -> None:
        """Frees a row, with its memory kept if a session wants it."""
        state = None
        if row.job.session is not None:
            tokens = row.before.tokens + len(row.choice.prompt) + row.number
            position = self.step.normal_position(row.position)
            state = State(self.step.take(self._cache, number), position, row.left.copy(), tokens)
        del self._rows[number]
        self._finish(row.job, last, state)

    def _finish(self, job: Job, last: Event, state: State | None = None) -> None:
        """Passes on a job's last event; its session takes the new state, or stays as it was without one."""
        if job.session is not None:
            self.store.release(job.session, state)
        self.counters.ended[last.code if isinstance(last, RequestError) else str(last.end)] += 1
        job.sink(last)
