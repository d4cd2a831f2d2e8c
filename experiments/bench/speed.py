"""Throughput in tokens per second of data loading, training, evaluation and generation, of a flagfile or other flags.

    python -m experiments.bench.speed --flagfile=enwik8_12l
    python -m experiments.bench.speed --flagfile=small --tasks=training,generation --calls=10
    python -m experiments.bench.speed --flagfile=wt103_base --peer=hf --tasks=evaluation,generation --json=speed.json

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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from experiments.bench import huggingface, timing
from experiments.bench.huggingface import HuggingFaceModel
from experiments.bench.timing import Task, Timing
from txl_jax import cli, flops
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, Order
from txl_jax.config import settings as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.data.segments import training_segments
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.inference.generator import Generator
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.train import step_cost
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write_json

DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
GROUPS = ("data", "model", "train", "eval", "generate", "mesh")
TASKS = ("data_loading", "training", "evaluation", "generation")
BLOCK = 16  # Tokens that generation writes per call.
_TEXT_TOKENS = 20_000_000
_SENTENCE_TOKENS = 25
_HEAD = "| task | rows x segment | memory | tokens/s | slowest | fastest | compiled in | needs |"
_HEAD_WITH_PEER = "| task | rows x segment | memory | tokens/s | peer's | speedup | lowest | highest |"
_RULE = "|---|---|---|---|---|---|---|---|"


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
    vocab_size: int | None = setting(None, timing.VOCAB_SIZE_HELP, at_least=2)
    peer: Peer | None = setting(None, "Compare with Hugging Face's TransfoXLLMHeadModel; without data_loading.")
    json: str | None = setting(None, "File for all figures; none: only the table.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for an unknown task, or settings that do not go together."""
        check_fields(self, "")
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
    """Runs the benchmark with the settings of the flags."""
    benchmark(job.config(), plan)


def benchmark(config: ExperimentConfig, plan: Plan) -> dict[str, Any]:
    """Measures the tasks with untrained weights, prints a table, writes the JSON file and returns its figures.

    Raises:
      UserError: If a task cannot run with the settings, or the peer computes other losses.
    """
    if plan.peer:
        config = huggingface.with_peer_compat(config)
    if "generation" in plan.chosen_tasks:
        check_can_generate(config)
    vocab_size = plan.vocab_size or timing.default_vocab_size(config.data.corpus)
    components = build(config, vocab_size=vocab_size)
    facts = environment.describe()
    print(f"{components.num_parameters:,} parameters, vocabulary {vocab_size:,}, {config.model.dtype}")
    print(f"{facts['devices']} x {timing.describe(facts)}\n")
    record = facts | {"vocab_size": vocab_size, "config": config_tree.to_dict(config)}
    peer = None
    if plan.peer:
        params = components.training.init_params()
        peer = HuggingFaceModel(config, params, vocab_size=vocab_size)
        worst = huggingface.print_difference(components, params, peer)
        peer.fill_memory(seed=0)
        record |= {"peer": peer.versions(), "largest_difference_nats": worst}
    print(f"{_HEAD_WITH_PEER if peer else _HEAD}\n{_RULE}")
    found: list[Timing] = []
    record |= {"plan": config_tree.to_dict(plan), "tasks": []}
    for name in plan.chosen_tasks:
        for task in tasks(name, components):
            sides = [task, huggingface.peer_task(name, task, components, peer)] if peer else [task]
            ours, *theirs = timing.interleaved(sides, warmup=plan.warmup, calls=plan.calls)
            found.append(ours)
            record["tasks"].append(_compare(ours, *theirs) if theirs else _print_alone(ours))
    print()
    for measured in found:
        print_remarks(measured, components, facts["device"], with_peer=peer is not None)
    if plan.json:
        write_json(plan.json, record)
        print(f"\nresults   {plan.json}")
    return record


def _print_alone(measured: Timing) -> dict[str, Any]:
    """Prints the table row of a task; returns its record."""
    task = measured.task
    needs = "" if task.memory_bytes is None else environment.megabytes(task.memory_bytes)
    rates = (measured.rate, min(measured.rates), max(measured.rates))
    _print_row(task, *(f"{rate:,.4g}" for rate in rates), f"{task.compile_seconds:.1f} s", needs)
    return measured.as_record()


def _compare(ours: Timing, theirs: Timing) -> dict[str, Any]:
    """Prints the table row of a task with the peer's; returns its record."""
    speedups = ours.speedups(theirs)
    speedup = statistics.median(speedups)
    ratios = (f"{ratio:.2f}" for ratio in (speedup, min(speedups), max(speedups)))
    _print_row(ours.task, f"{ours.rate:,.4g}", f"{theirs.rate:,.4g}", *ratios)
    return {"ours": ours.as_record(), "peer": theirs.as_record(), "speedup": speedup, "speedups": speedups}


def _print_row(task: Task, *cells: str) -> None:
    print(f"| {' | '.join((task.name, task.shape, str(task.mem_len), *cells))} |", flush=True)


