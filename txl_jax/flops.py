"""Floating-point operations (FLOPs) of the model, and peak FLOP/s of devices.

Counts the model's matmuls, at two FLOPs per multiply-add: not the softmax, the norms, nor what
`remat` computes again. Query i of a segment attends to M + i + 1 keys, on average M + (L + 1) / 2,
or M with `same_length`. Position scores saved by a clamp or a short table are counted. For an
adaptive softmax only the head counts: how often a token needs a tail depends on the text.
"""

import dataclasses
import re

import jax

from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, Network, TrainConfig
from txl_jax.modules.positions import encoding_of

# Peak of dense matmuls, TFLOP/s per device, from the makers' data sheets: in bfloat16, of the older
# GPUs in float16.
_TPUS = {"v2": 22.5, "v3": 61.5, "v4": 275, "v5 lite": 197, "v5": 459, "v5p": 459, "v6 lite": 918}
_GPUS = {
    "A100": 312,
    "H100": 989,
    "H100 PCIe": 756,
    "H200": 989,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
}
_OLDER_GPUS = {"V100": 125, "T4": 65}
_PEAKS = {f"TPU {name}": peak for name, peak in _TPUS.items()} | _GPUS | _OLDER_GPUS


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The work of one training step, of one ensemble member."""

    # Tokens that are read for the first time.
    tokens: int
    # None if they are not counted.
    flops: float | None = None
    # FLOP/s of all devices together, or None if it is unknown.
    peak_flops: float | None = None
    # What `model.remat=full` adds: all layers forward once more, not the softmax.
    recomputed_flops: float = 0.0


def of_step(config: ExperimentConfig, *, vocab_size: int, n_device: int) -> StepCost:
    """Returns the work of one training step on `n_device` devices of this machine's kind."""
    model = config.model
    train = config.train
    peak = device_peak(jax.devices()[0].device_kind)
    forward = of_inference(model, train, vocab_size=vocab_size)
    # Keys and values of the memory, and position keys, are projected again in every segment, as
    # weights have changed. Backward, they have a gradient of the weights only.
    projected = _of_memory(model, train)
    recomputed = forward - _softmax(model, vocab_size) + projected
    return StepCost(
        tokens=train.batch_size * train.new_tokens,
        flops=(3 * forward + 2 * projected) * train.batch_size * train.segment_len,
        peak_flops=None if peak is None else peak * n_device,
        recomputed_flops=recomputed * train.batch_size * train.segment_len,
    )


def of_inference(
    config: ModelConfig, lengths: TrainConfig | EvalConfig, *, vocab_size: int
) -> float:
    """Returns the FLOPs per token of inference, with a KV cache."""
    if config.network is Network.LSTM:  # Four gates, from inputs and from outputs.
        return config.n_layer * 16 * config.d_model**2 + _softmax(config, vocab_size)
    # Three gates, from inputs. The first layer reads two of them.
    if config.network is Network.QRNN:
        return (config.n_layer + 1) * 6 * config.d_model**2 + _softmax(config, vocab_size)
    keys = (
        lengths.mem_len if lengths.same_length else lengths.mem_len + (lengths.segment_len + 1) / 2
    )
    width = config.n_head * config.d_head
    # Queries, keys, values, output and feed-forward part.
    per_position = 2 * config.d_model * (4 * width + 2 * config.d_inner)
    # Content score, position score and weighted value of one query and one key.
    per_key = 2 * encoding_of(config).products_per_key * width
    return config.n_layer * (per_position + per_key * keys) + _softmax(config, vocab_size)


def device_peak(kind: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name in JAX, or None if it is unknown."""
    found = [name for name in _PEAKS if re.search(rf"\b{name}\b", kind)]
    return 1e12 * _PEAKS[max(found, key=len)] if found else None


def _of_memory(config: ModelConfig, lengths: TrainConfig) -> float:
    """Returns the FLOPs of memory keys and values, and of position keys, per segment token."""
    if config.network is not Network.TRANSFORMER_XL:
        return 0
    project = 2 * config.d_model * config.n_head * config.d_head
    codes = lengths.mem_len + lengths.segment_len if encoding_of(config).projects_codes else 0
    return config.n_layer * project * (2 * lengths.mem_len + codes) / lengths.segment_len


def _softmax(config: ModelConfig, vocab_size: int) -> float:
    head = config.cutoffs[0] + len(config.cutoffs) if config.cutoffs else vocab_size
    projection = config.d_model * config.embed_width if config.has_projections else 0
    return 2 * (head * config.embed_width + projection)
