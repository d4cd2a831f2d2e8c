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

from txl_jax import cli
from txl_jax.bench import throughput
from txl_jax.bench.synthetic_tokens import default_vocab_size
from txl_jax.bench.throughput import Task, Throughput
from txl_jax.cli import setting
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig
from txl_jax.inference.generator import Weights
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.serving.row_step import Rows, Step

GROUPS = ("data", "model", "eval", "mesh")
DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
_HEAD = "| rows | tokens/s | slowest | fastest | processor time per token |\n|---|---|---|---|---|"


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    rows: int = setting(16, "Rows that are compared with one.", at_least=2)
    calls: int = setting(5, "Timed calls of each, interleaved; a call draws 8 tokens of every row.", at_least=1)
    warmup: int = setting(1, "Warm-up calls before the timed ones.", at_least=0)
    vocab_size: int | None = setting(
        None, "V; none: the size published with the corpus, or 256 where there is none.", at_least=2
    )


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark with the settings of the flags."""
    benchmark(job.config(), plan)


def benchmark(config: ExperimentConfig, plan: Plan) -> float:
    """Times both steps with untrained weights, full memories and greedy draws; returns the speedup.

    Tails of an adaptive softmax are all read, for every token.
    """
    check_can_generate(config)
    components = build(config, vocab_size=plan.vocab_size or default_vocab_size(config.data.corpus))
    params = components.training.init_params()
    if config.model.cutoffs:
        params = throughput.with_every_tail(params)
    facts = environment.describe()
    print(f"{components.num_parameters:,} parameters, vocabulary {components.model.vocab_size:,}, {config.model.dtype}")
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    steps = [Step(components, batch_size=rows) for rows in (plan.rows, 1)]
    weights = steps[0].prepare_params(params)
    processor: list[list[float]] = [[] for _ in steps]
    tasks = [_task(components, step, weights, own) for step, own in zip(steps, processor, strict=True)]
    found = throughput.measure_interleaved(tasks, warmup=plan.warmup, calls=plan.calls)
    print(_HEAD)
    for step, measured, seconds in zip(steps, found, processor, strict=True):
        print(_format_row(step.batch_size, measured, statistics.median(seconds[plan.warmup :])))
    speedup = statistics.median(
        many / one for many, one in zip(*(each.tokens_per_second for each in found), strict=True)
    )
    print(f"\n{plan.rows} rows: {speedup:.2f} times the throughput of one request at a time")
    return speedup


def _task(components: RunComponents, step: Step, weights: Weights, processor: list[float]) -> Task:
    """Returns the task of drawing K tokens of every row; appends the processor seconds of each call."""
    rows, rings = Rows.idle(step.batch_size), step.init_rings(weights)
    rows.position[:], rows.steps[:] = 2 * step.capacity, step.block
    rows.last[:] = np.arange(step.batch_size) % components.model.vocab_size
    held = [rings]

    def call() -> None:
        start = time.process_time()
        held[0], _, _ = step.write(weights, held[0], rows)
        processor.append(time.process_time() - start)

    shape, tokens = f"{step.batch_size} x 1", step.batch_size * step.block
    return Task(name="serving", shape=shape, mem_len=step.mem_len, tokens=tokens, call=call)


def _format_row(rows: int, measured: Throughput, processor: float) -> str:
    rates = measured.tokens_per_second
    return (
        f"| {rows} | {measured.median:,.4g} | {min(rates):,.4g} | {max(rates):,.4g} | "
        f"{processor / measured.task.tokens * 1e3:.3g} ms |"
    )


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
