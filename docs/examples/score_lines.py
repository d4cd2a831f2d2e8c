"""Scores the lines of a stream as they come, and marks the ones that a model finds unlikely.

    tail -n +1 -F app.log | python docs/examples/score_lines.py runs/log \
        --normal=valid.log --quantile=0.999 --state=app.state --skip

For each line of standard input, one JSON record is written before the next line is read:

    {"line": 7, "nats": 4.1, "max_nats": 1.3, "bytes": 48, "bits_per_byte": 0.12, "alert": false,
     "text": "..."}

`nats` is minus the log probability of the line's bytes, newline included, after all lines before
it, and `max_nats` is the largest part of it from one byte. The model is a Transformer-XL over bytes
that was trained on normal lines. Its memory is never emptied, and each line costs the same however
long the stream is. With --learning_rate, the model also takes one gradient step on each piece of a
line that it has scored (dynamic evaluation).

Lines are scored in pieces of `eval.segment_len` bytes, so that a line may have any length and any
bytes. --state names a file that carries memory and learned parameters over a restart. It is written
every --save_every lines, at the end of the input, after Ctrl-C or SIGTERM, and when the reader of
the records closes the pipe. Only a kill loses the lines since then: started again on the same input
with --skip, the program writes their records a second time, with the same numbers. The same holds
for a last line without newline, because it may be a part of a longer one. If the input begins with
another line than before, such as a log that was rotated, nothing is skipped.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import flax.serialization
import flax.struct
import jax
import numpy as np
import optax

import txl_jax
from txl_jax.evaluation.dynamic import make_rule

SCORES = ("nats", "max_nats", "bits_per_byte")  # Fields that a threshold can be for.
TEXT_BYTES = 200  # A record shows so many bytes of its line.
INTERRUPTED = 130  # Exit code after Ctrl-C or SIGTERM.
PIPE_CLOSED = 141  # Exit code if nobody reads the records any more, as after SIGPIPE.


@flax.struct.dataclass
class State:
    """What the program knows after a line. It is the content of the state file."""

    memory: txl_jax.Memory
    # The last byte that was read. It predicts the next one. A newline before the first line.
    previous: int
    # Number of lines read.
    lines: int
    # How many of them were read before the current input. --skip recognizes the input by how its
    # first line and the last line that was read begin.
    lines_before_input: int
    first_line: bytes
    last_line: bytes
    # Score above which a line is an alert.
    threshold: float
    # The current parameters and the state of the update rule, or None if nothing is learned.
    learned: Any

    def after_line(self, score: "Score") -> "State":
        """Counts a line, and remembers how it begins."""
        is_first = self.lines == self.lines_before_input
        return self.replace(
            lines=self.lines + 1,
            first_line=score.text if is_first else self.first_line,
            last_line=score.text,
        )

    def before_new_input(self) -> "State":
        """The same state, for an input of which nothing has been read."""
        return self.replace(lines_before_input=self.lines)


class Score(NamedTuple):
    """A line's score."""

    nats: float = 0.0
    max_nats: float = 0.0  # Nats of the least likely byte.
    n_bytes: int = 0
    text: bytes = b""  # The first bytes of the line.
    has_newline: bool = False

    @property
    def bits_per_byte(self) -> float:
        """The mean over the line's bytes, in bits."""
        return self.nats / math.log(2) / self.n_bytes

    def add(self, piece: bytes, nats: np.ndarray) -> "Score":
        """Returns the score with a further piece of the line, and the nats of its bytes."""
        return Score(
            nats=self.nats + float(nats.sum(dtype=np.float64)),
            max_nats=max(self.max_nats, float(nats.max())),
            n_bytes=self.n_bytes + len(piece),
            text=(self.text + piece)[:TEXT_BYTES],
            has_newline=piece.endswith(b"\n"),
        )


class Rewound:
    """A stream that begins again with bytes that were already read from it."""

    def __init__(self, already_read: bytes, stream: BinaryIO) -> None:
        """Takes the bytes and the stream behind them."""
        self._already_read = io.BytesIO(already_read)
        self._stream = stream

    def readline(self, size: int) -> bytes:
        """Returns the next piece of a line, of at most `size` bytes."""
        return self._already_read.readline(size) or self._stream.readline(size)


