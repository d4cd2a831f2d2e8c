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
from typing import Any

import numpy as np

from txl_jax.data.vocabulary import TextStream, Vocabulary
from txl_jax.inference.cache import KVCache
from txl_jax.inference.decode import Scores, row_key
from txl_jax.serving.requests import Choice, Event, Limits, Piece, RequestError
from txl_jax.serving.rows import WIDTHS, Rows, Step
from txl_jax.serving.sessions import EMPTY, Session, SessionStore, State


@dataclasses.dataclass
class Counters:
    """Figures of the engine since its start."""

    read: int = 0  # Tokens of prompts.
    written: int = 0  # Tokens that were passed on.
    calls: int = 0  # Of the program that writes.
    steps: int = 0  # Of all rows that had something to draw, in these.
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # By reason.


class Job:
    """A choice on its way: waiting, in a row, or ended. Events come from the engine's thread."""

    def __init__(self, choice: Choice, sink: Callable[[Event], None], *, session: Session | None, until: float):
        """Begins to wait.

        Args:
          choice: the request.
          sink: is called with each piece; the last one has an `end`, or it is a `RequestError`.
          session: whose memory it goes on with, and changes when it ends.
          until: moment of `time.monotonic` at which it is ended.
        """
        self.choice, self.sink, self.session, self.until = choice, sink, session, until
        self.cancelled = False


_NOTHING_MORE = Piece("", np.zeros(0, np.int32), None, end="length")


class _Row:
    """A job in a row."""

    def __init__(self, job: Job, vocabulary: Vocabulary):
        self.job = job
        state = EMPTY if job.session is None else job.session.state
        pending = np.zeros(0, np.int32) if state.pending is None else np.array([state.pending], np.int32)
        self.before = state
        self.left = np.concatenate([pending, job.choice.prompt])  # Tokens to read, the newest one included.
        self.position = state.position
        self.number = 0  # Tokens written.
        self.text = TextStream(vocabulary.decode, job.choice.stop)
        self.key = row_key(job.choice.sampling.seed_bits, job.choice.sampling.sample)
        # The first token of a memory follows nothing and has no score.
        self.unscored = len(pending) == 0 and len(job.choice.prompt) > 0

    @property
    def reads(self) -> bool:
        """True while there are tokens to read before the next one can be drawn."""
        return len(self.left) > 1


