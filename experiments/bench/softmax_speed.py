"""Time and memory of the adaptive softmax, forward and backward, beside the full softmax of the same vocabulary.

    python -m experiments.bench.softmax_speed
    python -m experiments.bench.softmax_speed --model.dtype=bfloat16 --calls=20

Without flags the sizes are from WikiText-103 and the paper's large model: hidden states of width 1024, tails of widths
256, 64 and 16, 60 x 150 tokens. Of the other settings only --model.d_embed, --model.cutoffs, --model.div_val,
--model.dtype, --train.batch_size and --train.segment_len matter here. Weights are untrained. Targets are drawn from a
law that is printed with the fraction of each cluster.

It prints a Markdown table. A softmax that does not fit in memory gets fewer tokens, and the table prints how many.
T is the number of tokens, D the width of their hidden states, V the vocabulary size.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import statistics
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config import ExperimentConfig, ModelConfig, TrainConfig
from txl_jax.config.config_tree import require
from txl_jax.modules.embedding import Softmax
from txl_jax.runtime.environment import megabytes

DEFAULTS = ExperimentConfig(
    model=ModelConfig(d_model=1024, cutoffs=(20_000, 40_000, 200_000), div_val=4),
    train=TrainConfig(batch_size=60, segment_len=150),
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    vocab_size: int = setting(267_735, "V, size of the vocabulary.", at_least=2)
    calls: int = setting(5, "Timed calls of each softmax, interleaved.", at_least=1)
    memory_gb: float | None = setting(
        None,
        "Memory limit of a softmax in GB (10^9 bytes); none: the accelerator's memory, or 70 % of a CPU's.",
        above=0,
    )


def run(plan: Plan, job: cli.Job) -> None:
    """Measures both softmaxes and prints a markdown table.

    Raises:
      UserError: If the settings have no adaptive softmax, or the memory limit is too small for one token.
    """
    config = job.config()
    adaptive = dataclasses.replace(config.model, tie_weight=False, tie_projs=())
    adaptive.validate()
    adaptive.validate_vocabulary(plan.vocab_size)
    require(adaptive.cutoffs, "model.cutoffs is empty; the adaptive softmax needs at least one")
    tokens = config.train.batch_size * config.train.segment_len
    limit = device_memory() if plan.memory_gb is None else int(plan.memory_gb * 1e9)

    law = timing.probabilities(plan.vocab_size)
    shares = (law[a:b].sum() for a, b in itertools.pairwise((0, *adaptive.cutoffs, plan.vocab_size)))
    print(
        f"{timing.machine()}\nvocabulary {plan.vocab_size:,}, width {adaptive.d_model}, {adaptive.dtype}, cutoffs "
        f"{[*adaptive.cutoffs]}\ntargets: p(rank) ~ 1 / (rank + {timing.SHIFT})^{timing.EXPONENT}; shares of head and "
        f"tails: {', '.join(f'{share:.1%}' for share in shares)}\n",
        flush=True,
    )
    models = {"adaptive": adaptive, "full": dataclasses.replace(adaptive, cutoffs=(), div_val=1)}
    whole = {name: Program(model, plan.vocab_size, tokens) for name, model in models.items()}
    programs = {name: largest_that_fits(program, limit) for name, program in whole.items()}
    peaks = [peak_of_a_process(program) for program in programs.values()]  # Before this process fills its memory.
    tasks = [Task(name, program.tokens, program.call) for name, program in programs.items()]
    rows = []
    for timed, peak in zip(timing.interleaved(tasks, warmup=1, calls=plan.calls), peaks, strict=True):
        task, seconds, median = timed.task, timed.seconds, statistics.median(timed.seconds)
        cells = [task.name, f"{task.tokens:,}", f"{median:.3g}", f"{max(seconds):.3g}", f"{min(seconds):.3g}"]
        cells += [f"{median / task.tokens * 1e6:,.0f} µs", megabytes(programs[task.name].memory_bytes)]
        rows.append([*cells, "" if peak is None else megabytes(peak)])
    columns = "softmax | tokens | seconds | slowest | fastest | per token | memory needed | peak of a process"
    timing.print_table(columns, rows)
    for name, program in programs.items():
        if program.tokens < tokens:
            needed, most = megabytes(whole[name].memory_bytes), megabytes(limit)
            print(f"\nThe {name} softmax of all {tokens:,} tokens would need {needed}; the limit is {most}.")


def device_memory() -> int:
    """Returns the memory limit in bytes: an accelerator's, or 70 % of a CPU's, which other processes use too."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return int(0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return device.memory_stats()["bytes_limit"]


@dataclasses.dataclass(frozen=True)
class Program:
    """Forward and backward pass of a softmax that shares nothing with the embedding."""

    config: ModelConfig
    vocab_size: int
    tokens: int  # T.

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The gradient of the mean nll with respect to parameters and hidden states; nothing is allocated."""

        def loss(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
            nll: Any = self._softmax.apply({"params": params}, hidden, targets, *self._untied, method="nll")
            return jnp.mean(nll)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*jax.eval_shape(self._draw)).compile()

    @functools.cached_property
    def memory_bytes(self) -> int:
        """Arguments, results and scratch, by the compiler's account."""
        return timing.program_bytes(self.compiled) or 0

    @functools.cached_property
    def _inputs(self) -> tuple[Any, jax.Array, jax.Array]:
        return self._draw()

    def call(self) -> None:
        """Runs both passes once."""
        jax.block_until_ready(self.compiled(*self._inputs))

    def _draw(self) -> tuple[Any, jax.Array, jax.Array]:
        """Returns parameters, hidden states [T, D] and targets [T]."""
        keys = jax.random.split(jax.random.key(0))
        targets = jnp.asarray(timing.draw_tokens(self.vocab_size, self.tokens))
        hidden = jax.random.normal(keys[0], (self.tokens, self.config.d_model), self.config.dtype)

        @jax.jit
        def init(key: jax.Array) -> Any:
            return nn.unbox(self._softmax.init(key, hidden[:1], targets[:1], *self._untied, method="nll"))["params"]

        return init(keys[1]), hidden, targets

    @property
    def _softmax(self) -> Softmax:
        return Softmax(self.config, self.vocab_size)

    @property
    def _untied(self) -> tuple[list[None], list[None]]:
        """The embedding's tables and projections, none of which is shared."""
        return [None] * (self.config.n_cluster if self.config.div_val > 1 else 1), [None] * self.config.n_cluster


def largest_that_fits(program: Program, limit: int) -> Program:
    """Compiles a program for its tokens, half of them, and so on, until it needs no more than the limit."""
    while program.memory_bytes > limit:
        require(
            program.tokens > 1,
            f"the memory limit is {limit:,} bytes and a softmax of one token needs {program.memory_bytes:,}; "
            "raise --memory_gb",
        )
        program = dataclasses.replace(program, tokens=program.tokens // 2)
    return program


def peak_of_a_process(program: Program) -> int | None:
    """Returns the peak memory of a fresh process that calls a program once, or None if it is not known.

    An accelerator's memory is not the process's.
    """
    if jax.default_backend() != "cpu":
        return None
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call_once, dataclasses.replace(program)).result()  # The copy, as nothing is compiled.


def _call_once(program: Program) -> int | None:
    """Calls a program; returns this process's peak memory. `resource.getrusage` would start with the parent's."""
    program.call()
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    return int(peak[1]) * 1024 if peak else None


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "train"))
