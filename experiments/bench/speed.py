"""Throughput in tokens per second of data loading, training, evaluation and generation, of a flagfile or other flags.

    python -m experiments.bench.speed --flagfile=enwik8_12l
    python -m experiments.bench.speed --flagfile=small --tasks=training,generation --calls=10
    python -m experiments.bench.speed --flagfile=wt103_base --peer=hf --tasks=evaluation,generation

Tokens are random, as frequent as words are (`experiments.bench.softmax_speed` prints the law), weights untrained,
memories full. It prints a markdown table: the median over calls, after warm-up, with the slowest and the fastest call.
Evaluation and generation use --eval.* and --generate.*, training --train.*.

Generation reads a tail of the adaptive softmax only when it may matter, with untrained weights almost never; so it is
timed a second time with weights with which every tail is read.

With --peer=hf Hugging Face's TransfoXLLMHeadModel (pip install '.[peer]') gets the same weights. That both give the
same losses is checked first, then their calls are interleaved; the table has the speedup.
"""

import dataclasses
import enum
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench import huggingface, timing
from experiments.bench.timing import Task, Timing
from txl_jax import cli, flops
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, GenerateConfig, Order
from txl_jax.config.config_tree import require, setting
from txl_jax.data.segments import training_segments
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.inference.decode import Limits, Rows, row_key
from txl_jax.runs.build import Built, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment

DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
GROUPS = ("data", "model", "train", "eval", "generate", "mesh")
TASKS = ("data_loading", "training", "evaluation", "generation")
BLOCK = 16  # Tokens that generation writes per call.
_TEXT_TOKENS = 20_000_000
_SENTENCE_TOKENS = 25
_COLUMNS = "task | rows x segment | memory | tokens/s | slowest | fastest | needs"
_COLUMNS_WITH_PEER = "task | rows x segment | memory | tokens/s | peer's | speedup | lowest | highest"