class Engine:
    """Rows of one model, and the thread that fills them."""

    def __init__(
        self, step: Step, params: Any, vocabulary: Vocabulary, store: SessionStore, limits: Limits | None = None
    ):
        """Begins nothing; `start` does.

        Args:
          step: the programs.
          params: the model's parameters.
          vocabulary: decodes tokens.
          store: takes the memories of sessions.
          limits: of jobs that wait; None: the usual ones.
        """
        self.step, self.vocabulary, self.store = step, vocabulary, store
        self.limits = limits or Limits()
        self.counters = Counters()
        self._params = params
        self._rows: list[_Row | None] = [None] * step.batch_size
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
                raise _unavailable(self._refusal)
            most = self.limits.waiting + len(self._rows)
            if len(jobs) > most:
                raise RequestError(
                    f"the request has {len(jobs)} choices and this server takes {most} at a time; send fewer", param="n"
                )
            if len(self._waiting) + len(jobs) > most:
                raise RequestError(
                    f"{len(self._waiting)} choices are waiting and at most {self.limits.waiting} may; try again later",
                    status=429,
                    code="overloaded",
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Ends jobs whose results nobody wants; their sessions stay as they were."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def refuse(self, reason: str) -> None:
        """Refuses new jobs from now on; those that were taken go on."""
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
        return sum(row is not None for row in self._rows)

    def _run(self) -> None:
        try:
            self._weights = self.step.prepare_params(self._params)
            self._params = None  # The prepared ones are copies.
            self._cache: KVCache = self.step.init_cache(self._weights)
            self._beginning = self.step.empty_row(self._weights)
            self._compile()
            self.ready = self._refusal is None
            while self._wait():
                self._drop_ended()
                self._admit()
                for number, row in enumerate(self._rows):
                    if row is not None and row.reads:
                        self._guarded(number, row, self._read)
                self._write()
        except BaseException:  # noqa: BLE001 (whatever it is, clients must get an answer)
            traceback.print_exc()
            self.failed = True
            self.refuse("the server has failed and must be started again")
        with self._changed:
            left = [row.job for row in self._rows if row is not None] + list(self._waiting)
            self._waiting.clear()
            self._rows = [None] * len(self._rows)
        for job in left:
            self._fail(job, _unavailable(self._refusal or "the server is shutting down"))

    def _compile(self) -> None:
        """Runs every program once."""
        idle = Rows.idle(self.step.batch_size)
        self._cache, _, _ = self.step.write(self._weights, self._cache, idle)
        for width in WIDTHS:
            tokens = np.zeros(width + 1, np.int32)
            self._cache, _ = self.step.read(self._weights, self._cache, 0, 0, tokens, scored=False)
        if self._beginning is not None:
            self._cache = self.step.put(self._cache, 0, self._beginning)

    def _wait(self) -> bool:
        """Waits for work; returns whether the thread goes on."""
        with self._changed:
            while not self._stopping and not self._waiting and not self.num_busy:
                self._changed.wait()
            return not self._stopping

    def _drop_ended(self) -> None:
        """Removes jobs that were cancelled or have no time left."""
        now = time.monotonic()
        with self._changed:
            ended = [job for job in self._waiting if job.cancelled or now > job.until]
            for job in ended:
                self._waiting.remove(job)
            for number, row in enumerate(self._rows):
                if row is not None and (row.job.cancelled or now > row.job.until):
                    ended.append(row.job)
                    self._rows[number] = None
        for job in ended:
            if job.cancelled:
                self._fail(job, RequestError("the client has left", status=499, code="cancelled"))
            else:
                self._fail(
                    job, RequestError("the time for a request is over; ask for less", status=504, code="timeout")
                )

    def _admit(self) -> None:
        """Puts waiting jobs into free rows."""
        for number, row in enumerate(self._rows):
            if row is None:
                with self._changed:
                    if not self._waiting:
                        return
                    job = self._waiting.popleft()
                    taken = self._rows[number] = _Row(job, self.vocabulary)
                state = taken.before.rings or self._beginning
                if state is not None:
                    self._cache = self.step.put(self._cache, number, state)
                self._guarded(number, taken, self._begin)

    def _guarded(self, number: int, row: _Row, do: Callable[[int, _Row], None]) -> None:
        """Runs a part of one row's work; an error of its own ends this row alone."""
        try:
            do(number, row)
        except RequestError as error:
            self._rows[number] = None
            self._fail(row.job, error)

    def _begin(self, number: int, row: _Row) -> None:
        """Passes on the prompt's first token, which nothing precedes, and ends a job that reads or writes nothing."""
        choice = row.job.choice
        if choice.echo and choice.logprobs and row.unscored:
            row.job.sink(Piece("", choice.prompt[:1], None, is_prompt=True))
        if not row.reads and not choice.max_tokens:
            self._end(number, row, _NOTHING_MORE)

    def _read(self, number: int, row: _Row) -> None:
        """Reads one segment of a row's prompt."""
        choice = row.job.choice
        scored = choice.logprobs and choice.echo
        self._cache, scores = self.step.read(self._weights, self._cache, number, row.position, row.left, scored=scored)
        count = len(scores.nats)
        self.counters.read += count
        tokens, row.left = row.left[1 : count + 1], row.left[count:]
        row.position += count
        if scored:
            row.job.sink(Piece("", tokens, scores, is_prompt=True))
        if not row.reads and not choice.max_tokens:
            self._end(number, row, _NOTHING_MORE)

    def _write(self) -> None:
        """Draws up to K tokens of each row that has read its prompt."""
        rows = Rows.idle(self.step.batch_size)
        writing = [(number, row) for number, row in enumerate(self._rows) if row is not None and not row.reads]
        if not writing:
            return
        for number, row in enumerate(self._rows):
            if row is not None:
                rows.position[number] = row.position  # A slot of a row that reads must not be overwritten.
        for number, row in writing:
            choice, sampling = row.job.choice, row.job.choice.sampling
            rows.last[number] = row.left[0]
            rows.steps[number] = min(self.step.block, choice.max_tokens - row.number)
            rows.number[number] = row.number
            rows.key[number] = row.key
            rows.temperature[number], rows.top_p[number] = sampling.temperature, sampling.top_p
            rows.scored[number] = choice.logprobs
        self._cache, tokens, scores = self.step.write(self._weights, self._cache, rows)
        self.counters.calls += 1
        self.counters.steps += int(rows.steps.sum())
        for number, row in writing:
            count = int(rows.steps[number])
            own = Scores(*(each[number, :count] for each in scores)) if rows.scored[number] else None
            self._pass_on(number, row, tokens[number, :count], own)

    def _pass_on(self, number: int, row: _Row, tokens: np.ndarray, scores: Scores | None) -> None:
        """Passes a row's new tokens on, up to the one that completes a stop string."""
        choice, count = row.job.choice, len(tokens)
        if choice.stop:  # Token by token, to know which one completes a stop string.
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
        elif row.number == choice.max_tokens:
            self._end(number, row, Piece(text + row.text.finish(), tokens, scores, end="length"))
        else:
            row.job.sink(Piece(text, tokens, scores))

    def _end(self, number: int, row: _Row, last: Piece) -> None:
        """Frees a row, with its memory kept if a session wants it."""
        job = row.job
        if job.session is not None:
            tokens = row.before.tokens + len(job.choice.prompt) + row.number
            rings = self.step.take(self._cache, number)
            position = self.step.normal_position(row.position)
            self.store.commit(job.session, State(rings, position, int(row.left[0]), tokens))
            job.session = None
        self._rows[number] = None
        self.counters.ended[str(last.end)] += 1
        job.sink(last)

    def _fail(self, job: Job, error: RequestError) -> None:
        """Ends a job with an error; its session stays as it was."""
        if job.session is not None:
            self.store.release(job.session)
            job.session = None
        self.counters.ended[error.code] += 1
        job.sink(error)


def _unavailable(reason: str) -> RequestError:
    return RequestError(reason, status=503, code="unavailable")