class LineScorer:
    """A model that reads lines. It keeps no state: each call takes one and returns the next."""

    def __init__(
        self,
        model: txl_jax.LanguageModel,
        *,
        dynamic: txl_jax.DynamicConfig | None = None,
        mem_len: int | None = None,
    ) -> None:
        """Prepares a model.

        Args:
          model: A model over bytes.
          dynamic: The rule to learn by, such as `DynamicConfig(rule="rmsprop")`, or None.
          mem_len: Positions of the memory, or None for `eval.mem_len`.

        Raises:
          UserError: If tokens are not bytes.
        """
        if model.vocabulary.kind != "byte":
            raise txl_jax.UserError(
                f"the model must read bytes, got tokens of kind {model.vocabulary.kind}. Train it "
                "with --data.tokenizer.kind=byte."
            )
        self.model = model
        self.dynamic = dynamic
        self.mem_len = model.config.eval.mem_len if mem_len is None else mem_len
        # Bytes of a piece. All pieces are padded to it, so that one function is compiled.
        self.piece_len = model.config.eval.segment_len

    def start(self) -> State:
        """Returns the state before the first line: an empty memory and the trained parameters."""
        learned = None
        if self.dynamic is not None:
            learned = (self.model.params, make_rule(self.dynamic).init(self.model.params))
        memory = self.model.init_memory(batch_size=1, mem_len=self.mem_len)
        return State(
            memory=memory,
            previous=ord("\n"),
            lines=0,
            lines_before_input=0,
            first_line=b"",
            last_line=b"",
            threshold=math.inf,
            learned=learned,
        )

    def scores(self, state: State, stream: BinaryIO | Rewound) -> Iterator[tuple[Score, State]]:
        """Yields the score of each line of a stream as it comes, and the state after it.

        The last line may lack its newline. A line is read piece by piece, so that one without end
        takes no more memory than any other.
        """
        score = Score()
        while piece := stream.readline(self.piece_len):
            state, nats = self._read(state, piece)
            score = score.add(piece, nats)
            if score.has_newline:
                state = state.after_line(score)
                yield score, state
                score = Score()
        if score.n_bytes:
            yield score, state.after_line(score)

    def _read(self, state: State, piece: bytes) -> tuple[State, np.ndarray]:
        """Scores a piece of a line. Returns the state after it, and the nats of its bytes."""
        # Each byte is predicted from the one before it, and from the memory.
        inputs = np.zeros((1, self.piece_len), np.int32)
        inputs[0, : len(piece)] = [state.previous, *piece[:-1]]
        # Targets of -1 are padding, which neither counts nor teaches.
        targets = np.full((1, self.piece_len), -1, np.int32)
        targets[0, : len(piece)] = list(piece)

        memory, learned, padded_nats = self._read_padded(
            self.model.params, state.memory, state.learned, inputs, targets
        )
        nats = np.asarray(padded_nats)[0, : len(piece)]
        if not np.isfinite(nats).all():
            raise txl_jax.UserError(
                f"the loss of line {state.lines + 1:,} must be finite, got {nats.sum()}. "
                "Lower --learning_rate."
            )
        state = state.replace(memory=memory, learned=learned, previous=piece[-1])
        return state, nats

    @functools.cached_property
    def _read_padded(self) -> Callable[..., Any]:
        """The compiled function that reads one piece, and learns from it after scoring it."""
        config = self.model.config
        net = txl_jax.TransformerXL(config.model, vocab_size=self.model.vocabulary.size)
        attends = {
            "clamp_len": config.eval.clamp_len,
            # Each byte attends to as many bytes before it, wherever lines and pieces end. A window
            # as long as the memory is empty without memory.
            "same_length": config.eval.same_length and self.mem_len > 0,
        }

        def mean_loss(params: Any, memory: Any, inputs: Any, targets: Any) -> Any:
            n_byte = (targets >= 0).sum(axis=1)
            hidden, memory = net.apply(
                {"params": params}, inputs, memory, lengths=n_byte, **attends
            )
            nats = net.apply({"params": params}, hidden, targets, method=net.nll)
            return nats.sum() / n_byte.sum(), (memory, nats)

        @jax.jit
        def read(trained: Any, memory: Any, learned: Any, inputs: Any, targets: Any) -> Any:
            if self.dynamic is None:
                _, (memory, nats) = mean_loss(trained, memory, inputs, targets)
                return memory, None, nats

            params, rule_state = learned
            gradient = jax.grad(mean_loss, has_aux=True)
            grads, (memory, nats) = gradient(params, memory, inputs, targets)
            updates, rule_state = make_rule(self.dynamic).update(grads, rule_state, params)
            return memory, (optax.apply_updates(params, updates), rule_state), nats

        return read

    def save(self, state: State, path: Path) -> None:
        """Replaces a state file. It contains either the old state or the new one, never a part."""
        content = flax.serialization.to_bytes({"reader": self._fingerprint, "state": state})
        new = path.with_name(path.name + ".new")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)

    def load(self, path: Path) -> State:
        """Reads a state file.

        Raises:
          UserError: If the file is not a state, or another model or other settings wrote it.
        """
        try:
            saved = flax.serialization.msgpack_restore(path.read_bytes())
            fingerprint = saved["reader"]
        except (ValueError, KeyError, TypeError) as error:
            raise txl_jax.UserError(f"{path} is not a state file ({error}). Delete it.") from error
        if fingerprint != self._fingerprint:
            raise txl_jax.UserError(
                f"{path} must be a state of this model, with the same lengths and learning "
                "settings. Pass the settings that wrote it, or another --state."
            )
        return flax.serialization.from_state_dict(self.start(), saved["state"])

    @functools.cached_property
    def _fingerprint(self) -> str:
        """A hash of everything that a state depends on except the lines."""
        digest = hashlib.sha256(repr((self.dynamic, self.mem_len, self.piece_len)).encode())
        for leaf in jax.tree.leaves(self.model.params):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()