class Peer(enum.StrEnum):
    """Implementations to compare with."""

    HUGGINGFACE = "hf"


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    tasks: tuple[str, ...] = setting((), f"Tasks to time, with commas ({', '.join(TASKS)}); default: all.")
    calls: int = setting(
        5, "Timed calls of each task: train.segments_per_call or 8 segments, or 16 tokens.", at_least=1
    )
    warmup: int = setting(2, "Warm-up calls before the timed ones.", at_least=0)
    peer: Peer | None = setting(None, "Compare with Hugging Face's TransfoXLLMHeadModel; without data_loading.")

    def validate(self) -> None:
        """Raises `UserError` for an unknown task, or settings that do not go together."""
        super().validate()
        timing.check_names("tasks", self.chosen_tasks, TASKS)
        if self.peer:
            require(
                "data_loading" not in self.tasks,
                "tasks has data_loading and the peer has none; leave it out, or benchmark without --peer",
            )
            require(self.warmup, "warmup is 0 and the peer's first call sets up its state; it must be at least 1")

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks to time."""
        return self.tasks or (TASKS[1:] if self.peer else TASKS)


def run(plan: Plan, job: cli.Job) -> None:
    """Measures the tasks with untrained weights and prints a table.

    Raises:
      UserError: If a task cannot run with the settings, or the peer computes other losses.
    """
    config = huggingface.with_peer_compat(job.config()) if plan.peer else job.config()
    if "generation" in plan.chosen_tasks:
        check_can_generate(config)
    components = build(config, vocab_size=timing.vocab_size_of(config.data.corpus))
    timing.print_head(components)
    peer = huggingface.checked_peer(components) if plan.peer else None
    found: list[Timing] = []
    timing.print_table(_COLUMNS_WITH_PEER if peer else _COLUMNS, _rows(plan, components, peer, found))
    if jax.default_backend() == "cpu":
        return
    print()
    peak = flops.device_peak(environment.device_kind())
    for measured in found:
        if operations := measured.task.flops_per_token:
            achieved = operations * measured.rate / components.mesh.size
            share = f", {achieved / peak:.1%} of its peak in bfloat16 (MFU)" if peak else ""
            print(
                f"{measured.task.name}: {operations / 1e6:,.1f} million operations per token, "
                f"{achieved / 1e12:.1f} TFLOP/s per device{share}"
            )


def _rows(
    plan: Plan, components: Built, peer: huggingface.HuggingFaceModel | None, found: list[Timing]
) -> Iterator[list[str]]:
    """Times the tasks and yields their rows; appends our timings to `found`."""
    for name in plan.chosen_tasks:
        for task in tasks(name, components):
            sides = [task, huggingface.peer_task(name, task, components, peer)] if peer else [task]
            ours, *theirs = timing.interleaved(sides, warmup=plan.warmup, calls=plan.calls)
            found.append(ours)
            if theirs:
                speedups = ours.speedups(theirs[0])
                ratios = (statistics.median(speedups), min(speedups), max(speedups))
                figures = [ours.cells[0], theirs[0].cells[0], *(f"{ratio:.2f}" for ratio in ratios)]
            else:
                needs = "" if task.memory_bytes is None else environment.megabytes(task.memory_bytes)
                figures = [*ours.cells, needs]
            yield [task.name, task.shape, str(task.mem_len), *figures]


def tasks(name: str, components: Built) -> Iterator[Task]:
    """Yields the tasks of a name. Generation skips tails that cannot matter: a model with tails has both extremes."""
    match name:
        case "data_loading":
            yield data_loading(components)
        case "training":
            yield training(components)
        case "evaluation":
            yield evaluation(components, components.init_params())
        case _:
            for every_tail in (False, True) if components.config.model.cutoffs else (False,):
                yield generation(components, components.init_params(), every_tail=every_tail)


def data_loading(components: Built) -> Task:
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
    sentence_starts = np.append(np.arange(0, length, _SENTENCE_TOKENS), length)
    reader = training_segments(
        text,
        batch_size=train.batch_size,
        segment_len=train.segment_len,
        stride=train.stride,
        seed=components.config.seed,
        roll=data.roll,
        sentence_starts=sentence_starts if data.order is Order.SENTENCES else None,
    )
    steps = itertools.count(step=train.segments_per_call)

    def call() -> None:
        jax.block_until_ready(components.place(reader.segments(next(steps), train.segments_per_call)))

    call()  # The first call prepares an epoch's order.
    return Task("data loading", tokens_per_call, call, f"{train.batch_size} x {train.segment_len}", train.mem_len)


def training(components: Built) -> Task:
    """Runs whole updates: forward, backward, optimizer and memory. Tokens that are read again (stride) do not count."""
    config, train = components.config, components.config.train
    cost = flops.of_step(config, vocab_size=components.model.vocab_size, n_device=components.mesh.size)
    compilation = components.compile_step()
    state, segments = components.init_state(), timing.random_segments(components, train)
    scratch = compilation.temporary_bytes

    def call() -> None:
        nonlocal state
        state, metrics = compilation.program(state, segments)
        jax.block_until_ready((state, metrics))

    return Task(
        name="training",
        tokens=cost.tokens * train.segments_per_call,
        call=call,
        shape=f"{train.batch_size} x {train.segment_len}",
        mem_len=train.mem_len,
        memory_bytes=None if scratch is None else scratch + environment.bytes_on_device(state),
        flops_per_token=cost.flops and cost.flops / cost.tokens,
    )


def evaluation(components: Built, params: Any) -> Task:
    """Runs streaming evaluation at the evaluation lengths, with a full memory.

    Raises:
      UserError: If the config asks for evaluation in sliding windows.
    """
    eval_config = components.config.eval
    require(
        not eval_config.stride,
        f"eval.stride is {eval_config.stride} and this benchmark measures evaluation with a memory; leave it out",
    )
    weights = components.prepare_params(params)
    memory = components.init_memory(weights)
    memory = memory.replace(valid=memory.valid * 0 + eval_config.mem_len)
    segments = timing.random_segments(components, eval_config)
    segments = segments._replace(reset=segments.reset & False)
    eval_step: Any = components.eval_step  # It is jitted, which its type does not show.
    step = eval_step.lower(weights, memory, segments).compile()

    def call() -> None:
        nonlocal memory
        memory, scores = step(weights, memory, segments)
        jax.block_until_ready((memory, scores))

    return Task(
        name="evaluation",
        tokens=eval_config.batch_size * eval_config.segment_len * SEGMENTS_PER_CALL,
        call=call,
        shape=f"{eval_config.batch_size} x {eval_config.segment_len}",
        mem_len=eval_config.mem_len,
        memory_bytes=timing.program_bytes(step),
        flops_per_token=_inference_flops(components, segment_len=eval_config.segment_len),
    )


def generation(components: Built, params: Any, *, every_tail: bool = False) -> Task:
    """Generates token after token from a full memory, all samples side by side, drawn as set in `config.generate`.

    `every_tail` raises the probability of the tails of an adaptive softmax so far that with top-k every tail is read
    for every token. With untrained weights hardly any is.
    """
    mem_len, samples = components.config.eval.mem_len, components.config.generate.samples
    params, how = timing.with_every_tail(params) if every_tail else params, components.config.generate
    generator = components.generator(components.prepare_params(params))
    cache = generator.read(timing.draw_tokens(components.model.vocab_size, mem_len + 1), how).cache
    rows, limits = generation_arguments(how)
    decode = generator.decode.lower(generator.for_tokens, cache, rows, limits, count=BLOCK).compile()

    def call() -> None:
        nonlocal cache
        cache, tokens, *_ = decode(generator.for_tokens, cache, rows)
        jax.block_until_ready((cache, tokens))

    return Task(
        name="generation, every tail read" if every_tail else "generation",
        tokens=samples * BLOCK,
        call=call,
        shape=f"{samples} x 1",
        mem_len=mem_len,
        memory_bytes=timing.program_bytes(decode),
        flops_per_token=_inference_flops(components, segment_len=1),
    )


def generation_arguments(config: GenerateConfig) -> tuple[Rows, Limits]:
    """Returns the arguments of a call that draws `BLOCK` tokens of each sample."""
    keys, zeros = np.stack([row_key(0, i) for i in range(config.samples)]), np.zeros(config.samples, np.int32)
    rows = Rows(zeros[:, None], zeros, zeros + BLOCK, keys, np.int32(-1))
    return rows, Limits.of(config)


def _inference_flops(components: Built, *, segment_len: int) -> float:
    """Computes operations per token at the evaluation lengths."""
    eval_config = components.config.eval
    return flops.of_inference(
        components.config.model,
        vocab_size=components.model.vocab_size,
        segment_len=segment_len,
        mem_len=eval_config.mem_len,
        same_length=eval_config.same_length,
    )


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
