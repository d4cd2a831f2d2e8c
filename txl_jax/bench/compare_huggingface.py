"""The same weights on the same tokens, here and in the peer, in turns."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from txl_jax import sharding
from txl_jax.assemble import RunComponents
from txl_jax.bench import throughput
from txl_jax.bench.huggingface import HuggingFacePeer
from txl_jax.bench.softmax_speed import draw_targets
from txl_jax.bench.throughput import Speed, Task
from txl_jax.config import COMPAT_PRESETS, DType, EvalConfig, ExperimentConfig, MemoryStart, TrainConfig
from txl_jax.data.batches.segments import evaluation_segments, training_segments
from txl_jax.evaluation.streaming import make_eval_step
from txl_jax.inference.scorer import make_scorer

# Largest difference of a token's nats that float32 explains over the segments compared; measured: 1e-5 and less.
TOLERANCE = 1e-4
_COMPARED_SEGMENTS = 4


@dataclasses.dataclass(frozen=True)
class Beside:
    """A task here and in the peer."""

    ours: Speed
    peer: Speed

    @property
    def ratios(self) -> list[float]:
        """How many times faster ours is, turn by turn."""
        pairs = zip(self.ours.seconds, self.peer.seconds, strict=True)
        per_call = self.ours.task.tokens / self.peer.task.tokens
        return [theirs / ours * per_call for ours, theirs in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def check_alike(config: ExperimentConfig) -> None:
    """Raises `ValueError` for settings of generation that the peer's step does not have."""
    for name, usual in (("samples", 1), ("temperature", 1.0), ("top_p", 1.0)):
        value = getattr(config.generate, name)
        if value != usual:
            raise ValueError(f"generate.{name} is {value} and the peer's is {usual}; leave it out, or compare without")


def with_compat(config: ExperimentConfig) -> ExperimentConfig:
    """The config with the peer's window and norms. What its memory starts with matters to the check alone."""
    compat = dataclasses.replace(COMPAT_PRESETS["hf"], memory_start=MemoryStart.MASKED)
    return dataclasses.replace(config, compat=compat)


def make_peer(parts: RunComponents, params: Any, span: EvalConfig) -> HuggingFacePeer:
    """The peer at the lengths of `span`, its memory full."""
    config = parts.config
    params = jax.tree.map(np.asarray, params)
    peer = HuggingFacePeer(config.model, span, params, vocab_size=parts.model.vocab_size, optimizer=config.optimizer)
    peer.fill_memory(seed=0)
    return peer


def check_same_numbers(parts: RunComponents, params: Any, peer: HuggingFacePeer) -> float:
    """Scores the same tokens with both, each from zeros in its memory; returns the largest difference in nats.

    Raises:
      ValueError: it is more than rounding explains.
    """
    tokens, found = _scored(parts, params.COMPUTED)
    worst = float(np.abs(found - np.ravel(peer.nll(np.asarray(tokens)[None, :]))).max())
    if not worst <= TOLERANCE:
        raise ValueError(
            f"the peer's losses differ by up to {worst:.2g} nats, more than {TOLERANCE:g}, so the two do not compute the "
            "same; nothing was timed"
        )
    return worst


def moved_by_storage(parts: RunComponents, params: Any) -> float:
    """The largest change of a token's nats where keys and values are stored as `eval.cache_dtype` says."""
    _, computed = _scored(parts, params.COMPUTED)
    _, stored = _scored(parts, params, parts.config.eval.cache_dtype)
    return float(np.abs(computed - stored).max())


def _scored(parts: RunComponents, params: Any, stored: DType | None) -> tuple[Any, np.ndarray]:
    """Tokens and the nats of all but the first, from zeros in the memory."""
    span = dataclasses.replace(parts.config.eval, cache_dtype=stored, batch_size=1)
    model = parts.model.clone(compat=COMPAT_PRESETS["hf"])
    tokens = draw_targets(model.vocab_size, span.segment_len * _COMPARED_SEGMENTS + 1)
    segments = evaluation_segments(tokens, batch_size=1, segment_len=span.segment_len).segments(0, _COMPARED_SEGMENTS)
    reader = make_scorer(model, span)
    weights = sharding.bind_mesh(parts.mesh, jax.jit(reader.prepare_params))(params)
    eval_step = sharding.bind_mesh(parts.mesh, jax.jit(make_eval_step(model, span)))
    _, scores = eval_step(weights, reader.init_memory(weights), segments)
    return tokens, np.ravel(scores.nll)


def training(parts: RunComponents, params: Any) -> tuple[Task, Task]:
    """An update here and in the peer, with dropout as the config says."""
    train = parts.config.train
    shared = {
        name: getattr(train, name) for name in ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length")
    }
    peer = make_peer(parts, params, EvalConfig(**shared))
    ours = throughput.training(parts)
    return ours, _of_peer(ours, parts, train, peer.train_step)


def evaluation(parts: RunComponents, params: Any, peer: HuggingFacePeer) -> tuple[Task, Task]:
    """A segment with full memory here and in the peer."""
    ours = throughput.evaluation(parts, params)
    return ours, _of_peer(ours, parts, parts.config.eval, peer.evaluate_segment)


def generation(
    parts: RunComponents, params: Any, peer: HuggingFacePeer, *, every_tail: bool = False
) -> tuple[Task, Task]:
    """A token after a full memory here and in the peer, drawn among the `top_k` likeliest.

    Args:
      every_tail: see `speed.generation`; the peer always reads every tail.
    """
    ours, top_k = throughput.generation(parts, params, every_tail=every_tail), parts.config.generate.top_k

    def call() -> None:
        peer.generate_token(top_k)

    return ours, Task(f"{ours.name}, peer", "1 x 1", ours.mem_len, 1, call)


def _of_peer(ours: Task, parts: RunComponents, span: TrainConfig | EvalConfig, score: Callable[..., Any]) -> Task:
    """The peer's task: the segments of ours, one a call, round and round."""
    make = training_segments if isinstance(span, TrainConfig) else evaluation_segments
    segments = throughput.random_segments(make, parts, span)
    inputs, targets = (np.asarray(part) for part in (segments.inputs, segments.targets))
    turns = itertools.cycle(range(len(inputs)))

    def call() -> None:
        turn = next(turns)
        score(inputs[turn], targets[turn])

    return Task(f"{ours.name}, peer", ours.shape, ours.mem_len, inputs[0].size, call)
