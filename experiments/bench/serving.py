"""Throughput of serving: rows of the compiled step side by side, beside one request at a time.

    python -m experiments.bench.serving --flagfile=wt103_base
    python -m experiments.bench.serving --flagfile=enwik8_12l --rows=16 --calls=9

Weights are untrained, memories full, draws greedy; every tail of an adaptive softmax is read. It prints a markdown
table, medians over calls, and the speedup: the median of the ratios of successive calls.
"""

import dataclasses
import statistics
import time

import numpy as np

from experiments.bench import timing
from experiments.bench.speed import DEFAULTS
from experiments.bench.timing import Task
from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig
from txl_jax.inference.generator import Weights
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.serving.row_step import Rows, Step


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    rows: int = setting(16, "Rows that are compared with one.", at_least=2)
    calls: int = setting(5, "Timed calls of each, interleaved; a call draws 8 tokens of every row.", at_least=1)
    warmup: int = setting(1, "Warm-up calls before the timed ones.", at_least=0)
    vocab_size: int | None = setting(None, timing.VOCAB_SIZE_HELP, at_least=2)


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark with the settings of the flags."""
    benchmark(job.config(), plan)


def benchmark(config: ExperimentConfig, plan: Plan) -> float:
    """Times both steps with untrained weights, full memories and greedy draws; returns the speedup."""
    check_can_generate(config)
    components = build(config, vocab_size=plan.vocab_size or timing.default_vocab_size(config.data.corpus))
    params = components.training.init_params()
    if config.model.cutoffs:
        params = timing.with_every_tail(params)
    facts = environment.describe()
    print(f"{components.num_parameters:,} parameters, vocabulary {components.model.vocab_size:,}, {config.model.dtype}")
    print(f"{facts['devices']} x {timing.describe(facts)}\n")
    steps = [Step(components, batch_size=rows) for rows in (plan.rows, 1)]
    weights = steps[0].prepare_params(params)
    processor: list[list[float]] = [[] for _ in steps]  # Seconds of each call.
    tasks = [_task(components, step, weights, own) for step, own in zip(steps, processor, strict=True)]
    many, one = found = timing.interleaved(tasks, warmup=plan.warmup, calls=plan.calls)
    print("| rows | tokens/s | slowest | fastest | processor time per token |\n|---|---|---|---|---|")
    for step, measured, seconds in zip(steps, found, processor, strict=True):
        per_token = statistics.median(seconds[plan.warmup :]) / measured.task.tokens
        print(
            f"| {step.batch_size} | {measured.rate:,.4g} | {min(measured.rates):,.4g} | {max(measured.rates):,.4g} | "
            f"{per_token * 1e3:.3g} ms |"
        )
    speedup = statistics.median(many.speedups(one))
    print(f"\n{plan.rows} rows: {speedup:.2f} times the throughput of one request at a time")
    return speedup


def _task(components: RunComponents, step: Step, weights: Weights, processor: list[float]) -> Task:
    """Returns the task of drawing K tokens of every row; appends the processor seconds of each call."""
    rows, rings = Rows.idle(step.batch_size), step.init_rings(weights)
    rows.position[:], rows.steps[:] = 2 * step.capacity, step.block
    rows.last[:] = np.arange(step.batch_size) % components.model.vocab_size

    def call() -> None:
        nonlocal rings
        start = time.process_time()
        rings, _, _ = step.write(weights, rings, rows)
        processor.append(time.process_time() - start)

    return Task("serving", f"{step.batch_size} x 1", step.mem_len, step.batch_size * step.block, call)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=("data", "model", "eval", "mesh"))
