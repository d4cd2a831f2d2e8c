"""How many tokens a second a configuration reads, trains on and scores, on this machine."""

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from txl_jax.assemble import Parts
from txl_jax.config import Order
from txl_jax.data.segments import SegmentReader, evaluation_segments, training_segments
from txl_jax.jobs.softmax_speed import draw_targets

_READ_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second over all devices, each timing one call of S segments."""

    median: float
    slowest: float
    fastest: float
    first_call_seconds: float  # The first call compiles, or prepares an epoch's order.


def training_speed(parts: Parts, *, warmup: int, calls: int) -> Speed:
    """Speed of the whole update: forward, backward, optimiser and memory."""
    span = parts.config.train
    began = time.monotonic()
    train_step, _ = parts.compile_train_step()
    first_call_seconds = time.monotonic() - began
    state = parts.init_state()
    segments = _random_segments(training_segments, parts, span.batch_size, span.segment_len, span.segments_per_call)

    def call() -> None:
        nonlocal state
        state, metrics = train_step(state, segments)
        jax.block_until_ready((state, metrics))

    tokens = span.batch_size * span.segment_len * span.segments_per_call
    return _measure(call, tokens, warmup=warmup, calls=calls, first_call_seconds=first_call_seconds)


def reading_speed(parts: Parts, *, calls: int) -> Speed:
    """Speed at which the training segments come from a memory-mapped text, with the config's order and roll.

    The text is of random tokens, long enough that the parts read lie far apart, in sentences of 25 tokens.
    """
    span, data = parts.config.train, parts.config.data
    tokens_per_call = span.batch_size * span.segment_len * span.segments_per_call
    length = max(_READ_TOKENS, tokens_per_call + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.npy")
        np.save(path, np.random.default_rng(0).integers(parts.model.vocab_size, size=length, dtype=np.int32))
        reader = training_segments(
            np.load(path, mmap_mode="r"),
            batch_size=span.batch_size,
            segment_len=span.segment_len,
            seed=parts.config.seed,
            roll=data.roll,
            sentence_starts=np.append(np.arange(0, length, 25), length) if data.order is Order.SENTENCES else None,
        )
        steps = itertools.count(step=span.segments_per_call)

        def call() -> None:
            jax.block_until_ready(parts.place(reader.segments(next(steps), span.segments_per_call)))

        began = time.monotonic()
        call()
        first = time.monotonic() - began
        return _measure(call, tokens_per_call, warmup=1, calls=calls, first_call_seconds=first)


def evaluation_speed(parts: Parts, *, warmup: int, calls: int) -> Speed:
    """Speed of streaming evaluation at the evaluation lengths, with a full memory."""
    span = parts.config.eval
    params = parts.init_state().params
    memory = parts.eval_memory()
    memory = memory.replace(valid=memory.valid + span.mem_len)
    segments = _random_segments(evaluation_segments, parts, span.batch_size, span.segment_len, span.segments_per_call)
    segments = segments._replace(reset=segments.reset & False)

    def call() -> None:
        nonlocal memory
        memory, *sums = parts.eval_step(params, memory, segments)
        jax.block_until_ready((memory, sums))

    began = time.monotonic()
    call()
    first_call_seconds = time.monotonic() - began
    tokens = span.batch_size * span.segment_len * span.segments_per_call
    return _measure(call, tokens, warmup=warmup, calls=calls, first_call_seconds=first_call_seconds)


def _random_segments(reader: Callable[..., SegmentReader], parts: Parts, batch_size: int, segment_len: int, count: int):
    """S segments of random tokens on the devices, as often as words are: a tail takes as long as it has tokens."""
    tokens = draw_targets(parts.model.vocab_size, batch_size * segment_len * count + 1)
    made = reader(tokens, batch_size=batch_size, segment_len=segment_len)
    return parts.place(made.segments(0, count))


def _measure(call: Callable[[], None], tokens: int, *, warmup: int, calls: int, first_call_seconds: float) -> Speed:
    """Times `calls` calls that handle `tokens` tokens each, after `warmup` untimed ones."""
    for _ in range(warmup):
        call()
    rates = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        rates.append(tokens / (time.perf_counter() - began))
    return Speed(statistics.median(rates), min(rates), max(rates), first_call_seconds)