def read_normal_lines(scorer: LineScorer, path: Path, by: str, quantile: float) -> State:
    """Reads normal lines, and returns the state after them, with their quantile as threshold.

    The stream continues these lines: its first line finds them in the memory.
    """
    state = scorer.start()
    values = []
    with path.open("rb") as file:
        for score, after in scorer.scores(state, file):
            values.append(getattr(score, by))
            state = after
    if not values:
        raise txl_jax.UserError(f"{path} must contain normal lines, got an empty file")
    # The first lines have no memory yet, but there are few of them.
    threshold = float(np.quantile(values, quantile, method="higher"))
    print(f"{path}: {len(values):,} lines, {by} above {threshold:.2f} alert", file=sys.stderr)
    return state.replace(lines=0, threshold=threshold).before_new_input()


def skip_lines(stream: BinaryIO, state: State, piece_len: int) -> tuple[BinaryIO | Rewound, State]:
    """Reads past the lines of the input that a state has read.

    If the input's first line is another one than before, it is a new input, such as a log that was
    rotated, and nothing is skipped. If only the last line to skip is another one, the lines before
    it are lost, since a pipe cannot be read again. A warning says so.

    Args:
      stream: The input, from its beginning.
      state: What was read of it before.
      piece_len: Bytes of the pieces in which lines are read.

    Returns:
      The rest of the input, and the state before it.
    """
    n_line = state.lines - state.lines_before_input
    piece = stream.readline(piece_len) if n_line else b""
    if not piece:  # Nothing to skip, or an empty input.
        return stream, state
    if not state.first_line.startswith(piece[:TEXT_BYTES]):
        print("the input begins with another line than before: all are scored", file=sys.stderr)
        return Rewound(piece, stream), state.before_new_input()

    skipped = 0
    text = b""  # How the current line begins.
    while piece:
        text = (text + piece)[:TEXT_BYTES]
        if piece.endswith(b"\n"):
            skipped += 1
            if skipped == n_line:
                if text != state.last_line:
                    print(
                        f"line {n_line:,} of the input is not the one that was read last, so this "
                        "is another input. Its lines up to this one were skipped, not scored",
                        file=sys.stderr,
                    )
                return stream, state
            text = b""
        piece = stream.readline(piece_len)
    print(f"the input has only {skipped:,} of {n_line:,} lines to skip", file=sys.stderr)
    return stream, state


