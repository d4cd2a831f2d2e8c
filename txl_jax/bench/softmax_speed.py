"""Time and memory of the adaptive softmax, forward and backward, beside the full softmax of the same vocabulary.

T is the number of tokens, D the width of their hidden states, V the vocabulary's size.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import cli
from txl_jax.bench.output import Log, print_line
from txl_jax.bench.synthetic_tokens import EXPONENT, SHIFT, draw_tokens, probabilities
from txl_jax.config import ExperimentConfig, ModelConfig, TrainConfig
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.errors import UserError
from txl_jax.modules.softmax import Softmax
from txl_jax.runtime import environment

# WikiText-103 and the paper's large model.
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

    def validate(self) -> None:
        """Raises `UserError` for values out of their range."""
        check_fields(self, "")


@dataclasses.dataclass(frozen=True)
class SoftmaxTiming:
    """Time and memory of one softmax.

    Attributes:
      tokens: T; fewer than were given where those need too much memory.
      memory_bytes: arguments, results and scratch, by the compiler's account.
      memory_bytes_of_all: the same for the tokens that were given.
      process_peak_bytes: peak memory of a process of its own, Python and the compiler's work included; None: unknown.
      seconds: time of each timed call.
    """

    tokens: int
    memory_bytes: int
    memory_bytes_of_all: int
    process_peak_bytes: int | None
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Median time of a call."""
        return statistics.median(self.seconds)


def run(config: ExperimentConfig, plan: Plan, log: Log = print_line) -> dict[str, SoftmaxTiming]:
    """Measures both softmaxes and prints a markdown table; returns the timings by name.

    Args:
      config: width, cutoffs, dtype, and T = `train.batch_size` * `train.segment_len`.
      plan: vocabulary, number of calls and memory limit.
      log: called with each line.

    Raises:
      UserError: settings of no adaptive softmax, or a memory limit too small for one token.
    """
    adaptive = dataclasses.replace(config.model, tie_weight=False, tie_projs=())
    adaptive.validate()
    adaptive.validate_vocabulary(plan.vocab_size)
    require(adaptive.cutoffs, "model.cutoffs is empty; the adaptive softmax needs at least one")
    full = dataclasses.replace(adaptive, cutoffs=(), div_val=1)
    tokens = config.train.batch_size * config.train.segment_len
    limit = device_memory() if plan.memory_gb is None else int(plan.memory_gb * 1e9)

    facts = environment.describe()
    log(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}")
    log(f"vocabulary {plan.vocab_size:,}, width {adaptive.d_model}, {adaptive.dtype}, cutoffs {list(adaptive.cutoffs)}")
    log(f"{format_shares(adaptive.cutoffs, plan.vocab_size, tokens)}\n")
    timings = measure(
        {"adaptive": adaptive, "full": full},
        vocab_size=plan.vocab_size,
        tokens=tokens,
        calls=plan.calls,
        memory_limit=limit,
    )
    log("| softmax | tokens | seconds | slowest | fastest | per token | memory needed | peak of a process |")
    log("|---|---|---|---|---|---|---|---|")
    for name, timing in timings.items():
        log(format_row(name, timing))
    for name, timing in timings.items():
        if timing.tokens < tokens:
            needed, most = environment.megabytes(timing.memory_bytes_of_all), environment.megabytes(limit)
            log(f"\nThe {name} softmax of all {tokens:,} tokens would need {needed}; the limit is {most}.")
    return timings


def format_shares(cutoffs: tuple[int, ...], vocab_size: int, tokens: int) -> str:
    """Formats the distribution of the targets: the share of each cluster, expected and among the tokens drawn."""
    law, drawn = probabilities(vocab_size), draw_tokens(vocab_size, tokens)
    shares = [
        f"{law[start:end].sum():.1%} ({((start <= drawn) & (drawn < end)).mean():.1%})"
        for start, end in itertools.pairwise((0, *cutoffs, vocab_size))
    ]
    return (
        f"targets: p(rank) ~ 1 / (rank + {SHIFT})^{EXPONENT}; "
        f"shares of head and tails, expected (and drawn): {', '.join(shares)}"
    )


def format_row(name: str, timing: SoftmaxTiming) -> str:
    """Formats one row of the table."""
    peak = "" if timing.process_peak_bytes is None else environment.megabytes(timing.process_peak_bytes)
    return (
        f"| {name} | {timing.tokens:,} | {timing.median_seconds:.3g} | {max(timing.seconds):.3g} | "
        f"{min(timing.seconds):.3g} | {timing.median_seconds / timing.tokens * 1e6:,.0f} µs | "
        f"{environment.megabytes(timing.memory_bytes)} | {peak} |"
    )


