"""Throughput in tokens per second of data loading, training, evaluation and generation.

A `Task` is something to time; `measure_interleaved` times several in turn, so that a slow minute of the machine affects
all alike.
"""

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from txl_jax import flops
from txl_jax.bench.synthetic_tokens import draw_tokens
from txl_jax.config import EvalConfig, Order, TrainConfig
from txl_jax.config.settings import require
from txl_jax.data.segments import SegmentReader, evaluation_segments, training_segments
from txl_jax.inference.generator import Generator
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.runs.build import RunComponents
from txl_jax.runtime.environment import bytes_on_device
from txl_jax.segments import Segments

_TEXT_TOKENS = 20_000_000
_SENTENCE_TOKENS = 25
BLOCK = 16  # Tokens that generation writes per call.
_TAIL_BIAS = 12.0  # Added to the logits of tails: more than a head of 20,000 words has together.


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to time."""

    name: str
    shape: str  # Rows x tokens per row and segment.
    mem_len: int  # M.
    tokens: int  # Per call.
    call: Callable[[], None]  # Runs once and returns when the results are there.
    compile_seconds: float | None = None  # Or of what the first call prepares.
    memory_bytes: int | None = None  # Arguments, results and scratch of the compiled program, per device.
    flops_per_token: float | None = None  # By `txl_jax.flops`.
    bytes_per_step: int | None = None  # Read for one token of every sample: weights, position keys, KV cache.
    first_token_seconds: float | None = None  # From a prompt that fills the memory to the first token.


@dataclasses.dataclass(frozen=True)
class Throughput:
    """A task and the seconds of its timed calls."""

    task: Task
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> list[float]:
        """Throughput of each call, over all devices."""
        return [self.task.tokens / seconds for seconds in self.seconds]

    @property
    def median(self) -> float:
        """Median of the calls, in tokens per second."""
        return statistics.median(self.tokens_per_second)

    def as_record(self) -> dict[str, Any]:
        """Returns the values for a JSON file."""
        facts = {field.name: getattr(self.task, field.name) for field in dataclasses.fields(Task)}
        facts.pop("call")
        return facts | {
            "tokens_per_second": self.median,
            "slowest": min(self.tokens_per_second),
            "fastest": max(self.tokens_per_second),
            "seconds": list(self.seconds),
        }


def measure_interleaved(tasks: Sequence[Task], *, warmup: int, calls: int) -> list[Throughput]:
    """Times `calls` calls of each task, one of each in turn, after `warmup` untimed warm-up calls of each."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(warmup + calls):
        for task, found in zip(tasks, seconds, strict=True):
            start = time.perf_counter()
            task.call()
            found.append(time.perf_counter() - start)
    return [Throughput(task, tuple(found[warmup:])) for task, found in zip(tasks, seconds, strict=True)]


