"""Benchmarks this model against Hugging Face's TransfoXL with the same weights on the same tokens, interleaved."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from txl_jax import sharding
from txl_jax.bench import throughput
from txl_jax.bench.huggingface_model import HuggingFaceModel
from txl_jax.bench.synthetic_tokens import draw_tokens
from txl_jax.bench.throughput import Task, Throughput
from txl_jax.config import CacheDType, EvalConfig, ExperimentConfig, MemoryStart, TrainConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import require
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.errors import UserError
from txl_jax.evaluation.streaming import make_eval_step
from txl_jax.inference.scorer import make_scorer
from txl_jax.runs.build import RunComponents

# Largest difference of a token's nats that float32 explains over the segments compared; measured: 1e-5 and less.
TOLERANCE = 1e-4
_COMPARED_SEGMENTS = 4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Throughput of a task here and in Hugging Face's model (the peer)."""

    ours: Throughput
    peer: Throughput

    @property
    def speedups(self) -> list[float]:
        """Our throughput divided by the peer's, for each pair of calls."""
        pairs = zip(self.ours.tokens_per_second, self.peer.tokens_per_second, strict=True)
        return [ours / peer for ours, peer in pairs]

    @property
    def speedup(self) -> float:
        """Median of the speedups."""
        return statistics.median(self.speedups)

    def as_record(self) -> dict[str, Any]:
        """Returns the values for a JSON file."""
        return {
            "ours": self.ours.as_record(),
            "peer": self.peer.as_record(),
            "speedup": self.speedup,
            "speedups": self.speedups,
        }


def check_generation_settings(config: ExperimentConfig) -> None:
    """Raises `UserError` for settings of generation that the peer's step does not have."""
    for name, default in (("samples", 1), ("temperature", 1.0), ("top_p", 1.0)):
        value = getattr(config.generate, name)
        require(
            value == default,
            f"generate.{name} is {value} and the peer's is {default}; leave it out, or benchmark without --peer",
        )


def with_peer_compat(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config with the peer's attention window and layer norms.

    The memory is masked at the start instead of zeros: that matters to the check of the losses alone.
    """
    return config_tree.replace(config_tree.apply_preset(config, "hf"), {"compat.memory_start": MemoryStart.MASKED})


def make_peer(components: RunComponents, params: Any, eval_config: EvalConfig) -> HuggingFaceModel:
    """Makes the peer with our parameters at the lengths of `eval_config`, its memory full."""
    config = components.config
    params = jax.tree.map(np.asarray, params)
    peer = HuggingFaceModel(
        config.model, eval_config, params, vocab_size=components.model.vocab_size, optimizer=config.optimizer
    )
    peer.fill_memory(seed=0)
    return peer


def check_same_losses(components: RunComponents, params: Any, peer: HuggingFaceModel) -> float:
    """Scores the same tokens with both models, from zeros in the memory; returns the largest difference in nats.

    Raises:
      UserError: the difference is more than rounding explains.
    """
    tokens, losses = _score(components, params, None)
    worst = float(np.abs(losses - np.ravel(peer.nll(np.asarray(tokens)[None, :]))).max())
    if not worst <= TOLERANCE:
        raise UserError(
            f"the peer's losses differ by up to {worst:.2g} nats, more than {TOLERANCE:g}, so the two do not compute "
            "the same function; nothing was timed"
        )
    return worst


def effect_of_cache_dtype(components: RunComponents, params: Any) -> float:
    """Returns the largest change of a token's nats due to storing keys and values as `eval.cache_dtype`."""
    _, as_computed = _score(components, params, None)
    _, as_stored = _score(components, params, components.config.eval.cache_dtype)
    return float(np.abs(as_computed - as_stored).max())


def _score(components: RunComponents, params: Any, cache_dtype: CacheDType | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and the nats of all but the first, from zeros in the memory."""
    eval_config = dataclasses.replace(components.config.eval, cache_dtype=cache_dtype, batch_size=1)
    model = components.model.clone(compat=config_tree.apply_preset(components.config, "hf").compat)
    tokens = draw_tokens(model.vocab_size, eval_config.segment_len * _COMPARED_SEGMENTS + 1)
    reader = evaluation_segments(tokens, batch_size=1, segment_len=eval_config.segment_len)
    segments = reader.segments(0, _COMPARED_SEGMENTS)
    scorer = make_scorer(model, eval_config)
    weights = sharding.bind_mesh(components.mesh, jax.jit(scorer.prepare_params))(params)
    eval_step = sharding.bind_mesh(components.mesh, jax.jit(make_eval_step(model, eval_config)))
    _, scores = eval_step(weights, scorer.init_memory(weights), segments)
    return tokens, np.ravel(scores.nll)


def training(components: RunComponents, params: Any) -> tuple[Task, Task]:
    """Returns the task of an update, ours and the peer's, with dropout as in the config."""
    train = components.config.train
    shared = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length")
    peer = make_peer(components, params, EvalConfig(**{name: getattr(train, name) for name in shared}))
    ours = throughput.training(components)
    return ours, _peer_task(ours, components, train, peer.train_step)


def evaluation(components: RunComponents, params: Any, peer: HuggingFaceModel) -> tuple[Task, Task]:
    """Returns the task of a segment with full memory, ours and the peer's."""
    ours = throughput.evaluation(components, params)
    return ours, _peer_task(ours, components, components.config.eval, peer.evaluate_segment)


def generation(
    components: RunComponents, params: Any, peer: HuggingFaceModel, *, every_tail: bool = False
) -> tuple[Task, Task]:
    """Returns the task of a token after a full memory, ours and the peer's, which always reads every tail."""
    ours = throughput.generation(components, params, every_tail=every_tail)
    top_k = components.config.generate.top_k

    def call() -> None:
        peer.generate_token(top_k)

    return ours, Task(f"{ours.name}, peer", "1 x 1", ours.mem_len, 1, call)


def _peer_task(
    ours: Task, components: RunComponents, lengths: TrainConfig | EvalConfig, step: Callable[..., Any]
) -> Task:
    """Returns the peer's task: the segments of ours, one per call, in a cycle."""
    make_reader = training_segments if isinstance(lengths, TrainConfig) else evaluation_segments
    segments = throughput.random_segments(make_reader, components, lengths)
    inputs, targets = np.asarray(segments.inputs), np.asarray(segments.targets)
    indices = itertools.cycle(range(len(inputs)))

    def call() -> None:
        i = next(indices)
        step(inputs[i], targets[i])

    return Task(f"{ours.name}, peer", ours.shape, ours.mem_len, inputs[0].size, call)