def write_record(score: Score, state: State, by: str) -> None:
    """Writes a line's record to standard output, past all buffers."""
    record = {
        "line": state.lines,
        "nats": round(score.nats, 4),
        "max_nats": round(score.max_nats, 4),
        "bytes": score.n_bytes,
        "bits_per_byte": round(score.bits_per_byte, 4),
        "alert": getattr(score, by) > state.threshold,
        # Bytes that are not UTF-8 become escapes.
        "text": score.text.rstrip(b"\r\n").decode(errors="backslashreplace"),
    }
    print(json.dumps(record), flush=True)


class StopSignals:
    """Ctrl-C and SIGTERM. Between a line's record and its state they wait, so that both agree."""

    def __init__(self) -> None:
        """Takes the two signals."""
        self.must_wait = False
        self.is_requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *signal_and_frame: Any) -> None:
        # The second signal ends even a program whose record nobody reads.
        if self.is_requested or not self.must_wait:
            raise KeyboardInterrupt
        self.is_requested = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Keeps a signal waiting until the end of a block."""
        self.must_wait = True
        yield
        self.must_wait = False
        if self.is_requested:
            raise KeyboardInterrupt


def score_input(
    scorer: LineScorer,
    state: State,
    stream: BinaryIO | Rewound,
    signals: StopSignals,
    arguments: argparse.Namespace,
) -> int:
    """Writes a record for each line of a stream. Returns the exit code."""
    path = arguments.state
    try:
        for score, after in scorer.scores(state, stream):
            with signals.waiting():
                write_record(score, after, arguments.by)
                # A last line without newline is read again when it is complete.
                if score.has_newline:
                    state = after
            if path is not None and state.lines % arguments.save_every == 0:
                scorer.save(state, path)
        return 0
    except BrokenPipeError:
        # Python flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        if path is not None:
            scorer.save(state, path)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a run on bytes, or a portable checkpoint")
    threshold = parser.add_mutually_exclusive_group(required=True)
    threshold.add_argument("--normal", type=Path, help="file of normal lines for the threshold")
    threshold.add_argument("--threshold", type=float, help="alert above this score")
    add("--quantile", type=float, default=0.999, help="quantile of normal lines: the threshold")
    add("--by", choices=SCORES, default="bits_per_byte", help="the score of a line")
    add("--state", type=Path, help="file that carries the state over a restart")
    add("--save_every", type=int, default=100, help="lines between two writes of --state")
    add("--skip", action="store_true", help="skip the lines of the input that --state has read")
    add("--mem_len", type=int, help="bytes that the memory holds (default: eval.mem_len)")
    add("--learning_rate", type=float, help="learn from each line with this rate, such as 1e-4")
    add("--decay", type=float, default=0.0, help="how fast the model forgets what it learned")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs the program. Returns its exit code."""
    arguments = parse(words)
    signals = StopSignals()
    dynamic = None
    if arguments.learning_rate is not None:
        dynamic = txl_jax.DynamicConfig(
            rule="rmsprop", learning_rate=arguments.learning_rate, decay=arguments.decay
        )
    try:
        model = txl_jax.load(arguments.model)
        scorer = LineScorer(model, dynamic=dynamic, mem_len=arguments.mem_len)
        if arguments.state is not None and arguments.state.exists():
            state = scorer.load(arguments.state)
            print(f"{arguments.state}: continues after line {state.lines:,}", file=sys.stderr)
        elif arguments.normal is not None:
            state = read_normal_lines(scorer, arguments.normal, arguments.by, arguments.quantile)
        else:
            state = scorer.start()
        if arguments.threshold is not None:
            state = state.replace(threshold=arguments.threshold)
        stream: BinaryIO | Rewound = sys.stdin.buffer
        if arguments.skip:
            stream, state = skip_lines(sys.stdin.buffer, state, scorer.piece_len)
        else:
            state = state.before_new_input()
        return score_input(scorer, state, stream, signals, arguments)
    except txl_jax.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
