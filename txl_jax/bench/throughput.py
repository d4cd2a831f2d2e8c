"""How many tokens a second a configuration reads, trains on, scores and writes, on this machine.

Each thing that is timed is a `Task`; `take_turns` times several in turns, so that a slow minute falls on all alike.
"""

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax import flops
from txl_jax.assemble import RunComponents
from txl_jax.bench.softmax_speed import draw_targets
from txl_jax.config import Order
from txl_jax.data.batches.segments import SegmentReader, evaluation_segments, training_segments
from txl_jax.inference.generator import Generator

_READ_TOKENS = 20_000_000
_BLOCK = 16  # Tokens that generation writes per call.
_LIKELY = 12.0  # Added to a tail's logit: more than all of a head of 20,000 words have together.


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to time."""

    name: str
    shape: str  # Rows x tokens per row and segment.
    mem_len: int
    tokens: int  # That a call handles.
    call: Callable[[], None]  # Returns when the results are there.
    compile_seconds: float | None = None
    memory_bytes: int | None = None  # Arguments, results and scratch of the compiled program, per device.
    flops_per_token: float | None = None
    bytes_per_step: int | None = None  # Read for one token of every sample: weights, position keys, memory.
    first_token_seconds: float | None = None  # From a prompt that fills the memory to the first token.


@dataclasses.dataclass(frozen=True)
class Speed:
    """A task and what its timed calls took."""

    task: Task
    seconds: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each call, over all devices."""
        return [self.task.tokens / seconds for seconds in self.seconds]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def as_record(self) -> dict[str, Any]:
        """For a JSON file."""
        facts = {field.name: getattr(self.task, field.name) for field in dataclasses.fields(Task)}
        facts.pop("call")
        return facts | {
            "tokens_per_second": self.median,
            "slowest": min(self.rates),
            "fastest": max(self.rates),
            "seconds": list(self.seconds),
        }


