"""The engine: a thread that owns the device, with texts that join and leave its rows between calls.

A round of the thread puts waiting texts into free rows, reads segments of prompts, and draws up to
K tokens of all other rows in one call. Work per token in Python is little: a row's new tokens are
decoded, searched for stop strings and passed on once per call.

- A prompt is read once, however many texts continue it: the memory after it has a fixed size, and
  is copied into their rows.
- While rows write, segments are read for `_READ_SECONDS` between two calls, and at least one. So a
  long prompt delays a row that writes by no more.
- What fails in one row ends its job. What fails in the call of all rows ends the engine.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.data.vocabulary import TextStream, Vocabulary
from txl_jax.errors import RequestError
from txl_jax.inference.decode import Scores, row_key
from txl_jax.serving.rows import WIDTHS, Rows, Step
from txl_jax.serving.sessions import EMPTY, Session, SessionStore, State

_log = logging.getLogger(__name__)
_READ_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    body_bytes: int = 2 << 20  # Of a request.
    tokens: int = 200_000  # Of a request: its prompts, and what is written (`protocol.prompts_of`).
    new_tokens: int = 4096  # Maximum `max_tokens` of a request.
    choices: int = 128  # Prompts times samples of a request.
    stop_strings: int = 16  # Of a request.
    stop_length: int = 256  # Characters of a stop string.
    waiting: int = 512  # Choices that wait for a row, of all requests; 429 beyond.
    seconds: float = 600  # Time of a request, in which it must be answered.
    body_seconds: float = 30  # Time in which its body must have come.


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A text to read once, and to continue n times."""

    # int32 [T], at least one unless the memory before has one that is not read yet.
    tokens: np.ndarray
    # Tokens to write, or 0 to read and score the prompt only.
    max_tokens: int
    # Samples; their draws differ by their numbers.
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    # Taken modulo 2**32.
    seed: int = 0
    # Strings that end the text, which does not include them.
    stop: tuple[str, ...] = ()
    # Whether tokens come with their logprobs.
    logprobs: bool = False
    # Whether the prompt's tokens do too.
    echo: bool = False


class Piece(NamedTuple):
    """The tokens and the text that one call has added to a sample."""

    # What is certain of the text now.
    text: str
    # int32 [n], the tokens that were read, with `echo`, or written.
    tokens: np.ndarray
    # Of these tokens, or None without logprobs and for a memory's first token, which has none.
    scores: Scores | None
    # Whether the tokens are of the prompt.
    is_prompt: bool = False
    # "stop" or "length" with the last piece, None before.
    end: str | None = None


Event = Piece | RequestError


def timed_out() -> RequestError:
    """Returns the error of a request whose time is over."""
    return RequestError("the request timed out. Request fewer tokens.", status=504, code="timeout")


@dataclasses.dataclass
class Counters:
    """Figures of the engine since its start."""

    # Tokens of prompts.
    read: int = 0
    # Tokens that were passed on.
    written: int = 0
    # By reason.
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(eq=False)
class Job:
    """A prompt and its samples on their way."""

    prompt: Prompt
    # Takes a sample's number and its next piece, or an error, the last of all.
    sink: Callable[[int, Event], None]
    # Moment of `time.monotonic` at which it is ended.
    until: float
    # Takes the memory after the one sample.
    session: Session | None = None
    # The memory before the prompt, and after it once it is read.
    state: State = EMPTY
    cancelled: bool = False
    # Samples that have or had a row.
    begun: int = 0
    is_read: bool = False
    # The prompt's, for samples that wait.
    pieces: list[Piece] = dataclasses.field(default_factory=list)

    @property
    def waiting(self) -> int:
        """Number of samples without a row so far."""
        return self.prompt.n - self.begun


class _Row:
    """A sample in a row."""

    def __init__(self, job: Job, vocabulary: Vocabulary):
        self.job, self.prompt, self.sample = job, job.prompt, job.begun
        tokens = self.prompt.tokens[: 0 if job.is_read else None]
        # Tokens to read, the latest one included.
        self.left = np.concatenate([job.state.pending, tokens])
        # Tokens of the history.
        self.position, self.tokens = job.state.position, job.state.tokens + len(tokens)
        # Tokens written.
        self.number = 0
        self.text = TextStream(vocabulary.decode, self.prompt.stop)
        self.key = row_key(np.uint32(self.prompt.seed % (1 << 32)), self.sample)

    @property
    def reads(self) -> bool:
        """True while there are tokens to read before the next one can be drawn."""
        return len(self.left) > 1

    def put(self, piece: Piece) -> None:
        """Passes a piece on. A prompt's piece is kept for the samples that wait."""
        if piece.is_prompt and self.job.waiting:
            self.job.pieces.append(piece)
        self.job.sink(self.sample, piece)


