"""Seconds per token of a sliding window beside those of streaming with a memory: table 9 of the paper.

A model without recurrence that is to see A tokens encodes all A anew for each token that it predicts; ours reads each
token once and finds the A before it in its memory. Both score one row, so this is the time that a reader waits. The
sizes are the same; what differs are the positions, absolute there and relative here.

On both sides the time is that of the layers, and of the softmax at the positions that are scored.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from txl_jax import sharding
from txl_jax.assemble import RunComponents, assemble
from txl_jax.bench.synthetic_tokens import draw_tokens
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, MeshConfig
from txl_jax.data.batches.segment_reader import evaluation_segments
from txl_jax.evaluation.sliding_window import make_window_step, window_batches
from txl_jax.training.state import init_params

# Attention length, and how many times slower than ours the authors found the sliding window (on one GPU, 2019).
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention length. Seconds per token of each timed call."""

    attention_len: int  # A
    sliding_window: tuple[float, ...]  # A call predicts one token.
    ours: tuple[float, ...]  # A call reads S segments of L tokens.

    @property
    def ratio(self) -> float:
        """How many times slower the sliding window is, by the medians."""
        return statistics.median(self.sliding_window) / statistics.median(self.ours)


def measure(config: ExperimentConfig, *, vocab_size: int, attention_len: int, warmup: int, calls: int) -> Row:
    """Times both at one attention length, on one device; calls take turns, so that a slow minute falls on both.

    Args:
      config: sizes; L, S and `clamp_len` of evaluation. The rest of evaluation is set here: one row, M = A and
        `same_length`, so that every token sees A tokens.
      warmup: untimed calls of each, at least 1: the first compiles.
      calls: timed calls of each.
    """
    sides = {
        "sliding_window": _sliding_window(sliding_window_config(config), vocab_size, attention_len),
        "ours": _streaming(our_config(config, attention_len), vocab_size),
    }
    seconds = {name: [] for name in sides}
    for _ in range(warmup + calls):
        for name, side in sides.items():
            began = time.perf_counter()
            side.call()
            seconds[name].append((time.perf_counter() - began) / side.tokens)
    return Row(attention_len, **{name: tuple(found[warmup:]) for name, found in seconds.items()})


def sliding_window_config(config: ExperimentConfig) -> ExperimentConfig:
    """The same sizes with absolute positions, which have no u and v."""
    model = dataclasses.replace(config.model, encoding=Encoding.VASWANI, num_positions=None, untie_r=False)
    return dataclasses.replace(config, model=model, mesh=MeshConfig(data=1))


def our_config(config: ExperimentConfig, attention_len: int) -> ExperimentConfig:
    """The same sizes with relative positions, and a memory of the attention length."""
    model = dataclasses.replace(config.model, encoding=Encoding.RELATIVE, num_positions=None)
    span = dataclasses.replace(config.eval, batch_size=1, mem_len=attention_len, same_length=True)
    return dataclasses.replace(config, model=model, eval=span, mesh=MeshConfig(data=1))


class _Side(NamedTuple):
    call: Callable[[], None]  # Returns when the results are there.
    tokens: int  # What a call predicts.


def _sliding_window(config: ExperimentConfig, vocab_size: int, attention_len: int) -> _Side:
    """A window of A random tokens, the last position of which is scored."""
    parts = assemble(config, vocab_size=vocab_size)
    params = _params(parts)
    step = sharding.bind_mesh(parts.mesh, make_window_step(parts.model, clamp_len=config.eval.clamp_len))
    # The text's second window is the first that scores one token.
    tokens = draw_tokens(vocab_size, attention_len + 2)
    _, window = window_batches(tokens, attention_len=attention_len, stride=1, batch_size=1)
    inputs, targets = jax.device_put((window.inputs, window.targets))
    return _Side(lambda: jax.block_until_ready(step(params, inputs, targets)), tokens=1)


def _streaming(config: ExperimentConfig, vocab_size: int) -> _Side:
    """S segments of random tokens, read with a full memory."""
    parts, span = assemble(config, vocab_size=vocab_size), config.eval
    weights = parts.evaluation.prepare_params(_params(parts))
    memory = parts.evaluation.init_memory(weights)
    memory = memory.replace(valid=memory.valid * 0 + span.mem_len)
    segments = _segments(parts, span)

    def call() -> None:
        nonlocal memory
        memory, *scores = parts.evaluation.eval_step(weights, memory, segments)
        jax.block_until_ready((memory, scores))

    return _Side(call, tokens=span.segment_len * span.segments_per_call)


def _segments(parts: RunComponents, span: EvalConfig) -> Any:
    """S segments in the middle of a text: no row starts anew."""
    tokens = draw_tokens(parts.model.vocab_size, span.segment_len * span.segments_per_call + 1)
    reader = evaluation_segments(tokens, batch_size=1, segment_len=span.segment_len)
    segments = reader.segments(0, span.segments_per_call)
    return parts.placement.place(segments._replace(reset=segments.reset & False))


def _params(parts: RunComponents) -> Any:
    """Untrained parameters."""
    init = jax.jit(lambda: nn.unbox(init_params(parts.model, jax.random.key(parts.config.seed))))
    return sharding.bind_mesh(parts.mesh, init)()
