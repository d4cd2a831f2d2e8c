"""Chooses the attention implementations for a run, and records the reasons.

The choice is made once, for the run's lengths and the devices of its mesh. `ops.attention.choose`
finds the fastest implementation that supports a call. This module describes the calls of a run,
keeps the choice of an earlier start, and replaces a path that fails on this device
(`runs.attention_check`).
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import CacheDType, ExperimentConfig, ModelConfig
from txl_jax.errors import UserError
from txl_jax.inference.cache import cache_capacity
from txl_jax.modules.positions import encoding_of
from txl_jax.ops.attention import AttentionCall, AttentionPaths, Implementation, choose
from txl_jax.ops.attention.distances import table_length
from txl_jax.runs import attention_check
from txl_jax.sharding.axes import batch_axis, num_batch_shards
from txl_jax.sharding.mesh import TENSOR


class ChosenPath(NamedTuple):
    """An implementation of attention and the reason for it."""

    implementation: Implementation
    # Text for the log, with the paths that failed before, and the comparison with the reference.
    reason: str
    # Whether a path that "auto" prefers, or an earlier start chose, failed on this device.
    replaces_failed: bool = False


def choose_attention(
    config: ExperimentConfig,
    mesh: Mesh | AbstractMesh,
    *,
    recorded: AttentionPaths[Implementation | str] | None,
    uses: Collection[str],
) -> AttentionPaths[ChosenPath]:
    """Chooses the implementations of attention for a run.

    Args:
      config: The run's settings. `model.attention` is the path, or "auto".
      mesh: The run's mesh. An abstract mesh has no devices, and counts as CPUs.
      recorded: The choice of an earlier start, which is kept if it is supported and still
        requested, or None.
      uses: Where attention will run, "training" or "evaluation". Only these uses are compared with
        the reference first.

    Raises:
      UserError: If the path of `model.attention` does not support the run or fails on this device.
    """
    path = str(config.model.attention)
    if recorded is None:
        recorded = AttentionPaths(training=path, cached=path)

    training = _choose_path(
        path, recorded.training, training_call(config, mesh), is_compared="training" in uses
    )
    cached = _choose_path(
        path, recorded.cached, evaluation_call(config, mesh), is_compared="evaluation" in uses
    )
    return AttentionPaths(training=training, cached=cached)


def _choose_path(
    path: str, recorded: Implementation | str, call: AttentionCall, *, is_compared: bool
) -> ChosenPath:
    """Chooses according to `path`, until the choice does not fail on this device.

    Raises:
      UserError: If a path that the user requested does not support the call or fails.
    """
    # Why paths failed, in the order in which they were tried.
    failures: dict[str, str] = {}
    while True:
        implementation, reason = _next_choice(path, recorded, call, failures)
        finding = attention_check.NOT_COMPARED
        if is_compared:
            finding = attention_check.compare(implementation, call)

        if not finding.failed:
            reasons = list(failures.values()) or [reason]
            if finding.sentence:
                reasons.append(finding.sentence)
            return ChosenPath(implementation, "; ".join(reasons), replaces_failed=len(failures) > 0)

        # Only "auto" and its choices in earlier starts are replaced.
        if path == implementation.path:
            raise UserError(
                f"{finding.sentence}. Choose another --model.attention, or {choose.AUTO}."
            )
        failures[implementation.path] = finding.sentence


def _next_choice(
    path: str,
    recorded: Implementation | str,
    call: AttentionCall,
    failed_paths: Collection[str],
) -> tuple[Implementation, str]:
    """Returns (implementation to try next, reason): the recorded one if possible."""
    if (
        isinstance(recorded, Implementation)
        and path in (choose.AUTO, recorded.path)
        and recorded.path not in failed_paths
        and choose.can_serve(recorded, call)
    ):
        return recorded, "as in earlier starts"
    return choose.choose(path, call, failed_paths)


def training_call(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> AttentionCall:
    """Describes attention in a training step, for one microbatch on one device."""
    model = config.model
    train = config.train
    platform, device_kind = _device_of(mesh)
    n_keys = train.mem_len + train.segment_len
    # Each key of [memory; segment] has its own distance.
    n_positions = 0
    if _has_position_keys(model):
        n_positions = n_keys
    microbatch = train.batch_size // train.grad_accum_steps
    return AttentionCall(
        platform=platform,
        device_kind=device_kind,
        dtype=str(model.dtype),
        # Rows that cannot be split over the devices are an error later (`Built.check_batch_size`).
        batch=max(microbatch // num_batch_shards(mesh), 1),
        n_head=model.n_head // mesh.shape[TENSOR],
        segment_len=train.segment_len,
        n_keys=n_keys,
        d_head=model.d_head,
        n_positions=n_positions,
        has_position_score=encoding_of(model).has_position_score,
        window=model.compat.window(train.mem_len, same_length=train.same_length),
        dropout=model.dropout.attention > 0,
        documents=config.data.reset_at is not None,
    )


def evaluation_call(config: ExperimentConfig, mesh: Mesh | AbstractMesh) -> AttentionCall:
    """Describes attention in streaming evaluation, over a KV cache on one device."""
    model = config.model
    lengths = config.eval
    platform, device_kind = _device_of(mesh)

    # If rows cannot be split evenly, each device has all of them.
    batch = lengths.batch_size
    if batch_axis(mesh, batch) is not None:
        batch //= num_batch_shards(mesh)

    capacity = cache_capacity(mem_len=lengths.mem_len, segment_len=lengths.segment_len)
    n_positions = 0
    if _has_position_keys(model):
        n_positions = table_length(
            segment_len=lengths.segment_len,
            capacity=capacity,
            clamp_len=model.clamp(lengths.clamp_len),
        )

    # int8 is converted to the model's dtype before an implementation reads it.
    cache_dtype = None
    if lengths.cache_dtype is not CacheDType.INT8:
        cache_dtype = str(lengths.cache_dtype or model.dtype)
    return AttentionCall(
        platform=platform,
        device_kind=device_kind,
        dtype=str(model.dtype),
        batch=batch,
        n_head=model.n_head // mesh.shape[TENSOR],
        segment_len=lengths.segment_len,
        n_keys=capacity + lengths.segment_len,
        d_head=model.d_head,
        n_positions=n_positions,
        has_position_score=encoding_of(model).has_position_score,
        window=model.compat.window(lengths.mem_len, same_length=lengths.same_length),
        capacity=capacity,
        cache_dtype=cache_dtype,
        documents=config.data.reset_at is not None,
    )


def _device_of(mesh: Mesh | AbstractMesh) -> tuple[str, str]:
    """Returns (platform, device kind) of a mesh. An abstract mesh counts as CPUs."""
    if isinstance(mesh, AbstractMesh):
        return "cpu", ""
    device = mesh.devices.flat[0]
    return device.platform, device.device_kind


def _has_position_keys(model: ModelConfig) -> bool:
    """Returns whether queries are multiplied by a key for each distance."""
    # Two products per key are its score by content and its weighted value.
    return encoding_of(model).products_per_key > 2


def record_of(paths: AttentionPaths[ChosenPath]) -> dict[str, str]:
    """Returns the implementations by use, as config.json records them."""
    return {
        "training": str(paths.training.implementation),
        "evaluation": str(paths.cached.implementation),
    }


def describe(paths: AttentionPaths[ChosenPath], before: Mapping[str, str] | None = None) -> str:
    """Describes the choice and its reasons, for the log.

    Args:
      paths: The choice.
      before: The recorded implementations by use. If it is passed, only uses that changed are
        described, so that the text may be empty.
    """
    reasons = {"training": paths.training.reason, "evaluation": paths.cached.reason}

    # Uses that have the same reason share one clause.
    clauses: dict[str, list[str]] = {}
    for use, name in record_of(paths).items():
        if before is None:
            words = f"{use} {name}"
        elif before.get(use, name) != name:
            words = f"{use} was {before[use]} and is now {name}"
        else:
            continue
        clauses.setdefault(reasons[use], []).append(words)
    return "; ".join(f"{', '.join(uses)} ({reason})" for reason, uses in clauses.items())
