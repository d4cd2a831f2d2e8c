"""The implementations of attention that a run uses, chosen once for its lengths and the devices of its mesh."""

import dataclasses
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from txl_jax import sharding
from txl_jax.config import CacheDType, ExperimentConfig
from txl_jax.inference.cache import cache_capacity
from txl_jax.modules.positions import encoding_of
from txl_jax.ops.attention import Implementation, Implementations, Problem, choice
from txl_jax.ops.attention.cached import table_length


class Chosen(NamedTuple):
    """An implementation and the reason for it."""

    implementation: Implementation
    reason: str


class AttentionChoice(NamedTuple):
    """Implementations of a run: in updates, and in evaluation and generation, which read a KV cache."""

    training: Chosen
    evaluation: Chosen

    @property
    def implementations(self) -> Implementations:
        """Without the reasons."""
        return Implementations(self.training.implementation, self.evaluation.implementation)


def choose_attention(
    config: ExperimentConfig, mesh: Mesh | AbstractMesh, *, recorded: Implementations | None = None
) -> AttentionChoice:
    """Chooses the implementations of a run.

    Args:
      config: the lengths, the types, and `model.attention`.
      mesh: the devices; an abstract mesh has none, and counts as CPUs.
      recorded: an earlier choice of this run, kept where it can serve and is what `model.attention` asks for.

    Raises:
      UserError: `model.attention` names a path that cannot serve this run.
    """
    path = str(config.model.attention)
    kept = recorded or Implementations(path, path)
    return AttentionChoice(
        _choose(kept.training, path, training_problem(config, mesh)),
        _choose(kept.cached, path, evaluation_problem(config, mesh)),
    )


def training_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in an update, of one microbatch on one device."""
    train = config.train
    n_keys = train.mem_len + train.segment_len
    rows = train.batch_size // train.grad_accum_steps
    return dataclasses.replace(
        _of_model(config, mesh),
        batch=max(rows // sharding.num_batch_shards(mesh), 1),
        segment_len=train.segment_len,
        n_keys=n_keys,
        n_positions=_if_position_keys(config, n_keys),
        window=config.compat.window(train.mem_len, same_length=train.same_length),
        dropout=config.model.dropout.attention > 0,
    )


def evaluation_problem(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes attention in streaming evaluation, on one device."""
    lengths, rows = config.eval, config.eval.batch_size
    capacity = cache_capacity(mem_len=lengths.mem_len, segment_len=lengths.segment_len)
    n_positions = table_length(
        segment_len=lengths.segment_len, capacity=capacity, clamp_len=config.model.clamp(lengths.clamp_len)
    )
    split = sharding.batch_axes(mesh, rows) is not None
    return dataclasses.replace(
        _of_model(config, mesh),
        batch=rows // sharding.num_batch_shards(mesh) if split else rows,
        segment_len=lengths.segment_len,
        n_keys=capacity + lengths.segment_len,
        n_positions=_if_position_keys(config, n_positions),
        window=config.compat.window(lengths.mem_len, same_length=lengths.same_length),
        capacity=capacity,
        cache_dtype=None if lengths.cache_dtype is CacheDType.INT8 else str(lengths.cache_dtype or config.model.dtype),
    )


def _of_model(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> Problem:
    """Describes what training and evaluation have in common."""
    model, device = config.model, None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return Problem(
        platform="cpu" if device is None else device.platform,
        device_kind="" if device is None else device.device_kind,
        dtype=str(model.dtype),
        batch=1,
        n_head=model.n_head // mesh.shape[sharding.TENSOR],
        segment_len=1,
        n_keys=1,
        d_head=model.d_head,
        has_position_score=encoding_of(model, config.compat).has_position_score,
        documents=model.end_token is not None,
    )


def _if_position_keys(config: ExperimentConfig, n_positions: int) -> int:
    """Returns the number of position keys, 0 if the encoding has none."""
    return n_positions if encoding_of(config.model, config.compat).products_per_key > 2 else 0


def _choose(kept: Implementation | str, path: str, problem: Problem) -> Chosen:
    if isinstance(kept, Implementation) and path in (choice.AUTO, kept.path) and choice.can_serve(kept, problem):
        return Chosen(kept, "as the run was begun")
    return Chosen(*choice.choose(path, problem))
