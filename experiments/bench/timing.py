"""What the benchmarks share: tasks timed in turns, random tokens, and the head of their output.

Benchmarks read no text. Their tokens are as frequent as words, by the law of Zipf and Mandelbrot:
p(rank) ~ 1 / (rank + SHIFT)^EXPONENT. An adaptive softmax takes as long for a tail as it has tokens.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from txl_jax.config import CorpusName, EvalConfig, TrainConfig
from txl_jax.config import settings as config_tree
from txl_jax.config.settings import require
from txl_jax.data.published import CORPORA
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.runs.build import RunComponents
from txl_jax.segments import Segments

SHIFT, EXPONENT = 2.7, 1.1
VOCAB_SIZE_HELP = "V; none: the size published with the corpus, or 256 for your own text."
_TAIL_BIAS = 12.0  # Added to the logits of tails: more than a head of 20,000 words has together.


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to time."""

    name: str
    shape: str  # Rows x tokens per row and segment.
    mem_len: int  # M.
    tokens: int  # Per call.
    call: Callable[[], Any]  # Runs once and returns when the results are there.
    compile_seconds: float | None = None  # Or of what the first call prepares.
    memory_bytes: int | None = None  # Arguments, results and scratch of the compiled program, per device.
    flops_per_token: float | None = None  # By `txl_jax.flops`.
    bytes_per_step: int | None = None  # Read for one token of every sample: weights, position keys, KV cache.
    first_token_seconds: float | None = None  # From a prompt that fills the memory to the first token.


@dataclasses.dataclass(frozen=True)
class Timing:
    """A task and the seconds of its timed calls."""

    task: Task
    seconds: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each call, over all devices."""
        return [self.task.tokens / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """Median of `rates`."""
        return statistics.median(self.rates)

    def speedups(self, other: "Timing") -> list[float]:
        """Returns this throughput divided by the other's, for each pair of calls."""
        return [own / theirs for own, theirs in zip(self.rates, other.rates, strict=True)]

    def as_record(self) -> dict[str, Any]:
        """Returns the values for a JSON file."""
        record = {name: value for name, value in vars(self.task).items() if name != "call"}
        rates = {"tokens_per_second": self.rate, "slowest": min(self.rates), "fastest": max(self.rates)}
        return record | rates | {"seconds": list(self.seconds)}


def interleaved(tasks: Sequence[Task], *, warmup: int, calls: int) -> list[Timing]:
    """Times calls of each task, one of each in turn, so that a slow minute of the machine affects all alike.

    `warmup` untimed calls of each come first.
    """
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(warmup + calls):
        for task, found in zip(tasks, seconds, strict=True):
            start = time.perf_counter()
            task.call()
            found.append(time.perf_counter() - start)
    return [Timing(task, tuple(found[warmup:])) for task, found in zip(tasks, seconds, strict=True)]


def probabilities(vocab_size: int) -> np.ndarray:
    """Computes p of each token, most frequent first: [V]."""
    weights = (np.arange(1, vocab_size + 1) + SHIFT) ** -EXPONENT
    return weights / weights.sum()


def draw_tokens(vocab_size: int, n_tokens: int) -> np.ndarray:
    """Draws tokens, the same ones in every call: int32 [n_tokens]."""
    drawn = np.random.default_rng(0).choice(vocab_size, size=n_tokens, p=probabilities(vocab_size))
    return drawn.astype(np.int32)


def random_segments(components: RunComponents, lengths: TrainConfig | EvalConfig) -> Segments:
    """Returns S segments of random tokens on the devices."""
    is_training = isinstance(lengths, TrainConfig)
    per_call = lengths.segments_per_call if isinstance(lengths, TrainConfig) else SEGMENTS_PER_CALL
    n_tokens = lengths.batch_size * lengths.segment_len * per_call
    tokens = draw_tokens(components.model.vocab_size, n_tokens + 1)
    make_reader: Any = training_segments if is_training else evaluation_segments
    reader = make_reader(tokens, batch_size=lengths.batch_size, segment_len=lengths.segment_len)
    return components.placement.place(reader.segments(0, per_call))


def with_every_tail(params: Any) -> Any:
    """Returns parameters with which greedy and top-k sampling read every tail of the softmax for every token."""
    params = jax.tree.map(lambda leaf: leaf, params)  # A tree of its own; the arrays are the same.
    params["softmax"]["tail_bias"] = params["softmax"]["tail_bias"] + _TAIL_BIAS
    return params


def default_vocab_size(corpus: CorpusName) -> int:
    """Returns the vocabulary size of a published corpus, or 256 (bytes) for your own text."""
    return CORPORA[corpus].vocab_size if corpus in CORPORA else 256


def program_bytes(compiled: Any) -> int | None:
    """Returns the bytes that a compiled program needs on a device, donated arguments counted once, if known."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    sizes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return sizes - found.alias_size_in_bytes


def describe(facts: Mapping[str, Any]) -> str:
    """Formats what `environment.describe` returns."""
    return f"{facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}"


def check_names(setting: str, given: Collection[str], known: Sequence[str]) -> None:
    """Raises `UserError` if a setting is empty, or has a name that is not known."""
    require(given, f"{setting} is empty; it must be of {', '.join(known)}")
    for name in given:
        near = config_tree.did_you_mean(name, known)
        require(name in known, f"{setting} has {name!r}; it must be of {', '.join(known)}{near}")
