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
from collections.abc import Iterator
from typing import Any

from txl_jax import cli, flops
from txl_jax.bench import compare_huggingface, throughput
from txl_jax.bench.compare_huggingface import Comparison
from txl_jax.bench.huggingface_model import HuggingFaceModel
from txl_jax.bench.synthetic_tokens import default_vocab_size
from txl_jax.bench.throughput import Task, Throughput
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write_json

DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
GROUPS = ("data", "model", "train", "eval", "generate", "mesh")
TASKS = ("data_loading", "training", "evaluation", "generation")
_HEAD = "| task | rows x segment | memory | tokens/s | slowest | fastest | compiled in | needs |"
_HEAD_OF_COMPARISON = "| task | rows x segment | memory | tokens/s | peer's | speedup | lowest | highest |"
_RULE = "|---|---|---|---|---|---|---|---|"


class Peer(enum.StrEnum):
    """Implementations to compare with."""

    HUGGINGFACE = "hf"


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    tasks: tuple[str, ...] = setting((), f"Tasks to time, with commas ({', '.join(TASKS)}); default: all.")
    calls: int = setting(5, "Timed calls of each task; a call is segments_per_call segments, or 16 tokens.", at_least=1)
    warmup: int = setting(2, "Warm-up calls before the timed ones.", at_least=0)
    vocab_size: int | None = setting(
        None, "V; none: the size published with the corpus, or 256 where there is none.", at_least=2
    )
    peer: Peer | None = setting(None, "Compare with Hugging Face's TransfoXLLMHeadModel; without data_loading.")
    json: str | None = setting(None, "File for all figures; none: only the table.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for an unknown task, or settings that do not go together."""
        check_fields(self, "")
        for name in self.tasks:
            near = config_tree.did_you_mean(name, TASKS)
            require(name in TASKS, f"tasks has {name!r}; it must be of {', '.join(TASKS)}{near}")
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
        config = compare_huggingface.with_peer_compat(config)
        compare_huggingface.check_generation_settings(config)
    if "generation" in plan.chosen_tasks:
        check_can_generate(config)
    vocab_size = plan.vocab_size or default_vocab_size(config.data.corpus)
    components = build(config, vocab_size=vocab_size)
    facts = environment.describe()
    print(f"{components.num_parameters:,} parameters, vocabulary {vocab_size:,}, {config.model.dtype}")
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    measure = compare_with_peer if plan.peer else measure_alone
    settings = {"vocab_size": vocab_size, "config": config_tree.to_dict(config), "plan": config_tree.to_dict(plan)}
    record = facts | measure(components, plan, facts["device"]) | settings
    if plan.json:
        write_json(plan.json, record)
        print(f"\nresults   {plan.json}")
    return record


def measure_alone(components: RunComponents, plan: Plan, device: str) -> dict[str, Any]:
    """Measures task after task; prints one table row per task."""
    print(f"{_HEAD}\n{_RULE}")
    found = []
    for name in plan.chosen_tasks:
        for task in _tasks(name, components):
            [measured] = throughput.measure_interleaved([task], warmup=plan.warmup, calls=plan.calls)
            found.append(measured)
            print(format_row(measured), flush=True)
    print()
    for measured in found:
        for line in format_remarks(measured, components, device):
            print(line)
    return {"tasks": [measured.as_record() for measured in found]}


def compare_with_peer(components: RunComponents, plan: Plan, device: str) -> dict[str, Any]:
    """Checks that the peer has the same losses and measures our tasks and its own, interleaved; one row per task."""
    params = components.training.init_params()
    peer = compare_huggingface.make_peer(components, params, components.config.eval)
    worst = compare_huggingface.check_same_losses(components, params, peer)
    versions = ", ".join(f"{name} {value}" for name, value in peer.versions().items())
    print(f"peer: {versions}; --compat=hf on both sides\nlargest difference of a token's loss: {worst:.1e} nats")
    cache_dtype = components.evaluation.memory_dtype
    if cache_dtype != components.config.model.dtype:
        effect = compare_huggingface.effect_of_cache_dtype(components, params)
        print(f"storing keys and values as {cache_dtype} changes a token's loss by up to {effect:.1e} nats")
    print(f"\n{_HEAD_OF_COMPARISON}\n{_RULE}")
    comparisons = []
    for name in plan.chosen_tasks:
        for pair in _task_pairs(name, components, params, peer):
            ours, theirs = throughput.measure_interleaved(pair, warmup=plan.warmup, calls=plan.calls)
            comparisons.append(Comparison(ours, theirs))
            print(format_comparison(comparisons[-1]), flush=True)
    print()
    for comparison in comparisons:
        lines = format_remarks(comparison.ours, components, device)
        for line in [format_compilation(comparison.ours.task), *lines]:
            print(line)
    records = [comparison.as_record() for comparison in comparisons]
    return {"peer": peer.versions(), "largest_difference_nats": worst, "tasks": records}


def format_row(measured: Throughput) -> str:
    """Formats the table row of a task."""
    task, rates = measured.task, measured.tokens_per_second
    compiled = "" if task.compile_seconds is None else f"{task.compile_seconds:.1f} s"
    needs = "" if task.memory_bytes is None else environment.megabytes(task.memory_bytes)
    return (
        f"| {task.name} | {task.shape} | {task.mem_len} | {measured.median:,.4g} | {min(rates):,.4g} | "
        f"{max(rates):,.4g} | {compiled} | {needs} |"
    )


def format_comparison(comparison: Comparison) -> str:
    """Formats the table row of a task beside the peer's."""
    task, speedups = comparison.ours.task, comparison.speedups
    return (
        f"| {task.name} | {task.shape} | {task.mem_len} | {comparison.ours.median:,.4g} | "
        f"{comparison.peer.median:,.4g} | {comparison.speedup:.2f} | {min(speedups):.2f} | {max(speedups):.2f} |"
    )


def format_compilation(task: Task) -> str:
    """Formats compile time and memory of a task, for which the table of a comparison has no columns."""
    needs = "" if task.memory_bytes is None else f", needs {environment.megabytes(task.memory_bytes)}"
    return f"{task.name}: compiled in {task.compile_seconds:.1f} s{needs}"


def format_remarks(measured: Throughput, components: RunComponents, device: str) -> list[str]:
    """Formats latency, memory bandwidth and FLOP/s of a task, where they are known."""
    task, lines = measured.task, []
    if task.first_token_seconds is not None:
        prompt_len = task.mem_len + 1
        lines.append(f"{task.name}: first token {task.first_token_seconds:.3f} s after a prompt of {prompt_len} tokens")
    if task.bytes_per_step is not None:
        bandwidth = task.bytes_per_step * measured.median / components.config.generate.samples
        lines.append(f"{task.name}: {task.bytes_per_step:,} bytes read per step, {bandwidth / 1e9:.1f} GB/s")
    if task.flops_per_token is not None and not device.startswith("CPU"):
        achieved = task.flops_per_token * measured.median / components.mesh.size
        peak = flops.device_peak(device)
        share = f", {achieved / peak:.1%} of its peak in bfloat16 (MFU)" if peak else ""
        lines.append(
            f"{task.name}: {task.flops_per_token / 1e6:,.1f} million operations per token, "
            f"{achieved / 1e12:.1f} TFLOP/s per device{share}"
        )
    return lines


def _tasks(name: str, components: RunComponents) -> Iterator[Task]:
    """Yields the tasks of a name; generation may be two."""
    match name:
        case "data_loading":
            yield throughput.data_loading(components)
        case "training":
            yield throughput.training(components)
        case "evaluation":
            yield throughput.evaluation(components, components.training.init_params())
        case _:
            for every_tail in _tail_choices(components):
                params = components.training.init_params()
                yield throughput.generation(components, params, every_tail=every_tail)


def _task_pairs(
    name: str, components: RunComponents, params: Any, peer: HuggingFaceModel
) -> Iterator[tuple[Task, Task]]:
    """Yields our task and the peer's."""
    match name:
        case "training":
            yield compare_huggingface.training(components, params)
        case "evaluation":
            yield compare_huggingface.evaluation(components, params, peer)
        case _:
            for every_tail in _tail_choices(components):
                yield compare_huggingface.generation(components, params, peer, every_tail=every_tail)


def _tail_choices(components: RunComponents) -> tuple[bool, ...]:
    """Returns the values of `every_tail` to time: generation skips tails that cannot matter, so both extremes."""
    return (False, True) if components.config.model.cutoffs else (False,)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
