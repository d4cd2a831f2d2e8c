"""The engine: a thread that owns the device, with texts that join and leave its rows between calls.

A round of the thread puts waiting texts into free rows, reads segments of prompts, and samples up
to K tokens of all other rows in one call. This keeps the work per token in Python small: a row's
new tokens are decoded, searched for stop strings and passed on once per call.

A request has a `Completion` for each of its prompts (`serving.completion`), and a completion has n
samples, which the API calls choices. Each sample takes a row until it ends.

- A prompt is read once, however many texts continue it: the memory after it has a fixed size, and
  is copied into their rows.
- While rows write, segments are read for `_READ_SECONDS` between two calls, and at least one
  segment. A long prompt therefore does not delay a row that writes by more than that.
- A failure in one row ends its completion. A failure in the call of all rows ends the engine.
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
class ServerLimits:
    """The limits of a server."""

    # Bytes of a request's body.
    body_bytes: int = 2 << 20
    # Tokens of a request: its prompts, and the generated tokens (`protocol.prompts_of`).
    tokens: int = 200_000
    # Maximum `max_tokens` of a request.
    new_tokens: int = 4096
    # Prompts times samples of a request.
    choices: int = 128
    # Stop strings of a request.
    stop_strings: int = 16
    # Characters of a stop string.
    stop_length: int = 256
    # Choices of all requests that wait for a row. Further requests are answered with 429.
    waiting: int = 512
    # Seconds in which a request must be answered.
    seconds: float = 600
    # Seconds in which the body of a request must have come.
    body_seconds: float = 30


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
    # Scores of these tokens, or None without logprobs and for a memory's first token, which
    # nothing precedes.
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

    # Tokens of prompts that were read.
    read: int = 0
    # Tokens that were passed on.
    written: int = 0
    # Samples that have ended, by reason.
    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(eq=False)
class Completion:
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
    # Whether `state` is the memory after the prompt.
    is_read: bool = False
    # The prompt's pieces, for samples that wait.
    pieces: list[Piece] = dataclasses.field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Number of samples without a row so far."""
        return self.prompt.n - self.begun

    @property
    def may_begin(self) -> bool:
        """Whether its next sample may take a row. While the first reads, the others wait."""
        return self.is_read or self.begun == 0


class _Row:
    """A sample in a row."""

    def __init__(self, completion: Completion, vocabulary: Vocabulary):
        prompt = completion.prompt
        state = completion.state
        # The memory after the prompt includes the prompt's tokens already.
        tokens = prompt.tokens[:0] if completion.is_read else prompt.tokens

        self.completion = completion
        self.prompt = prompt
        self.sample = completion.begun
        # Tokens to read. The last of them is read by the call that draws the next token.
        self.unread = np.concatenate([state.pending, tokens])
        self.position = state.position
        # Tokens of the history, without those that are written here.
        self.num_read = state.tokens + len(tokens)
        self.num_written = 0
        self.text = TextStream(vocabulary.decode, prompt.stop)
        self.key = row_key(np.uint32(prompt.seed % (1 << 32)), self.sample)

    @property
    def is_reading(self) -> bool:
        """True while there are tokens to read before the next one can be drawn."""
        return len(self.unread) > 1

    def put(self, piece: Piece) -> None:
        """Passes a piece on. A prompt's piece is kept for the samples that wait."""
        if piece.is_prompt and self.completion.num_waiting:
            self.completion.pieces.append(piece)
        self.completion.sink(self.sample, piece)

    def ask_for_tokens(self, rows: Rows, number: int, *, block: int) -> None:
        """Sets the arguments of row `number` so that it draws its next tokens, at most `block`."""
        rows.last[number] = self.unread[0]
        rows.number[number] = self.num_written
        rows.key[number] = self.key
        rows.steps[number] = min(block, self.prompt.max_tokens - self.num_written)
        rows.temperature[number] = self.prompt.temperature
        rows.top_p[number] = self.prompt.top_p
        rows.scored[number] = self.prompt.logprobs


