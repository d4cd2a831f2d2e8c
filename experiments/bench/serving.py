"""Measures serving throughput: multiple rows in one compiled step vs. one request at a time.

    python -m experiments.bench.serving --flagfile=wt103_base
    python -m experiments.bench.serving --flagfile=enwik8_12l --rows=16 --calls=9

Weights are untrained, memories are full, sampling is greedy, and every tail of an adaptive softmax
is read. The command prints a Markdown table of medians over calls, and the speedup: the median of
the ratios of successive calls.
"""

import dataclasses
import functools

import numpy as np

from experiments.bench import timing
from experiments.bench.speed import DEFAULTS
from experiments.bench.timing import Task
from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.runs.build import Built, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.serving.rows import PreparedParams, Rows, Step


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    rows: int = setting(16, "Number of rows to compare with one.", at_least=2)
    calls: int = setting(
        5, "Timed calls of each, interleaved. A call samples 8 tokens per row.", at_least=1
    )


def run(plan: Plan, job: cli.Job) -> None:
    """Times both steps with untrained weights, full memories and greedy sampling.

    Each step is called once before the timing, to warm up.
    """
    config = job.config()
    check_can_generate(config)
    built = build(config, vocab_size=timing.vocab_size_of(config.data))
    params = built.init_params()
    if config.model.cutoffs:
        params = timing.with_every_tail(params)
    timing.print_head(built)

    batched = Step(built, batch_size=plan.rows)
    single = Step(built, batch_size=1)
    prepared = batched.prepare_params(params)
    batched_task = _task(built, batched, prepared)
    single_task = _task(built, single, prepared)
    timing.time_in_turns([batched_task, single_task], warmup=1, calls=plan.calls)
    timing.print_table(
        "rows | tokens/s | slowest | fastest",
        [[str(plan.rows), *batched_task.cells], ["1", *single_task.cells]],
    )
    speedup = batched_task.speedup(single_task)
    print(f"\n{plan.rows} rows: {speedup:.2f} times the throughput of one request at a time")


def _task(built: Built, step: Step, prepared: PreparedParams) -> Task:
    """Returns the task of sampling K tokens of every row."""
    rows = Rows.idle(step.batch_size)
    # Positions at which every memory is full.
    rows.position[:] = 2 * step.capacity
    rows.steps[:] = step.block
    rows.last[:] = np.arange(step.batch_size) % built.model.vocab_size
    cache = step.init_cache(prepared)
    call = timing.repeated(functools.partial(step.write, prepared), cache, rows)
    return Task("serving", step.batch_size * step.block, call)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=("data", "model", "eval", "mesh"))