def measure(
    configs: Mapping[str, ModelConfig], *, vocab_size: int, tokens: int, calls: int, memory_limit: int
) -> dict[str, SoftmaxTiming]:
    """Measures each softmax; calls are interleaved, so that a slow minute of the machine affects all alike.

    A softmax that needs more than `memory_limit` bytes gets half the tokens, a quarter, and so on.

    Raises:
      UserError: a softmax does not fit even with one token.
    """
    programs = {name: _largest_that_fits(config, vocab_size, tokens, memory_limit) for name, config in configs.items()}
    # Before this process fills its own memory.
    peaks = {
        name: _peak_of_own_process(configs[name], vocab_size, program.tokens) for name, program in programs.items()
    }
    inputs = {name: _inputs(configs[name], vocab_size, program.tokens) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(1 + calls):  # The first is a warm-up.
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program.call(*inputs[name]))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: SoftmaxTiming(
            tokens=program.tokens,
            memory_bytes=program.memory_bytes,
            memory_bytes_of_all=program.memory_bytes_of_all,
            process_peak_bytes=peaks[name],
            seconds=tuple(seconds[name][1:]),
        )
        for name, program in programs.items()
    }


def device_memory() -> int:
    """Returns the memory limit in bytes: that of an accelerator; 70 % of a CPU's, which other processes use too."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return int(0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return device.memory_stats()["bytes_limit"]


class _Program(NamedTuple):
    call: jax.stages.Compiled
    tokens: int
    memory_bytes: int
    memory_bytes_of_all: int


def _largest_that_fits(config: ModelConfig, vocab_size: int, tokens: int, memory_limit: int) -> _Program:
    """Compiles for the tokens, half of them, and so on, until the program fits."""
    needed_by_all = None
    while tokens:
        call = _compile(config, vocab_size, tokens)
        found: Any = call.memory_analysis()
        needed = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        needed_by_all = needed_by_all or needed
        if needed <= memory_limit:
            return _Program(call, tokens, needed, needed_by_all)
        tokens //= 2
    raise UserError(
        f"the memory limit is {memory_limit:,} bytes and a softmax of one token needs {needed:,}; raise --memory_gb"
    )


def _compile(config: ModelConfig, vocab_size: int, tokens: int) -> jax.stages.Compiled:
    """Compiles the gradient of the mean nll with respect to parameters and hidden states; nothing is allocated."""
    softmax = Softmax(config, vocab_size)

    def loss(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        nll: Any = softmax.apply({"params": params}, hidden, targets, *_untied(config), method="nll")
        return jnp.mean(nll)

    shapes = jax.eval_shape(functools.partial(_inputs, config, vocab_size, tokens))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()


def _inputs(config: ModelConfig, vocab_size: int, tokens: int) -> tuple[Any, jax.Array, jax.Array]:
    """Returns (parameters, hidden states [T, D], targets [T])."""
    keys = jax.random.split(jax.random.key(0))
    targets = jnp.asarray(draw_tokens(vocab_size, tokens))
    hidden = jax.random.normal(keys[0], (tokens, config.d_model), config.dtype)

    @jax.jit
    def init(key: jax.Array) -> Any:
        softmax = Softmax(config, vocab_size)
        return nn.unbox(softmax.init(key, hidden[:1], targets[:1], *_untied(config), method="nll"))["params"]

    return init(keys[1]), hidden, targets


def _untied(config: ModelConfig) -> tuple[list[None], list[None]]:
    """Returns the embedding's tables and projections for a softmax that shares none of them."""
    n_table = config.n_cluster if config.div_val > 1 else 1
    return [None] * n_table, [None] * config.n_cluster


def _peak_of_own_process(config: ModelConfig, vocab_size: int, tokens: int) -> int | None:
    """Runs `_peak_of_one_call` in a fresh process; None on an accelerator, whose memory is not the process's."""
    if jax.default_backend() != "cpu":
        return None
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_of_one_call, config, vocab_size, tokens).result()


def _peak_of_one_call(config: ModelConfig, vocab_size: int, tokens: int) -> int | None:
    """Compiles and calls once; returns the peak memory of this process, or None where the system does not report it.

    Not from `resource.getrusage`, whose peak starts with that of the parent process.
    """
    call = _compile(config, vocab_size, tokens)
    jax.block_until_ready(call(*_inputs(config, vocab_size, tokens)))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else None
