"""Measures serving throughput: multiple rows in one compiled step vs. one request at a time.

    python -m experiments.bench.serving --flagfile=wt103_base
    python -m experiments.bench.serving --flagfile=enwik8_12l --rows=16 --calls=9

Weights are untrained, memories full, sampling is greedy, and every tail of an adaptive softmax is
read. It prints a Markdown table of medians over calls, and the speedup: the median of the ratios of
successive calls.
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
        5, "Timed calls of each, interleaved. A call samples 8 tokens of every row.", at_least=1
    )


def run(plan: Plan, job: cli.Job) -> None:
    """Times both steps with untrained weights, full memories and greedy sampling.

    Each step is called once before that to warm up.
    """
    config = job.config()
    check_can_generate(config)
    built = build(config, vocab_size=timing.vocab_size_of(config.data.corpus))
    params = built.init_params()
    params = timing.with_every_tail(params) if config.model.cutoffs else params
    timing.print_head(built)
    steps = [Step(built, batch_size=rows) for rows in (plan.rows, 1)]
    weights = steps[0].prepare_params(params)
    many, one = tasks = [_task(built, step, weights) for step in steps]
    timing.time_in_turns(tasks, warmup=1, calls=plan.calls)
    rows = ([str(step.batch_size), *task.cells] for step, task in zip(steps, tasks, strict=True))
    timing.print_table("rows | tokens/s | slowest | fastest", rows)
    print(
        f"\n{plan.rows} rows: {many.speedup(one):.2f} times the throughput of one request at a time"
    )


def _task(built: Built, step: Step, weights: PreparedParams) -> Task:
    """Returns the task of sampling K tokens of every row."""
    rows = Rows.idle(step.batch_size)
    rows.position[:], rows.steps[:] = 2 * step.capacity, step.block
    rows.last[:] = np.arange(step.batch_size) % built.model.vocab_size
    call = timing.repeated(functools.partial(step.write, weights), step.init_cache(weights), rows)
    return Task("serving", step.batch_size * step.block, call)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=("data", "model", "eval", "mesh"))