class Engine:
    """Runs completions on one device, in the R rows of a `Step`."""

    def __init__(
        self,
        step: Step,
        params: Any,
        vocabulary: Vocabulary,
        store: SessionStore,
        limits: ServerLimits,
    ):
        """Does not start the thread.

        `store` keeps the sessions' memories, `limits.waiting` limits the queue.
        """
        self.step = step
        self.vocabulary = vocabulary
        self.store = store
        self.limits = limits
        self.counters = Counters()
        # Whether the programs are compiled, and completions are taken.
        self.ready = False
        # Whether the thread has ended with an error.
        self.failed = False
        self._params = params
        # Rows in use, by their numbers. The one that comes next to read is the first.
        self._rows: dict[int, _Row] = {}
        # Completions with samples that wait.
        self._waiting: collections.deque[Completion] = collections.deque()
        # Guards the rows and the queue, and tells the thread that there is work.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        # Why new completions are rejected, if they are.
        self._refusal: str | None = None

    def start(self) -> None:
        """Starts the thread, which compiles the programs first."""
        self._thread.start()

    def submit(self, completions: list[Completion]) -> None:
        """Makes completions wait for rows.

        Raises `RequestError` (400, 429, 503) and takes no completion if there are too many.
        """
        with self._changed:
            if self._refusal is not None:
                # A new exception each time: one that is raised again collects the traceback of
                # every request.
                raise RequestError(self._refusal, status=503, code="unavailable")

            num_new = sum(completion.num_waiting for completion in completions)
            most = self.limits.waiting + self.step.batch_size
            if num_new > most:
                raise RequestError(
                    f"a request must have at most {most} choices (the server's limit), "
                    f"got {num_new}",
                    param="n",
                )
            if self.num_waiting + num_new > most:
                raise RequestError(
                    f"the queue is full ({self.num_waiting} of {self.limits.waiting} choices). "
                    "Try again later.",
                    status=429,
                    code="overloaded",
                )
            self._waiting.extend(completions)
            self._changed.notify()

    def cancel(self, completions: list[Completion]) -> None:
        """Ends completions whose results are no longer needed. Their sessions do not change."""
        with self._changed:
            for completion in completions:
                completion.cancelled = True
            self._changed.notify()

    def refuse(self, reason: str) -> None:
        """Rejects new completions from now on. Those that were accepted continue."""
        with self._changed:
            self.ready = False
            self._refusal = reason

    def cut_off(self) -> None:
        """Ends all completions and the thread, without waiting for it."""
        self.refuse("the server is shutting down")
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """Ends all completions and the thread, and returns when it has ended."""
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
            return sum(completion.num_waiting for completion in self._waiting)

    @property
    def num_busy(self) -> int:
        """Number of rows in use."""
        return len(self._rows)

    # All that follows runs in the thread.

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
        for completion in self._completions():
            self._fail(completion, RequestError(str(self._refusal), status=503, code="unavailable"))

    def _compile(self) -> None:
        """Prepares the parameters, and runs every program once."""
        self._prepared = self.step.prepare_params(self._params)
        # The prepared ones are copies.
        self._params = None
        self._cache = self.step.init_cache(self._prepared)
        # What a row has before its first token, or None if it need not be put there.
        self._empty_row = self.step.empty_row(self._prepared)

        idle = Rows.idle(self.step.batch_size)
        self._cache, _, _ = self.step.write(self._prepared, self._cache, idle)
        for width in WIDTHS:
            tokens = np.zeros(width + 1, np.int32)
            self._cache, _ = self.step.read(self._prepared, self._cache, 0, 0, tokens, scored=False)
        some_row = self._empty_row or self.step.take(self._cache, 0)
        self._cache = self.step.put(self._cache, 0, some_row)

    def _wait(self) -> bool:
        """Waits for work. Returns whether the thread continues."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._rows)
            return not self._stopping

    def _completions(self) -> set[Completion]:
        """Returns the completions that wait or have rows."""
        with self._changed:
            return {*self._waiting, *(row.completion for row in self._rows.values())}

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for completion in self._completions():
            if completion.cancelled:
                self._fail(
                    completion,
                    RequestError("the client has disconnected", status=499, code="cancelled"),
                )
            elif now > completion.until:
                self._fail(completion, timed_out())

    @contextlib.contextmanager
    def _failing_alone(self, completion: Completion) -> Iterator[None]:
        """Ends a completion that raises, unless a call that had taken the cache was lost with it.

        The cache is shared by all rows. If it was lost, the error is raised again.
        """
        try:
            yield
        except Exception:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache)):
                raise
            _log.exception("a request failed")
            self._fail(
                completion, RequestError("internal server error", status=500, code="internal")
            )

    def _admit(self) -> None:
        """Puts waiting samples into free rows.

        Samples whose prompt is being read wait for its end.
        """
        free = sorted(set(range(self.step.batch_size)) - self._rows.keys())
        for number in free:
            with self._changed:
                completion = next((first for first in self._waiting if first.may_begin), None)
            if completion is None:
                return
            with self._failing_alone(completion):
                self._begin(number, completion)

    def _begin(self, number: int, completion: Completion) -> None:
        """Puts the memory before a completion's next sample into a row.

        Also passes on the pieces of its prompt that were read.
        """
        row = _Row(completion, self.vocabulary)
        with self._changed:
            completion.begun += 1
            self._rows[number] = row
            if not completion.num_waiting:
                self._waiting.remove(completion)

        rings = completion.state.rings or self._empty_row
        if rings is not None:
            self._cache = self.step.put(self._cache, number, rings)
        for piece in completion.pieces:
            completion.sink(row.sample, piece)
        # Nothing precedes the first token, so that it has no score.
        is_first_token = not completion.state.tokens
        if row.prompt.echo and row.prompt.logprobs and is_first_token:
            row.put(Piece("", row.prompt.tokens[:1], None, is_prompt=True))

        self._share(number, row)
        if not completion.num_waiting:
            # No sample will need them again.
            completion.state = EMPTY
            completion.pieces = []

    def _read(self, until: float) -> None:
        """Reads a segment for each row that has one to read.

        Rows for which no time was left come first next time.
        """
        reading = {number: row for number, row in self._rows.items() if row.is_reading}
        others_write = len(reading) < len(self._rows)
        # Time that the latest segment took, which the next is expected to take too.
        seconds = 0.0
        for number, row in reading.items():
            began = time.monotonic()
            if others_write and seconds and began + seconds > until:
                return
            # Another row of its completion may have ended it.
            if number not in self._rows:
                continue
            # This row is the last in the next round.
            self._rows[number] = self._rows.pop(number)
            with self._failing_alone(row.completion):
                self._read_segment(number, row)
            seconds = time.monotonic() - began

    def _read_segment(self, number: int, row: _Row) -> None:
        scored = row.prompt.logprobs and row.prompt.echo
        self._cache, scores = self.step.read(
            self._prepared, self._cache, number, row.position, row.unread, scored=scored
        )
        count = len(scores.nats)
        self.counters.read += count
        # The scores belong to the tokens that follow the ones that were read.
        targets = row.unread[1 : count + 1]
        row.unread = row.unread[count:]
        row.position += count
        if scored:
            row.put(Piece("", targets, scores, is_prompt=True))
        self._share(number, row)

    def _share(self, number: int, row: _Row) -> None:
        """Keeps the memory after a prompt for the samples that wait, once it is read."""
        completion = row.completion
        if completion.num_waiting and not completion.is_read and not row.is_reading:
            rings = self.step.take(self._cache, number)
            completion.state = State(rings, row.position, row.unread, row.num_read)
            completion.is_read = True

    def _write(self) -> None:
        """Samples up to K tokens of each row that has read its prompt.

        Rows that want no tokens, because only their prompt is scored, end here.
        """
        rows = Rows.idle(self.step.batch_size)
        writing: dict[int, _Row] = {}
        for number, row in list(self._rows.items()):
            # The step also runs for rows that still read their prompt. It leaves a token of no use
            # in the slot of the row's position, which the row's next token overwrites. At position
            # 0 that could be the slot of a token that the row has read.
            rows.position[number] = row.position
            if row.is_reading:
                continue
            if row.prompt.max_tokens:
                row.ask_for_tokens(rows, number, block=self.step.block)
                writing[number] = row
            else:
                with self._failing_alone(row.completion):
                    no_tokens = np.zeros(0, np.int32)
                    self._end(number, row, Piece("", no_tokens, None, end="length"))
        if not writing:
            return

        self._cache, tokens, scores = self.step.write(self._prepared, self._cache, rows)
        for number, row in writing.items():
            # Another row of its completion may have ended it.
            if number not in self._rows:
                continue
            count = int(rows.steps[number])
            scores_of_row = _of_row(scores, number) if rows.scored[number] else None
            with self._failing_alone(row.completion):
                self._pass_on(number, row, tokens[number, :count], scores_of_row)

    def _pass_on(self, number: int, row: _Row, tokens: np.ndarray, scores: Scores | None) -> None:
        """Passes a row's new tokens on, up to the one that completes a stop string.

        `scores` begin with the scores of these tokens. Later entries are ignored.
        """
        if row.prompt.stop:
            # Token by token, to know which one completes a stop string.
            count = 0
            text = ""
            while count < len(tokens) and not row.text.ended:
                text += row.text.add(tokens[count : count + 1])
                count += 1
            tokens = tokens[:count]
        else:
            text = row.text.add(tokens)
        if scores is not None:
            scores = _first(scores, len(tokens))

        row.num_written += len(tokens)
        row.position += len(tokens)
        row.unread = tokens[-1:]
        self.counters.written += len(tokens)
        if row.text.ended:
            self._end(number, row, Piece(text, tokens, scores, end="stop"))
        elif row.num_written == row.prompt.max_tokens:
            self._end(number, row, Piece(text + row.text.finish(), tokens, scores, end="length"))
        else:
            row.put(Piece(text, tokens, scores))

    def _end(self, number: int, row: _Row, last: Piece) -> None:
        """Frees a row, with its memory kept if a session wants it."""
        if row.completion.session is not None:
            rings = jax.tree.map(np.array, self.step.take(self._cache, number))
            position = self.step.normal_position(row.position)
            num_tokens = row.num_read + row.num_written
            self._release(row.completion, State(rings, position, row.unread.copy(), num_tokens))
        del self._rows[number]
        self.counters.ended[str(last.end)] += 1
        row.put(last)

    def _fail(self, completion: Completion, error: RequestError) -> None:
        """Ends a completion with an error. Its session does not change."""
        with self._changed:
            remaining = {
                number: row
                for number, row in self._rows.items()
                if row.completion is not completion
            }
            num_ended = completion.num_waiting + len(self._rows) - len(remaining)
            self.counters.ended[error.code] += num_ended
            self._rows = remaining
            if completion in self._waiting:
                self._waiting.remove(completion)
        self._release(completion)
        # The sink may be what has failed.
        with contextlib.suppress(Exception):
            completion.sink(0, error)

    def _release(self, completion: Completion, state: State | None = None) -> None:
        """Ends the use of a completion's session, unless it has ended before."""
        if completion.session is not None:
            self.store.release(completion.session, state)
            completion.session = None


def _of_row(scores: Scores, number: int) -> Scores:
    """Returns the scores [K] of one row of scores [R, K]."""
    return Scores(*(array[number] for array in scores))


def _first(scores: Scores, count: int) -> Scores:
    """Returns the scores of the first tokens."""
    return Scores(*(array[:count] for array in scores))
