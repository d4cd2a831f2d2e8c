"""Chooses what the backward pass recomputes (`model.remat=auto`), and records the reason.

The choice is made once, when a run begins, by this table:

| platform | device memory                         | choice |
|----------|---------------------------------------|--------|
| cpu      | any                                   | none   |
| tpu, gpu | unknown, or enough for `dots`         | dots   |
| tpu, gpu | less than `estimate_bytes` of `dots`  | full   |

Accelerators are bound by memory, and `dots` moves fewer bytes than `none`, not more: it recomputes
layer norms, ReLU and dropout masks instead of writing and reading them, but neither matmuls nor
attention. The compiled programs of a training step show this (bfloat16, HBM traffic and peak):

| step                           | none           | dots            |
|--------------------------------|----------------|-----------------|
| enwik8_12l, TPU v5e, batch 22  | 28.4, 6.02 GB  | 18.9, 3.80 GB   |
| enwik8_24l, H200, batch 8      | 222, 18.1 GB   | 186, 12.8 GB    |

`full` runs each layer forward once more, about a third more work, and needs the least memory.

Later starts of a run use the recorded choice (`Run.remat_for`), even on other devices.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import ExperimentConfig, ModelConfig, Remat
from txl_jax.modules.remat import for_platform
from txl_jax.ops.attention import AttentionCall, Implementation
from txl_jax.runs.attention_choice import training_call
from txl_jax.runtime.environment import device_memory_limit, megabytes
from txl_jax.sharding.mesh import TENSOR

# A TPU stores the last axis of an array in rows of this many numbers.
_TPU_LANES = 128


class ChosenRemat(NamedTuple):
    """What the backward pass recomputes and the reason for it."""

    remat: Remat
    # For the log.
    reason: str


class _KeptArrays(NamedTuple):
    """Number of arrays of each kind that a layer keeps for its backward pass.

    Arrays have the compute dtype unless noted. tests/modules/test_remat.py counts them in the jaxpr
    of a training step.
    """

    model: int  # [B, L, D]: the inputs of the layer and of matmuls, and outputs of matmuls.
    norms: int  # float32 [B, L, D], of layer norms.
    inner: int  # [B, L, F], of the feed-forward network.
    masks: int  # bool [B, L, F], of ReLU.
    queries: int  # [B, H, L, E], queries and attention's outputs.
    keys: int  # [B, H, K, E], keys and values.


_KEPT = {
    Remat.NONE: _KeptArrays(model=2, norms=6, inner=1, masks=1, queries=2, keys=2),
    Remat.DOTS: _KeptArrays(model=3, norms=0, inner=1, masks=0, queries=2, keys=2),
    Remat.FULL: _KeptArrays(model=1, norms=0, inner=0, masks=0, queries=0, keys=0),
}

# Number of arrays of the scores' size that the reference keeps if nothing is recomputed, in units
# of the compute dtype: probabilities in float32, and rounded ones.
_SCORES_OF_REFERENCE = 3


def choose_remat(
    asked: Remat,
    *,
    config: ExperimentConfig,
    mesh: Mesh | AbstractMesh,
    implementation: Implementation,
    device_bytes: Callable[[], Mapping[str, int]],
    vocab_size: int,
    n_member: int = 1,
) -> ChosenRemat:
    """Chooses what the backward pass of a run recomputes.

    Args:
      asked: The choice that was made before, or `Remat.AUTO` (`Run.remat_for`).
      config: The run's settings.
      mesh: The run's mesh. An abstract mesh has no devices, and counts as CPUs.
      implementation: The implementation of attention in training.
      device_bytes: `Built.device_bytes`, which is called only if memory decides.
      vocab_size: V.
      n_member: Members of an ensemble, or 1.
    """
    if asked is not Remat.AUTO:
        is_recorded = config.model.remat is Remat.AUTO
        return ChosenRemat(asked, "as in earlier starts" if is_recorded else "by model.remat")

    call = training_call(config, mesh)
    remat = for_platform(asked, call.platform)
    if remat is Remat.NONE:
        return ChosenRemat(remat, "a CPU's memory is large and its arithmetic slow")
    limit = _memory_limit(mesh)
    if limit is None:
        return ChosenRemat(remat, "the device does not report its memory")

    persistent = device_bytes()
    needed = n_member * estimate_bytes(
        remat,
        config=config,
        call=call,
        implementation=implementation,
        device_bytes=persistent,
        vocab_size=vocab_size,
        n_tensor=mesh.shape[TENSOR],
    )
    comparison = f"{remat} needs about {megabytes(needed)} of {megabytes(limit)} per device"
    if needed > limit:
        return ChosenRemat(Remat.FULL, comparison)
    return ChosenRemat(remat, comparison)


def describe(chosen: ChosenRemat) -> str:
    """Describes the choice and its reason, for the log."""
    return f"{chosen.remat} ({chosen.reason})"


def _memory_limit(mesh: Mesh | AbstractMesh) -> int | None:
    """Returns the bytes that JAX may use on a device of this process, or None if unknown."""
    if isinstance(mesh, AbstractMesh):
        return None
    for device in mesh.devices.flat:
        if device.process_index == jax.process_index():
            return device_memory_limit(device)
    return None


def estimate_bytes(
    remat: Remat,
    *,
    config: ExperimentConfig,
    call: AttentionCall,
    implementation: Implementation,
    device_bytes: Mapping[str, int],
    vocab_size: int,
    n_tensor: int,
) -> int:
    """Estimates the peak memory of a training step on one device, from shapes.

    For compiled programs of `dots` it is within 5 % of the compiler's own number, for others within
    15 % (tests/runs/test_remat_choice.py).

    Args:
      remat: Any value except `Remat.AUTO`.
      config: The run's settings.
      call: A call of attention in training on one device.
      implementation: The implementation of attention in training.
      device_bytes: Bytes per device of the arrays that persist between steps
        (`Built.device_bytes`).
      vocab_size: V.
      n_tensor: Devices along the mesh's axis `tensor`.
    """
    model = config.model
    n_position = call.batch * call.segment_len

    # Persistent arrays, and gradients, which have the parameters' shapes. The next memory consists
    # of the inputs that the layers keep anyway, unless it has another length.
    total = sum(device_bytes.values()) + device_bytes["parameters"]
    if config.train.mem_len != config.train.segment_len:
        total += device_bytes["segment memory"]

    # The scan stacks the arrays that each layer keeps.
    total += model.n_layer * _kept_by_layer(remat, model, call, implementation, n_tensor)

    # While the stacks are complete, either the logits are in memory (those of the head, if the
    # softmax is adaptive) with their gradient, or all arrays of one layer.
    n_logit = vocab_size
    if model.cutoffs:
        n_logit = model.cutoffs[0] + len(model.cutoffs)
    itemsize = jnp.dtype(call.dtype).itemsize
    logits = n_position * _padded(math.ceil(n_logit / n_tensor), call) * (4 + itemsize)
    one_layer = _kept_by_layer(Remat.NONE, model, call, implementation, n_tensor)
    total += max(logits, one_layer)
    return total


def _kept_by_layer(
    remat: Remat,
    model: ModelConfig,
    call: AttentionCall,
    implementation: Implementation,
    n_tensor: int,
) -> int:
    """Returns the bytes that one layer keeps for its backward pass, on one device."""
    kept = _KEPT[remat]
    n_position = call.batch * call.segment_len
    model_width = _padded(model.d_model, call)
    inner_width = _padded(model.d_inner // n_tensor, call)
    heads_width = call.n_head * _padded(call.d_head, call)

    n_number = n_position * kept.model * model_width
    n_number += n_position * kept.inner * inner_width
    n_number += n_position * kept.queries * heads_width
    n_number += call.batch * call.n_keys * kept.keys * heads_width
    if remat is not Remat.FULL:
        n_number += call.n_positions * heads_width  # Position keys, which all rows share.
        n_number += _kept_scores(remat, call, implementation)

    n_byte = n_number * jnp.dtype(call.dtype).itemsize
    n_byte += n_position * kept.norms * model_width * jnp.dtype(jnp.float32).itemsize
    n_byte += n_position * kept.masks * inner_width
    return n_byte


def _kept_scores(remat: Remat, call: AttentionCall, implementation: Implementation) -> int:
    """Returns the number of values that a layer keeps for all pairs of queries and keys."""
    n_pair = call.batch * call.n_head * call.segment_len * _padded(call.n_keys, call)
    if implementation.path == "stored":
        return n_pair
    if implementation.path == "reference" and remat is Remat.NONE:
        return _SCORES_OF_REFERENCE * n_pair
    return 0


def _padded(width: int, call: AttentionCall) -> int:
    """Returns the length of an array's last axis in memory, with padding."""
    if call.platform != "tpu":
        return width
    return math.ceil(width / _TPU_LANES) * _TPU_LANES
