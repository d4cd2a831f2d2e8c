"""Shared parts of the benchmarks: interleaved timing, random tokens, and the output's header."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax.config import DataConfig, EvalConfig, Tokenizer, TrainConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.data import DEFAULT_SUBWORDS
from txl_jax.data.published import CORPORA
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.recurrence import Segments
from txl_jax.runs.build import Built
from txl_jax.runtime import environment

# Parameters of the Zipf-Mandelbrot law, as in `draw_tokens`.
SHIFT = 2.7
EXPONENT = 1.1
_TAIL_BIAS = 12.0  # Added to the logits of tails: more than a head of 20,000 words in total.


@dataclasses.dataclass
class Task:
    """Something to time, and the seconds of its timed calls."""

    name: str
    tokens: int  # Tokens per call.
    call: Callable[[], Any]  # Runs once and returns when the results are ready.
    lengths: Any = None  # A `TrainConfig` or `EvalConfig`: rows, tokens per row and segment, and M.
    flops_per_token: float | None = None  # From `txl_jax.flops`.
    memory_bytes: int = 0  # As reported by the compiler.
    program: Any = None  # The compiled program of a call, if there is a single one.
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each call, over all devices."""
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def cells(self) -> list[str]:
        """The median, the slowest and the fastest rate, for a table."""
        summary = (statistics.median(self.rates), min(self.rates), max(self.rates))
        return [f"{rate:,.4g}" for rate in summary]

    def speedups(self, other: "Task") -> list[float]:
        """Returns this throughput divided by the other's, for each pair of calls."""
        pairs = zip(self.rates, other.rates, strict=True)
        return [rate / other_rate for rate, other_rate in pairs]

    def speedup(self, other: "Task") -> float:
        """Returns the median of `speedups`."""
        return statistics.median(self.speedups(other))


def time_in_turns(tasks: Sequence[Task], *, warmup: int, calls: int) -> None:
    """Times interleaved calls of the tasks, after `warmup` untimed calls.

    Because calls are interleaved, a slow minute of the machine affects all tasks.
    """
    for number in range(warmup + calls):
        for task in tasks:
            start = time.perf_counter()
            task.call()
            if number >= warmup:
                task.seconds.append(time.perf_counter() - start)


def repeated(step: Callable[..., Any], state: Any, *arguments: Any) -> Callable[[], None]:
    """Returns the call of a step: (state, *arguments) -> (state, ..).

    Each call starts from the state of the previous one, and returns when the device is done.
    """

    def call() -> None:
        nonlocal state
        state, *results = step(state, *arguments)
        jax.block_until_ready((state, results))

    return call


def draw_tokens(vocab_size: int, n_tokens: int) -> np.ndarray:
    """Samples token ids int32 [n_tokens]. Every call returns the same ids.

    Lower ids are more frequent, like words, by the Zipf-Mandelbrot law:
    p(rank) ~ 1 / (rank + SHIFT)^EXPONENT.
    """
    frequency = (np.arange(1, vocab_size + 1) + SHIFT) ** -EXPONENT
    probability = frequency / frequency.sum()
    tokens = np.random.default_rng(0).choice(vocab_size, size=n_tokens, p=probability)
    return tokens.astype(np.int32)


def random_segments(built: Built, lengths: TrainConfig | EvalConfig) -> Segments:
    """Returns S segments of random tokens on the devices."""
    make_reader: Any
    if isinstance(lengths, TrainConfig):
        make_reader = training_segments
        per_call = lengths.segments_per_call
    else:
        make_reader = evaluation_segments
        per_call = SEGMENTS_PER_CALL
    n_tokens = lengths.batch_size * lengths.segment_len * per_call
    # The last target is one token after the last input.
    tokens = draw_tokens(built.model.vocab_size, n_tokens + 1)
    reader = make_reader(tokens, batch_size=lengths.batch_size, segment_len=lengths.segment_len)
    return built.place(reader.segments(0, per_call))


def with_every_tail(params: Any) -> Any:
    """Returns parameters that make sampling read every tail of the softmax for every token.

    This applies to greedy and top-k sampling.
    """
    softmax = params["softmax"]
    return params | {"softmax": softmax | {"tail_bias": softmax["tail_bias"] + _TAIL_BIAS}}


def vocab_size_of(data: DataConfig) -> int:
    """Returns the vocabulary size of a published corpus, or the one that the settings have.

    For your own text, bytes have 256 tokens, and so has every other kind without a size.
    """
    if data.corpus in CORPORA:
        return CORPORA[data.corpus].vocab_size
    if data.tokenizer.vocab_size is not None:
        return data.tokenizer.vocab_size
    return DEFAULT_SUBWORDS if data.tokenizer.kind is Tokenizer.SUBWORD else 256


def machine() -> str:
    """Describes the machine of a measurement: devices, versions and date."""
    facts = environment.describe()
    return (
        f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, "
        f"{facts['date']}"
    )


def print_head(built: Built) -> None:
    """Prints the size of a model, and the machine."""
    model = built.model
    print(
        f"{built.num_parameters:,} parameters, vocabulary {model.vocab_size:,}, "
        f"{model.config.dtype}"
    )
    print(f"{machine()}\n")


def print_table(columns: str, rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table, each row as soon as it is measured.

    `columns` are separated by " | ".
    """
    for line in environment.table(columns.split(" | "), rows):
        print(line, flush=True)


def check_names(setting: str, names: Collection[str], known: Sequence[str]) -> None:
    """Raises `UserError` if a setting is empty, or contains an unknown name."""
    for name in names or [""]:
        near = config_tree.did_you_mean(name, known)
        require(name in known, f"{setting} must be of {', '.join(known)}, got {name!r}{near}")