def data_loading(components: RunComponents) -> Task:
    """Reads training segments from a memory-mapped text, in the config's order, and transfers them to the devices.

    The text has random tokens, in sentences of 25, and is long enough that successive segments lie far apart.
    """
    train, data = components.config.train, components.config.data
    tokens_per_call = train.batch_size * train.new_tokens * train.segments_per_call
    length = max(_TEXT_TOKENS, tokens_per_call + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.npy")
        np.save(path, np.random.default_rng(0).integers(components.model.vocab_size, size=length, dtype=np.int32))
        text = np.load(path, mmap_mode="r")  # Readable after the folder is removed, as it is mapped.
    reader = training_segments(
        text,
        batch_size=train.batch_size,
        segment_len=train.segment_len,
        stride=train.stride,
        seed=components.config.seed,
        roll=data.roll,
        sentence_starts=np.append(np.arange(0, length, _SENTENCE_TOKENS), length)
        if data.order is Order.SENTENCES
        else None,
    )
    steps = itertools.count(step=train.segments_per_call)

    def call() -> None:
        jax.block_until_ready(components.placement.place(reader.segments(next(steps), train.segments_per_call)))

    start = time.monotonic()
    call()  # The first call prepares an epoch's order.
    return Task(
        name="data loading",
        shape=f"{train.batch_size} x {train.segment_len}",
        mem_len=train.mem_len,
        tokens=tokens_per_call,
        call=call,
        compile_seconds=time.monotonic() - start,
    )


def training(components: RunComponents) -> Task:
    """Runs whole updates: forward, backward, optimizer and memory. Tokens that are read again (stride) do not count."""
    train = components.config.train
    compilation = components.training.compile_step()
    train_step = compilation.program
    state = components.training.init_state()
    segments = random_segments(training_segments, components, train)
    scratch = compilation.temporary_bytes
    per_position = flops.of_training(
        components.config.model,
        vocab_size=components.model.vocab_size,
        segment_len=train.segment_len,
        mem_len=train.mem_len,
        same_length=train.same_length,
    )

    def call() -> None:
        nonlocal state
        state, metrics = train_step(state, segments)
        jax.block_until_ready((state, metrics))

    return Task(
        name="training",
        shape=f"{train.batch_size} x {train.segment_len}",
        mem_len=train.mem_len,
        tokens=train.batch_size * train.new_tokens * train.segments_per_call,
        call=call,
        compile_seconds=compilation.seconds,
        memory_bytes=None if scratch is None else scratch + bytes_on_device(state),
        flops_per_token=per_position * train.segment_len / train.new_tokens,
    )


def evaluation(components: RunComponents, params: Any) -> Task:
    """Runs streaming evaluation at the evaluation lengths, with a full memory.

    Raises:
      UserError: the config asks for evaluation in sliding windows.
    """
    eval_config = components.config.eval
    require(
        not eval_config.stride,
        f"eval.stride is {eval_config.stride} and this benchmark measures evaluation with a memory; leave it out",
    )
    weights = components.evaluation.prepare_params(params)
    memory = components.evaluation.init_memory(weights)
    memory = memory.replace(valid=memory.valid * 0 + eval_config.mem_len)
    segments = random_segments(evaluation_segments, components, eval_config)
    segments = segments._replace(reset=segments.reset & False)
    eval_step: Any = components.evaluation.eval_step
    start = time.monotonic()
    step = eval_step.lower(weights, memory, segments).compile()
    compile_seconds = time.monotonic() - start

    def call() -> None:
        nonlocal memory
        memory, scores = step(weights, memory, segments)
        jax.block_until_ready((memory, scores))

    return Task(
        name="evaluation",
        shape=f"{eval_config.batch_size} x {eval_config.segment_len}",
        mem_len=eval_config.mem_len,
        tokens=eval_config.batch_size * eval_config.segment_len * eval_config.segments_per_call,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=_program_bytes(step),
        flops_per_token=_inference_flops(components, segment_len=eval_config.segment_len),
    )


def generation(components: RunComponents, params: Any, *, every_tail: bool = False) -> Task:
    """Generates token after token from a full memory, all samples side by side, drawn as set in `config.generate`.

    `every_tail` raises the probability of the tails of an adaptive softmax so far that with top-k every tail is read
    for every token. With untrained weights hardly any is.
    """
    if every_tail:
        params = with_every_tail(params)
    eval_config, config = components.config.eval, components.config.generate
    generator = make_generator(components)
    weights = generator.prepare_params(params)
    prompt = np.asarray(draw_tokens(components.model.vocab_size, eval_config.mem_len + 1))
    context = generator.read(weights, prompt)
    start = time.monotonic()
    arguments = 0, BLOCK
    write = generator.write.lower(weights.token, context, *arguments, count=BLOCK).compile()
    compile_seconds = time.monotonic() - start

    def call() -> None:
        nonlocal context
        context, tokens, _ = write(weights.token, context, *arguments)
        jax.block_until_ready((context, tokens))

    return Task(
        name="generation, every tail read" if every_tail else "generation",
        shape=f"{config.samples} x 1",
        mem_len=eval_config.mem_len,
        tokens=config.samples * BLOCK,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=_program_bytes(write),
        flops_per_token=_inference_flops(components, segment_len=1),
        bytes_per_step=bytes_on_device(
            (weights.token.layers, weights.token.clusters[: None if every_tail else 1], context.memory)
        ),
        first_token_seconds=_first_token_seconds(generator, weights, prompt),
    )


def make_generator(components: RunComponents) -> Generator:
    """Returns the generator of a run's model, with the settings of its config."""
    return Generator(
        cast(TransformerXL, components.model),
        components.config.eval,
        components.config.generate,
        memory_dtype=components.evaluation.memory_dtype,
        mesh=components.mesh,
    )


def with_every_tail(params: Any) -> Any:
    """Returns parameters with which greedy and top-k sampling read every tail of the softmax for every token."""
    params = jax.tree.map(lambda leaf: leaf, params)  # A tree of its own; the arrays are the same.
    params["softmax"]["tail_bias"] = params["softmax"]["tail_bias"] + _TAIL_BIAS
    return params


def random_segments(
    make_reader: Callable[..., SegmentReader], components: RunComponents, lengths: TrainConfig | EvalConfig
) -> Segments:
    """Returns S segments of random tokens on the devices."""
    n_tokens = lengths.batch_size * lengths.segment_len * lengths.segments_per_call
    tokens = draw_tokens(components.model.vocab_size, n_tokens + 1)
    reader = make_reader(tokens, batch_size=lengths.batch_size, segment_len=lengths.segment_len)
    return components.placement.place(reader.segments(0, lengths.segments_per_call))


def _first_token_seconds(generator: Generator, weights: Any, prompt: np.ndarray) -> float:
    """Measures the latency from a prompt to its first token, after one call that compiles."""
    for _ in range(2):
        start = time.perf_counter()
        next(generator.tokens(weights, prompt, block=1))
        seconds = time.perf_counter() - start
    return seconds


def _inference_flops(components: RunComponents, *, segment_len: int) -> float:
    """Computes operations per token at the evaluation lengths."""
    eval_config = components.config.eval
    return flops.of_inference(
        components.config.model,
        vocab_size=components.model.vocab_size,
        segment_len=segment_len,
        mem_len=eval_config.mem_len,
        same_length=eval_config.same_length,
    )


def _program_bytes(compiled: Any) -> int | None:
    """Returns the bytes that a compiled program needs on a device, donated arguments counted once."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    sizes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return sizes - found.alias_size_in_bytes