class Engine:
    """Runs jobs on one device, in the R rows of a `Step`."""

    def __init__(
        self, step: Step, params: Any, vocabulary: Vocabulary, store: SessionStore, limits: Limits
    ):
        """Does not start the thread.

        `store` keeps the sessions' memories, `limits.waiting` limits the queue.
        """
        self.step, self.vocabulary, self.store, self.limits = step, vocabulary, store, limits
        self.counters = Counters()
        self._params = params
        self._rows: dict[int, _Row] = {}  # Those in use, by their numbers.
        self._waiting: collections.deque[Job] = collections.deque()  # Those with samples that wait.
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
        """Makes jobs wait for rows.

        Raises `RequestError` (400, 429, 503) and takes no job if there are too many.
        """
        with self._changed:
            if self._refusal is not None:
                # A new exception each time: one that is raised again collects the traceback of
                # every request.
                raise RequestError(self._refusal, status=503, code="unavailable")
            count, most = (
                sum(job.waiting for job in jobs),
                self.limits.waiting + self.step.batch_size,
            )
            if count > most:
                message = (
                    f"a request must have at most {most} choices (the server's limit), got {count}"
                )
                raise RequestError(message, param="n")
            if self.num_waiting + count > most:
                message = (
                    f"the queue is full ({self.num_waiting} of {self.limits.waiting} choices). "
                    "Try again later."
                )
                raise RequestError(message, status=429, code="overloaded")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Ends jobs whose results nobody wants. Their sessions do not change."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def refuse(self, reason: str) -> None:
        """Rejects new jobs from now on. Jobs that were accepted continue."""
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

    def check_serving(self) -> None:
        """Raises `RequestError` (503) once running requests are cut off."""
        if self._stopping:
            raise RequestError("the server is shutting down", status=503, code="unavailable")

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for a row."""
        with self._changed:
            return sum(job.waiting for job in self._waiting)

    @property
    def num_busy(self) -> int:
        """Number of rows in use."""
        return len(self._rows)

    def _run(self) -> None:
        try:
            self._compile()
            self.ready = self._refusal is None
            while self._wait():
                until = time.monotonic() + _READ_SECONDS
                self._drop_ended()
                self._admit()
                self._read(until)
                self._write()
        except BaseException:  # noqa: BLE001 (whatever it is, clients must get an answer)
            _log.exception("the engine failed")
            self.failed = True
            self.refuse("the server has failed and must be restarted")
        for job in self._jobs():
            self._fail(job, RequestError(str(self._refusal), status=503, code="unavailable"))

    def _compile(self) -> None:
        """Prepares the parameters, and runs every program once."""
        self._weights = self.step.prepare_params(self._params)
        self._params = None  # The prepared ones are copies.
        self._cache = self.step.init_cache(self._weights)
        self._beginning = self.step.empty_row(self._weights)
        self._cache, _, _ = self.step.write(
            self._weights, self._cache, Rows.idle(self.step.batch_size)
        )
        for width in WIDTHS:
            tokens = np.zeros(width + 1, np.int32)
            self._cache, _ = self.step.read(self._weights, self._cache, 0, 0, tokens, scored=False)
        self._cache = self.step.put(
            self._cache, 0, self._beginning or self.step.take(self._cache, 0)
        )

    def _wait(self) -> bool:
        """Waits for work. Returns whether the thread continues."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._rows)
            return not self._stopping

    def _jobs(self) -> set[Job]:
        with self._changed:
            return {*self._waiting, *(row.job for row in self._rows.values())}

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for job in self._jobs():
            if job.cancelled:
                self._fail(
                    job, RequestError("the client has disconnected", status=499, code="cancelled")
                )
            elif now > job.until:
                self._fail(job, timed_out())

    @contextlib.contextmanager
    def _failing_alone(self, job: Job) -> Iterator[None]:
        """Ends a job that raises, unless a call that had taken the cache was lost with it.

        The cache is shared by all rows. If it was lost, the error is raised again.
        """
        try:
            yield
        except Exception:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache)):
                raise
            _log.exception("a request failed")
            self._fail(job, RequestError("internal server error", status=500, code="internal"))

    def _admit(self) -> None:
        """Puts waiting samples into free rows.

        Samples whose prompt is being read wait for its end.
        """
        for number in sorted(set(range(self.step.batch_size)) - self._rows.keys()):
            with self._changed:
                job = next((job for job in self._waiting if job.is_read or not job.begun), None)
            if job is None:
                return
            with self._failing_alone(job):
                self._begin(number, job)

    def _begin(self, number: int, job: Job) -> None:
        """Puts the memory before a job's next sample into a row.

        Also passes on the pieces of the job's prompt that were read.
        """
        row = _Row(job, self.vocabulary)
        with self._changed:
            job.begun += 1
            self._rows[number] = row
            if not job.waiting:
                self._waiting.remove(job)
        if (rings := job.state.rings or self._beginning) is not None:
            self._cache = self.step.put(self._cache, number, rings)
        for piece in job.pieces:
            job.sink(row.sample, piece)
        # Nothing precedes the first token.
        if row.prompt.echo and row.prompt.logprobs and not job.state.tokens:
            row.put(Piece("", row.prompt.tokens[:1], None, is_prompt=True))
        self._share(number, row)
        if not job.waiting:
            job.state, job.pieces = EMPTY, []

    def _read(self, until: float) -> None:
        """Reads a segment for each row that has one to read.

        Rows for which no time was left come first next time.
        """
        reading = {number: row for number, row in self._rows.items() if row.reads}
        are_awaited, taken = len(reading) < len(self._rows), 0.0
        for number, row in reading.items():
            start = time.monotonic()
            if are_awaited and taken and start + taken > until:
                return
            if number in self._rows:  # Not ended by another row of its job.
                self._rows[number] = self._rows.pop(number)
                with self._failing_alone(row.job):
                    self._read_segment(number, row)
                taken = time.monotonic() - start

    def _read_segment(self, number: int, row: _Row) -> None:
        scored = row.prompt.logprobs and row.prompt.echo
        self._cache, scores = self.step.read(
            self._weights, self._cache, number, row.position, row.left, scored=scored
        )
        count = len(scores.nats)
        self.counters.read += count
        tokens, row.left = row.left[1 : count + 1], row.left[count:]
        row.position += count
        if scored:
            row.put(Piece("", tokens, scores, is_prompt=True))
        self._share(number, row)

    def _share(self, number: int, row: _Row) -> None:
        """Keeps the memory after a prompt for the samples that wait, once it is read."""
        job = row.job
        if job.waiting and not job.is_read and not row.reads:
            job.state = State(
                self.step.take(self._cache, number), row.position, row.left, row.tokens
            )
            job.is_read = True

    def _write(self) -> None:
        """Samples up to K tokens of each row that has read its prompt.

        Ends rows that want no more.
        """
        rows, writing = Rows.idle(self.step.batch_size), {}
        for number, row in list(self._rows.items()):
            prompt = row.prompt
            # A slot of a row that reads must not be overwritten.
            rows.position[number] = row.position
            if not row.reads and not prompt.max_tokens:
                with self._failing_alone(row.job):
                    self._end(number, row, Piece("", row.left[:0], None, end="length"))
            elif not row.reads:
                writing[number] = row
                rows.last[number], rows.number[number], rows.key[number] = (
                    row.left[0],
                    row.number,
                    row.key,
                )
                rows.steps[number] = min(self.step.block, prompt.max_tokens - row.number)
                rows.temperature[number], rows.top_p[number] = prompt.temperature, prompt.top_p
                rows.scored[number] = prompt.logprobs
        if not writing:
            return
        self._cache, tokens, scores = self.step.write(self._weights, self._cache, rows)
        for number, row in writing.items():
            count = int(rows.steps[number])
            own = (
                Scores(*(each[number, :count] for each in scores)) if rows.scored[number] else None
            )
            if number in self._rows:  # Not ended by another row of its job.
                with self._failing_alone(row.job):
                    self._pass_on(number, row, tokens[number, :count], own)

    def _pass_on(self, number: int, row: _Row, tokens: np.ndarray, scores: Scores | None) -> None:
        """Passes a row's new tokens on, up to the one that completes a stop string."""
        count = len(tokens)
        if row.prompt.stop:  # Token by token, to know which one completes a stop string.
            pieces: list[str] = []
            while len(pieces) < len(tokens) and not row.text.ended:
                pieces.append(row.text.add(tokens[len(pieces)][None]))
            count, text = len(pieces), "".join(pieces)
        else:
            text = row.text.add(tokens)
        tokens, scores = (
            tokens[:count],
            None if scores is None else Scores(*(each[:count] for each in scores)),
        )
        row.number += count
        row.position += count
        row.left = tokens[-1:]
        self.counters.written += count
        if row.text.ended:
            self._end(number, row, Piece(text, tokens, scores, end="stop"))
        elif row.number == row.prompt.max_tokens:
            self._end(number, row, Piece(text + row.text.finish(), tokens, scores, end="length"))
        else:
            row.put(Piece(text, tokens, scores))

    def _end(self, number: int, row: _Row, last: Piece) -> None:
        """Frees a row, with its memory kept if a session wants it."""
        if row.job.session is not None:
            rings = jax.tree.map(np.array, self.step.take(self._cache, number))
            position = self.step.normal_position(row.position)
            self._release(row.job, State(rings, position, row.left.copy(), row.tokens + row.number))
        del self._rows[number]
        self.counters.ended[str(last.end)] += 1
        row.put(last)

    def _fail(self, job: Job, error: RequestError) -> None:
        """Ends a job with an error. Its session does not change."""
        with self._changed:
            rows = {number: row for number, row in self._rows.items() if row.job is not job}
            self.counters.ended[error.code] += job.waiting + len(self._rows) - len(rows)
            self._rows = rows
            if job in self._waiting:
                self._waiting.remove(job)
        self._release(job)
        with contextlib.suppress(Exception):  # It may be what has failed.
            job.sink(0, error)

    def _release(self, job: Job, state: State | None = None) -> None:
        """Ends the use of a job's session, unless it has ended before."""
        if job.session is not None:
            self.store.release(job.session, state)
            job.session = None