def print_remarks(measured: Timing, components: RunComponents, device: str, *, with_peer: bool) -> None:
    """Prints latency, memory bandwidth and FLOP/s of a task, where they are known.

    The peer's table has no columns for compile time and memory, so they are remarks too.
    """
    task = measured.task
    if with_peer:
        needs = "" if task.memory_bytes is None else f", needs {environment.megabytes(task.memory_bytes)}"
        print(f"{task.name}: compiled in {task.compile_seconds:.1f} s{needs}")
    if task.first_token_seconds is not None:
        prompt_len = task.mem_len + 1
        print(f"{task.name}: first token {task.first_token_seconds:.3f} s after a prompt of {prompt_len} tokens")
    if task.bytes_per_step is not None:
        bandwidth = task.bytes_per_step * measured.rate / components.config.generate.samples
        print(f"{task.name}: {task.bytes_per_step:,} bytes read per step, {bandwidth / 1e9:.1f} GB/s")
    if task.flops_per_token is not None and not device.startswith("CPU"):
        achieved = task.flops_per_token * measured.rate / components.mesh.size
        peak = flops.device_peak(device)
        share = f", {achieved / peak:.1%} of its peak in bfloat16 (MFU)" if peak else ""
        print(
            f"{task.name}: {task.flops_per_token / 1e6:,.1f} million operations per token, "
            f"{achieved / 1e12:.1f} TFLOP/s per device{share}"
        )


def tasks(name: str, components: RunComponents) -> Iterator[Task]:
    """Yields the tasks of a name.

    Generation skips tails that cannot matter, so a model with tails has both extremes.
    """
    match name:
        case "data_loading":
            yield data_loading(components)
        case "training":
            yield training(components)
        case "evaluation":
            yield evaluation(components, components.training.init_params())
        case _:
            for every_tail in (False, True) if components.config.model.cutoffs else (False,):
                yield generation(components, components.training.init_params(), every_tail=every_tail)


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
        jax.block_until_ready(components.placement.place(reader.segments(next(steps), train.segments_per_call)))

    start = time.monotonic()
    call()  # The first call prepares an epoch's order.
    shape, seconds = f"{train.batch_size} x {train.segment_len}", time.monotonic() - start
    return Task("data loading", shape, train.mem_len, tokens_per_call, call, compile_seconds=seconds)


def training(components: RunComponents) -> Task:
    """Runs whole updates: forward, backward, optimizer and memory. Tokens that are read again (stride) do not count."""
    train, cost = components.config.train, step_cost(components)
    compilation = components.training.compile_step()
    state = components.training.init_state()
    segments = timing.random_segments(components, train)
    scratch = compilation.temporary_bytes

    def call() -> None:
        nonlocal state
        state, metrics = compilation.program(state, segments)
        jax.block_until_ready((state, metrics))

    return Task(
        name="training",
        shape=f"{train.batch_size} x {train.segment_len}",
        mem_len=train.mem_len,
        tokens=cost.tokens * train.segments_per_call,
        call=call,
        compile_seconds=compilation.seconds,
        memory_bytes=None if scratch is None else scratch + environment.bytes_on_device(state),
        flops_per_token=cost.flops and cost.flops / cost.tokens,
    )


def evaluation(components: RunComponents, params: Any) -> Task:
    """Runs streaming evaluation at the evaluation lengths, with a full memory.

    Raises:
      UserError: If the config asks for evaluation in sliding windows.
    """
    eval_config = components.config.eval
    require(
        not eval_config.stride,
        f"eval.stride is {eval_config.stride} and this benchmark measures evaluation with a memory; leave it out",
    )
    weights = components.evaluation.prepare_params(params)
    memory = components.evaluation.init_memory(weights)
    memory = memory.replace(valid=memory.valid * 0 + eval_config.mem_len)
    segments = timing.random_segments(components, eval_config)
    segments = segments._replace(reset=segments.reset & False)
    eval_step: Any = components.evaluation.eval_step  # It is jitted, which its type does not show.
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
        tokens=eval_config.batch_size * eval_config.segment_len * SEGMENTS_PER_CALL,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=timing.program_bytes(step),
        flops_per_token=_inference_flops(components, segment_len=eval_config.segment_len),
    )


def generation(components: RunComponents, params: Any, *, every_tail: bool = False) -> Task:
    """Generates token after token from a full memory, all samples side by side, drawn as set in `config.generate`.

    `every_tail` raises the probability of the tails of an adaptive softmax so far that with top-k every tail is read
    for every token. With untrained weights hardly any is.
    """
    if every_tail:
        params = timing.with_every_tail(params)
    mem_len, samples = components.config.eval.mem_len, components.config.generate.samples
    generator = make_generator(components)
    weights = generator.prepare_params(params)
    prompt = timing.draw_tokens(components.model.vocab_size, mem_len + 1)
    context = generator.read(weights, prompt)
    start = time.monotonic()
    write = generator.write.lower(weights.token, context, 0, BLOCK, count=BLOCK).compile()
    compile_seconds = time.monotonic() - start

    def call() -> None:
        nonlocal context
        context, tokens, _ = write(weights.token, context, 0, BLOCK)
        jax.block_until_ready((context, tokens))

    for _ in range(2):  # The first compiles.
        start = time.perf_counter()
        next(generator.tokens(weights, prompt, block=1))
        first_token_seconds = time.perf_counter() - start
    read = weights.token.layers, weights.token.clusters[: None if every_tail else 1], context.memory
    return Task(
        name="generation, every tail read" if every_tail else "generation",
        shape=f"{samples} x 1",
        mem_len=mem_len,
        tokens=samples * BLOCK,
        call=call,
        compile_seconds=compile_seconds,
        memory_bytes=timing.program_bytes(write),
        flops_per_token=_inference_flops(components, segment_len=1),
        bytes_per_step=environment.bytes_on_device(read),
        first_token_seconds=first_token_seconds,
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


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
