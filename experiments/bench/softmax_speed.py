"""Time and memory of the adaptive softmax, forward and backward, beside the full softmax of the same vocabulary.

    python -m experiments.bench.softmax_speed
    python -m experiments.bench.softmax_speed --model.dtype=bfloat16 --calls=20

Without flags the sizes are from WikiText-103 and the paper's large model: hidden states of width 1024, tails of widths
256, 64 and 16, 60 x 150 tokens. Of the other settings only --model.d_embed, --model.cutoffs, --model.div_val,
--model.dtype, --train.batch_size and --train.segment_len matter here. Weights are untrained. Targets are drawn from a
law that is printed with the fraction of each cluster.

It prints a Markdown table. A softmax that does not fit in memory gets fewer tokens, and the table prints how many.
"""

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
_COLUMNS = "softmax | tokens | seconds | slowest | fastest | per token | memory needed | peak of a process"


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
    whole = {name: Program.of(model, plan.vocab_size, tokens) for name, model in models.items()}
    fitting = {name: program.shortened(limit) for name, program in whole.items()}
    peaks = [peak_of_a_process(program) for program in fitting.values()]  # Before this process fills its memory.
    tasks = [program.task(name) for name, program in fitting.items()]
    timing.time_in_turns(tasks, warmup=1, calls=plan.calls)
    rows = []
    for task, peak in zip(tasks, peaks, strict=True):
        median = statistics.median(task.seconds)
        times = (f"{seconds:.3g}" for seconds in (median, max(task.seconds), min(task.seconds)))
        memory = megabytes(fitting[task.name].needed), "" if peak is None else megabytes(peak)
        rows.append([task.name, f"{task.tokens:,}", *times, f"{median / task.tokens * 1e6:,.0f} µs", *memory])
    timing.print_table(_COLUMNS, rows)
    for name, program in whole.items():
        if program.needed > limit:
            needed, most = megabytes(program.needed), megabytes(limit)
            print(f"\nThe {name} softmax of all {tokens:,} tokens would need {needed}; the limit is {most}.")


def device_memory() -> int:
    """Returns the memory limit in bytes: an accelerator's, or 70 % of a CPU's, which other processes use too."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return int(0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return device.memory_stats()["bytes_limit"]


class Program(NamedTuple):
    """Forward and backward pass of a softmax that shares nothing with the embedding."""

    sizes: tuple[ModelConfig, int, int]  # The softmax, V, and T, the number of tokens.
    compiled: jax.stages.Compiled  # The gradient of the mean nll with respect to parameters and hidden states.
    draw: Callable[[], tuple[Any, jax.Array, jax.Array]]  # Draws parameters, hidden states [T, D] and targets [T].
    needed: int  # Bytes of arguments, results and scratch, by the compiler's account.

    @classmethod
    def of(cls, config: ModelConfig, vocab_size: int, tokens: int) -> "Program":
        """Compiles the program; nothing is allocated."""
        softmax = Softmax(config, vocab_size)
        untied = [None] * (config.n_cluster if config.div_val > 1 else 1), [None] * config.n_cluster

        def loss(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
            nll: Any = softmax.apply({"params": params}, hidden, targets, *untied, method="nll")
            return jnp.mean(nll)

        def draw() -> tuple[Any, jax.Array, jax.Array]:
            keys = jax.random.split(jax.random.key(0))
            targets = jnp.asarray(timing.draw_tokens(vocab_size, tokens))
            hidden = jax.random.normal(keys[0], (tokens, config.d_model), config.dtype)
            init = jax.jit(lambda key: softmax.init(key, hidden[:1], targets[:1], *untied, method="nll")["params"])
            return nn.unbox(init(keys[1])), hidden, targets

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*jax.eval_shape(draw)).compile()
        sizes: Any = compiled.memory_analysis()
        needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        return cls((config, vocab_size, tokens), compiled, draw, needed)

    def shortened(self, limit: int) -> "Program":
        """Returns the program for its tokens, half of them, and so on, that needs no more bytes than the limit."""
        config, vocab_size, tokens = self.sizes
        if self.needed <= limit:
            return self
        require(
            tokens > 1,
            f"--memory_gb must be at least {self.needed / 1e9:g}, the memory of one token, got {limit / 1e9:g}",
        )
        return Program.of(config, vocab_size, tokens // 2).shortened(limit)

    def task(self, name: str) -> Task:
        """Draws the inputs; returns the task of running both passes."""
        inputs = self.draw()
        return Task(name, self.sizes[-1], lambda: jax.block_until_ready(self.compiled(*inputs)))


def peak_of_a_process(program: Program) -> int | None:
    """Returns the peak memory of a fresh process that calls a program once, or None if it is not known.

    An accelerator's memory is not the process's.
    """
    if jax.default_backend() != "cpu":
        return None
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call_once, *program.sizes).result()


def _call_once(*sizes: Any) -> int | None:
    """Calls a program; returns this process's peak memory. `resource.getrusage` would start with the parent's."""
    Program.of(*sizes).task("").call()
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    return int(peak[1]) * 1024 if peak else None


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "train"))
