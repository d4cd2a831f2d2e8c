"""Time and memory of a softmax layer alone, forward and backward.

T is the number of tokens, D the width of their hidden states, V the vocabulary's size.
"""

import concurrent.futures
import dataclasses
import functools
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
import numpy as np

from txl_jax.config import ModelConfig
from txl_jax.modules.softmax import Softmax

# The law of the targets, Zipf's as Mandelbrot wrote it: p(rank) ~ 1 / (rank + SHIFT)**EXPONENT.
SHIFT, EXPONENT = 2.7, 1.1


@dataclasses.dataclass(frozen=True)
class SoftmaxSpeed:
    """What one softmax took."""

    tokens: int  # T; fewer than asked for where those need too much memory.
    needed: int  # Bytes of arguments, results and scratch, by the compiler's account.
    needed_for_all: int  # The same for the tokens that were asked for.
    process_peak: int | None  # Bytes that a process of its own held at most, Python and the compiler's work included.
    seconds: tuple[float, ...]  # Of each timed call.

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    configs: Mapping[str, ModelConfig], *, vocab_size: int, tokens: int, calls: int, memory_limit: int
) -> dict[str, SoftmaxSpeed]:
    """Measures each softmax; calls take turns, so that a slow minute of the machine falls on all.

    What needs more than `memory_limit` bytes is not run: that softmax gets half the tokens, a quarter, ..

    Raises:
      ValueError: a softmax does not fit even with one token.
    """
    programs = {name: _largest_that_fits(config, vocab_size, tokens, memory_limit) for name, config in configs.items()}
    # Before this process fills its own memory.
    peaks = {
        name: _peak_of_own_process(configs[name], vocab_size, program.tokens) for name, program in programs.items()
    }
    inputs = {name: _inputs(configs[name], vocab_size, program.tokens) for name, program in programs.items()}
    seconds = {name: [] for name in configs}
    for _ in range(1 + calls):  # The first is a warm-up.
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program.call(*inputs[name]))
            seconds[name].append(time.perf_counter() - began)
    return {
        name: SoftmaxSpeed(*program[1:], process_peak=peaks[name], seconds=tuple(seconds[name][1:]))
        for name, program in programs.items()
    }


def device_memory() -> int:
    """Bytes that a program may take: what an accelerator offers; 70 % of a CPU's memory, which others use too."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return int(0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return device.memory_stats()["bytes_limit"]


def probabilities(vocab_size: int) -> np.ndarray:
    """p of each token, most frequent first: [V]."""
    weights = (np.arange(1, vocab_size + 1) + SHIFT) ** -EXPONENT
    return weights / weights.sum()


def draw_targets(vocab_size: int, tokens: int) -> np.ndarray:
    """The same tokens in every call: int32 [T]."""
    drawn = np.random.default_rng(0).choice(vocab_size, size=tokens, p=probabilities(vocab_size))
    return drawn.astype(np.int32)


class _Program(NamedTuple):
    call: jax.stages.Compiled
    tokens: int
    needed: int
    needed_for_all: int


def _largest_that_fits(config: ModelConfig, vocab_size: int, tokens: int, memory_limit: int) -> _Program:
    needed_for_all = None
    while tokens:
        call = _compile(config, vocab_size, tokens)
        found = call.memory_analysis()
        needed = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        needed_for_all = needed_for_all or needed
        if needed <= memory_limit:
            return _Program(call, tokens, needed, needed_for_all)
        tokens //= 2
    raise ValueError(f"the memory limit is {memory_limit:,} bytes and a softmax of one token needs {needed:,}")


def _compile(config: ModelConfig, vocab_size: int, tokens: int) -> jax.stages.Compiled:
    """The gradient of the mean nll for parameters and hidden states, of abstract arguments: nothing is allocated."""
    softmax = Softmax(config, vocab_size)

    def loss(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean(softmax.apply({"params": params}, hidden, targets, *_untied(config), method="nll"))

    shapes = jax.eval_shape(functools.partial(_inputs, config, vocab_size, tokens))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()


def _inputs(config: ModelConfig, vocab_size: int, tokens: int) -> tuple[Any, jax.Array, jax.Array]:
    """(parameters, hidden states [T, D], targets [T])."""
    keys = jax.random.split(jax.random.key(0))
    targets = jnp.asarray(draw_targets(vocab_size, tokens))
    hidden = jax.random.normal(keys[0], (tokens, config.d_model), config.dtype)

    @jax.jit
    def init(key: jax.Array) -> Any:
        softmax = Softmax(config, vocab_size)
        return nn.unbox(softmax.init(key, hidden[:1], targets[:1], *_untied(config), method="nll"))["params"]

    return init(keys[1]), hidden, targets


def _untied(config: ModelConfig) -> tuple[list[None], list[None]]:
    """An embedding's tables and projections, for a softmax that has its own."""
    n_table = config.n_cluster if config.div_val > 1 else 1
    return [None] * n_table, [None] * config.n_cluster


def _peak_of_own_process(config: ModelConfig, vocab_size: int, tokens: int) -> int | None:
    """`_peak_of_one_call` in a fresh process; None on an accelerator, whose memory is not the process's."""
    if jax.default_backend() != "cpu":
        return None
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_of_one_call, config, vocab_size, tokens).result()


def _peak_of_one_call(config: ModelConfig, vocab_size: int, tokens: int) -> int | None:
    """Compiles and calls once; then the most that this process held, or None where the system does not tell.

    Not `resource.getrusage`, whose peak starts with that of the process that started this one.
    """
    call = _compile(config, vocab_size, tokens)
    jax.block_until_ready(call(*_inputs(config, vocab_size, tokens)))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else None
