"""Floating-point operations (FLOPs) per token, and peak FLOP/s of devices.

Counted are the matrix products of the mathematics, a multiplication and an addition as two operations; not the softmax,
the norms, nor anything that is computed again (`remat`). Query i of a segment meets M + i + 1 keys, on average
M + (L + 1) / 2; with `same_length` M. That a clamp or a short table spares position scores is not counted.
Of an adaptive softmax only the head counts: how often a token needs a tail depends on the text.
"""

import dataclasses
import re

import jax

from txl_jax.config import ExperimentConfig, ModelConfig, Network
from txl_jax.modules.positions import encoding_of

# Peak of dense products in bfloat16 (V100, T4: float16), FLOP/s per device, from the makers' data sheets.
_PEAKS = {
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "T4": 65e12,
}


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The work of one update."""

    tokens: int  # Read for the first time, by one member.
    flops: float | None = None  # Operations of one member, or None if they are not counted.
    peak_flops: float | None = None  # FLOP/s of all devices together, or None if it is unknown.


def of_step(config: ExperimentConfig, *, vocab_size: int, n_device: int) -> StepCost:
    """Returns the work of one update of one run or member, on `n_device` devices of this machine's kind."""
    train, peak = config.train, device_peak(jax.devices()[0].device_kind)
    per_token = of_training(
        config.model,
        vocab_size=vocab_size,
        segment_len=train.segment_len,
        mem_len=train.mem_len,
        same_length=train.same_length,
    )
    return StepCost(
        tokens=train.batch_size * train.new_tokens,
        flops=per_token * train.batch_size * train.segment_len,
        peak_flops=None if peak is None else peak * n_device,
    )


def of_inference(config: ModelConfig, *, vocab_size: int, segment_len: int, mem_len: int, same_length: bool) -> float:
    """Returns the operations per token of inference, with a KV cache."""
    if config.network is Network.LSTM:  # Four gates, from inputs and from outputs.
        return config.n_layer * 16 * config.d_model**2 + _softmax(config, vocab_size)
    if config.network is Network.QRNN:  # Three gates, from inputs; the first layer reads two of them.
        return (config.n_layer + 1) * 6 * config.d_model**2 + _softmax(config, vocab_size)
    keys, width = mem_len if same_length else mem_len + (segment_len + 1) / 2, config.n_head * config.d_head
    # Queries, keys, values, output and feed-forward part.
    per_position = 2 * config.d_model * (4 * width + 2 * config.d_inner)
    # Content score, position score and weighted value of one query and one key.
    per_key = 2 * encoding_of(config).products_per_key * width
    return config.n_layer * (per_position + per_key * keys) + _softmax(config, vocab_size)


def of_training(config: ModelConfig, *, vocab_size: int, segment_len: int, mem_len: int, same_length: bool) -> float:
    """Returns the operations per token of an update: forward, and twice as many backward.

    The memory is projected anew in every segment, as weights have changed, and nothing goes back into it; so are the
    position codes, of M + L distances.
    """
    forward = of_inference(
        config, vocab_size=vocab_size, segment_len=segment_len, mem_len=mem_len, same_length=same_length
    )
    # Backward, the projections of the memory and of the codes have a gradient of the weights only.
    return 3 * forward + 2 * _of_memory(config, segment_len=segment_len, mem_len=mem_len)


def of_recomputing(config: ModelConfig, *, vocab_size: int, segment_len: int, mem_len: int, same_length: bool) -> float:
    """Returns the operations per token that `remat=full` adds: all layers forward once more, not the softmax."""
    forward = of_inference(
        config, vocab_size=vocab_size, segment_len=segment_len, mem_len=mem_len, same_length=same_length
    )
    return forward - _softmax(config, vocab_size) + _of_memory(config, segment_len=segment_len, mem_len=mem_len)


def device_peak(kind: str) -> float | None:
    """Returns the peak operations per second of a device by its name in JAX; None: unknown."""
    found = [name for name in _PEAKS if re.search(rf"\b{name}\b", kind)]
    return _PEAKS[max(found, key=len)] if found else None


def _of_memory(config: ModelConfig, *, segment_len: int, mem_len: int) -> float:
    """Returns the operations of keys and values of the memory, and of the position keys, per token of the segment."""
    if config.network is not Network.TRANSFORMER_XL:
        return 0
    project = 2 * config.d_model * config.n_head * config.d_head
    codes = project * (mem_len + segment_len) / segment_len if encoding_of(config).projects_codes else 0
    return config.n_layer * (2 * project * mem_len / segment_len + codes)


def _softmax(config: ModelConfig, vocab_size: int) -> float:
    head = config.cutoffs[0] + len(config.cutoffs) if config.cutoffs else vocab_size
    projection = config.d_model * config.embed_width if config.has_projections else 0
    return 2 * (head * config.embed_width + projection)