def take_turns(tasks: Sequence[Task], *, warmup: int, calls: int) -> list[Speed]:
    """Times `calls` calls of each task in turns, after `warmup` untimed ones of each."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(warmup + calls):
        for task, found in zip(tasks, seconds, strict=True):
            began = time.perf_counter()
            task.call()
            found.append(time.perf_counter() - began)
    return [Speed(task, tuple(found[warmup:])) for task, found in zip(tasks, seconds, strict=True)]


def reading(parts: RunComponents) -> Task:
    """The training segments, from a memory-mapped text, with the config's order and roll.

    The text is of random tokens, long enough that the parts read lie far apart, in sentences of 25 tokens.
    """
    span, data = parts.config.train, parts.config.data
    tokens_per_call = span.batch_size * span.new_tokens * span.segments_per_call
    length = max(_READ_TOKENS, tokens_per_call + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.npy")
        np.save(path, np.random.default_rng(0).integers(parts.model.vocab_size, size=length, dtype=np.int32))
        text = np.load(path, mmap_mode="r")  # Stays readable: the file goes when nothing maps it any more.
    reader = training_segments(
        text,
        batch_size=span.batch_size,
        segment_len=span.segment_len,
        stride=span.stride,
        seed=parts.config.seed,
        roll=data.roll,
        sentence_starts=np.append(np.arange(0, length, 25), length) if data.order is Order.SENTENCES else None,
    )
    steps = itertools.count(step=span.segments_per_call)

    def call() -> None:
        jax.block_until_ready(parts.placement.place(reader.segments(next(steps), span.segments_per_call)))

    began = time.monotonic()
    call()  # The first prepares an epoch's order.
    shape = f"{span.batch_size} x {span.segment_len}"
    return Task("reading", shape, span.mem_len, tokens_per_call, call, compile_seconds=time.monotonic() - began)


def training(parts: RunComponents) -> Task:
    """The whole update: forward, backward, optimiser and memory. Tokens are those that are read for the first time."""
    span = parts.config.train
    train_step, compilation = parts.training.compile_step()
    state = parts.training.init_state()
    segments = random_segments(training_segments, parts, span)
    scratch = compilation.temporary_bytes
    per_place = flops.of_training(
        parts.config.model,
        vocab_size=parts.model.vocab_size,
        segment_len=span.segment_len,
        mem_len=span.mem_len,
        same_length=span.same_length,
    )

    def call() -> None:
        nonlocal state
        state, metrics = train_step(state, segments)
        jax.block_until_ready((state, metrics))

    return Task(
        name="training",
        shape=f"{span.batch_size} x {span.segment_len}",
        mem_len=span.mem_len,
        tokens=span.batch_size * span.new_tokens * span.segments_per_call,
        call=call,
        compile_seconds=compilation.seconds,
        memory_bytes=None if scratch is None else scratch + _bytes(state),
        flops_per_token=per_place * span.segment_len / span.new_tokens,
    )


def evaluation(parts: RunComponents, params: Any) -> Task:
    """Streaming evaluation at the evaluation lengths, with a full memory.

    Raises:
      ValueError: evaluation is to be in windows.
    """
    span = parts.config.eval
    if span.stride:
        raise ValueError(f"eval.stride is {span.stride}, and what is timed is evaluation with a memory; leave it out")
    weights = parts.evaluation.prepare_params(params)
    memory = parts.evaluation.init_memory(weights)
    memory = memory.replace(valid=memory.valid * 0 + span.mem_len)
    segments = random_segments(evaluation_segments, parts, span)
    segments = segments._replace(reset=segments.reset & False)
    began = time.monotonic()
    step = parts.evaluation.eval_step.lower(weights, memory, segments).compile()
    compile_seconds = time.monotonic() - began

    def call() -> None:
        nonlocal memory
        memory, scores = step(weights, memory, segments)
        jax.block_until_ready((memory, scores))

    return Task(
        name="evaluation",
        shape=f"{span.batch_size} x {span.segment_len}",
        mem_len=span.mem_len,
        tokens=span.batch_size * span.segment_len * span.segments_per_call,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=_needed(step),
        flops_per_token=_inference_flops(parts, segment_len=span.segment_len),
    )


def generation(parts: RunComponents, params: Any, *, every_tail: bool = False) -> Task:
    """Writing token after token from a full memory, all samples side by side, drawn as `generate` says.

    Args:
      every_tail: the tails' entries get so much probability that with top-k each of them is read for every token.
        Untrained, they have next to none, and no tail is.
    """
    if every_tail:
        params = jax.tree.map(lambda leaf: leaf, params)  # A tree of its own; the arrays are the same.
        params["softmax"]["tail_bias"] = params["softmax"]["tail_bias"] + _LIKELY
    span, config = parts.config.eval, parts.config.generate
    generator = Generator(parts.model, span, config, memory_dtype=parts.evaluation.memory_dtype, mesh=parts.mesh)
    weights = generator.prepare_params(params)
    prompt = np.asarray(draw_targets(parts.model.vocab_size, span.mem_len + 1))
    context = generator.read(weights, prompt)
    began = time.monotonic()
    arguments = 0, _BLOCK
    write = generator.write.lower(weights.token, context, *arguments, count=_BLOCK).compile()
    compile_seconds = time.monotonic() - began

    def call() -> None:
        nonlocal context
        context, tokens, _ = write(weights.token, context, *arguments)
        jax.block_until_ready((context, tokens))

    return Task(
        name="generation, every tail read" if every_tail else "generation",
        shape=f"{config.samples} x 1",
        mem_len=span.mem_len,
        tokens=config.samples * _BLOCK,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=_needed(write),
        flops_per_token=_inference_flops(parts, segment_len=1),
        bytes_per_step=_bytes(
            (weights.token.layers, weights.token.clusters[: None if every_tail else 1], context.memory)
        ),
        first_token_seconds=_first_token_seconds(generator, weights, prompt),
    )


def random_segments(reader: Callable[..., SegmentReader], parts: RunComponents, span: Any) -> Any:
    """S segments of random tokens on the devices, as often as words are: a tail takes as long as it has tokens."""
    tokens = draw_targets(parts.model.vocab_size, span.batch_size * span.segment_len * span.segments_per_call + 1)
    made = reader(tokens, batch_size=span.batch_size, segment_len=span.segment_len)
    return parts.placement.place(made.segments(0, span.segments_per_call))


def _first_token_seconds(generator: Generator, weights: Any, prompt: np.ndarray) -> float:
    """From a prompt to its first token, when everything is compiled."""
    for _ in range(2):
        began = time.perf_counter()
        next(generator.tokens(weights, prompt, block=1))
        seconds = time.perf_counter() - began
    return seconds


def _inference_flops(parts: RunComponents, *, segment_len: int) -> float:
    span = parts.config.eval
    return flops.of_inference(
        parts.config.model,
        vocab_size=parts.model.vocab_size,
        segment_len=segment_len,
        mem_len=span.mem_len,
        same_length=span.same_length,
    )


def _needed(compiled: Any) -> int | None:
    """Bytes that a compiled program needs on a device, donated arguments counted once."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    sizes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return sizes - found.alias_size_in_bytes


def _bytes(tree: Any) -> int:
    """Bytes on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
