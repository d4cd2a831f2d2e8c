"""Floating-point operations (FLOPs) of the model, and peak FLOP/s of devices.

Counts the model's matmuls, at two FLOPs per multiply-add: not the softmax, the norms, nor what
`remat` computes again. tests/test_flops.py compares them with the matmuls of the traced program,
which differ as follows:

- Attention counts the visible pairs of query and key, even if an implementation computes hidden
  pairs and masks them. Query i of a segment attends to M + i + 1 keys, on average M + (L + 1) / 2.
  With `same_length` it attends to M keys, or M + 1, depending on `model.compat`. Position scores
  that a clamp or a short table saves are counted.
- For an adaptive embedding and softmax, only the head counts. How often a token needs a tail
  depends on the text.

Letters: L segment length, M memory length, D model size.
"""

import dataclasses
import re

import jax

from txl_jax.config import (
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    Network,
    NormPlace,
    TrainConfig,
)
from txl_jax.modules.positions import encoding_of

# Peak of dense matmuls in TFLOP/s per device, from the manufacturers' data sheets, in bfloat16 (the
# older GPUs in float16).
_TPUS = {"v2": 22.5, "v3": 61.5, "v4": 275, "v5 lite": 197, "v5": 459, "v5p": 459, "v6 lite": 918}
_GPUS = {
    "A100": 312,
    "H100": 989,
    "H100 PCIe": 756,
    "H200": 989,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX 4090": 165.2,
}
_OLDER_GPUS = {"V100": 125, "T4": 65}
_PEAKS = {f"TPU {name}": peak for name, peak in _TPUS.items()} | _GPUS | _OLDER_GPUS


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The work of one training step for one ensemble member."""

    # Number of tokens that are read for the first time.
    tokens: int
    # None if they are not counted.
    flops: float | None = None
    # FLOP/s of all devices together, or None if it is unknown.
    peak_flops: float | None = None
    # FLOPs that `model.remat=full` adds: all layers forward again, without embedding and softmax.
    recomputed_flops: float = 0.0


def of_step(config: ExperimentConfig, *, vocab_size: int, n_device: int) -> StepCost:
    """Returns the work of one training step on `n_device` devices of this machine's kind."""
    model = config.model
    train = config.train
    # All positions of the segments, including the tokens that `train.stride` reads again.
    n_position = train.batch_size * train.segment_len
    forward = n_position * of_inference(model, train, vocab_size=vocab_size)

    # Inference projects neither the memory nor positional encodings. Training must, in every step,
    # because the weights have changed.
    memory = _of_memory(model, train)
    position_keys = _of_position_keys(model, train)

    # The backward pass of a matmul is two matmuls, for the gradients of both operands. Positional
    # encodings and the memory have no gradient, which leaves only the gradient of the weights. If a
    # layer norm precedes the projections, its scale and bias need both gradients for the memory.
    is_pre_norm = model.layer_norm is NormPlace.PRE
    memory_passes = 3 if is_pre_norm else 2
    flops = 3 * forward + memory_passes * memory + 2 * position_keys

    vocabulary = n_position * _of_vocabulary(model, vocab_size)
    recomputed_flops = forward - vocabulary + memory + position_keys

    peak_flops = device_peak(jax.devices()[0].device_kind)
    if peak_flops is not None:
        peak_flops *= n_device
    return StepCost(
        tokens=train.batch_size * train.new_tokens,
        flops=flops,
        peak_flops=peak_flops,
        recomputed_flops=recomputed_flops,
    )


def of_inference(
    config: ModelConfig, lengths: TrainConfig | EvalConfig, *, vocab_size: int
) -> float:
    """Returns the FLOPs per token of inference, with a KV cache and prepared position keys."""
    vocabulary = _of_vocabulary(config, vocab_size)
    d_model = config.d_model
    if config.network is Network.LSTM:
        # Four gates, from inputs [D] and from outputs [D].
        return vocabulary + config.n_layer * 4 * _matmul(1, 2 * d_model, d_model)
    if config.network is Network.QRNN:
        # Three gates, from inputs [D]. The first layer reads two of them.
        return vocabulary + (config.n_layer + 1) * 3 * _matmul(1, d_model, d_model)

    # Query, key, value and output, and the two matmuls of the feed-forward part.
    heads_dim = config.n_head * config.d_head
    attention_projections = 4 * _matmul(1, d_model, heads_dim)
    feed_forward = 2 * _matmul(1, d_model, config.d_inner)
    # Content score, position score and weighted value of a query and a key.
    n_product = encoding_of(config).products_per_key
    attention = _keys_per_query(config, lengths) * n_product * _matmul(1, heads_dim, 1)
    return vocabulary + config.n_layer * (attention_projections + feed_forward + attention)


def device_peak(kind: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name in JAX, or None if it is unknown."""
    # These are slower, and have the other cards' names in theirs.
    if re.search("Laptop|4090 D", kind):
        return None
    names = [name for name in _PEAKS if re.search(rf"\b{name}\b", kind)]
    if not names:
        return None
    # "H100 PCIe" also contains the name "H100".
    return 1e12 * _PEAKS[max(names, key=len)]


def _matmul(n_row: int, n_term: int, n_column: int) -> int:
    """Returns the FLOPs of a matmul, [rows, terms] x [terms, columns]."""
    return 2 * n_row * n_term * n_column


def _keys_per_query(config: ModelConfig, lengths: TrainConfig | EvalConfig) -> float:
    """Returns the keys that a query attends to on average, with a full memory."""
    window = config.compat.window(lengths.mem_len, same_length=lengths.same_length)
    if window is not None:
        return window
    # The queries of a segment attend to M + 1, .., M + L keys.
    return lengths.mem_len + (lengths.segment_len + 1) / 2


def _of_memory(config: ModelConfig, train: TrainConfig) -> float:
    """Returns the FLOPs of projecting the memory of all rows to keys and values, in all layers."""
    if config.network is not Network.TRANSFORMER_XL:
        return 0
    n_position = train.batch_size * train.mem_len
    heads_dim = config.n_head * config.d_head
    return config.n_layer * 2 * _matmul(n_position, config.d_model, heads_dim)


def _of_position_keys(config: ModelConfig, train: TrainConfig) -> float:
    """Returns the FLOPs of projecting positional encodings, in all layers.

    All rows share the position keys. A forward pass therefore computes them once, and a training
    step once per microbatch. A mesh may compute them once on each of its devices, which counts as
    overhead, not as work of the model.
    """
    if config.network is not Network.TRANSFORMER_XL:
        return 0
    n_code = encoding_of(config).num_projected_codes(train.mem_len + train.segment_len)
    heads_dim = config.n_head * config.d_head
    per_pass = config.n_layer * _matmul(n_code, config.d_model, heads_dim)
    return train.grad_accum_steps * per_pass


def _of_vocabulary(config: ModelConfig, vocab_size: int) -> float:
    """Returns the FLOPs per token of embedding and softmax, for the head without the tails.

    A lookup is not a matmul, but the token's vector may be projected.
    """
    n_logit = vocab_size
    if config.cutoffs:
        # The head's tokens, and an entry for each tail.
        n_logit = config.cutoffs[0] + len(config.cutoffs)
    softmax = _matmul(1, config.embed_width, n_logit)
    if not config.has_projections:
        return softmax
    # From the table's width to D in the embedding, and from D to the table's width in the softmax.
    return softmax + 2 * _matmul(1, config.embed_width, config.d_model)
