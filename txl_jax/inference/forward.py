"""The model with weights that stand still: what does not change from segment to segment is computed once.

    params = prepare_params(params, model, segment_len=128, mem_len=3800, clamp_len=1000)
    memory = init_memory(weights, model, batch_size=1, ...)
    hidden, memory = read(weights, model, tokens, memory, window=3800)

`TransformerXL.encode` projects the whole memory to keys and values, and the position codes to position keys, in every
segment and layer, as training must. Here keys and values are what is remembered, and position keys are part of the
weights. The numbers are the same up to rounding (tests/test_inference.py).

Every encoding admits it: with relative positions (the paper's, Shaw's) a key says nothing of where it stands, and absolute
ones are in the stored states, which are reused as they are. An LSTM has no keys (`txl_jax.inference.scorer`).

Layers follow one another as code and not in a `lax.scan`: a scan would cut each layer's weights and memory out of
stacked arrays, that is copy them, in every step. Compile time therefore grows with N (0.2 s a layer on a CPU).
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import Encoding, NormPlace
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.cache import InitialKeyValue, KVCache
from txl_jax.modules.block import layer_norm
from txl_jax.modules.feed_forward import FeedForward
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.attention import positions
from txl_jax.ops.attention.cached import Visible, cached_attention, table_length, visible
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes, check_ambient_mesh
from txl_jax.sharding.activations import constrain


@flax.struct.dataclass
class PositionKeys:
    """What the scores of the distances P - 1, .., 0 are made of."""

    bias: jax.Array | None  # v, [H, E], divided by sqrt(E).
    key: jax.Array  # [H, E, P]
    score: jax.Array | None  # [H, P], of Shaw's encoding as the original has it, divided by sqrt(E).


@flax.struct.dataclass
class Layer:
    """One layer's weights, in the compute type."""

    query_key_value: jax.Array  # [D, 3, H, E]; the query's part is divided by sqrt(E).
    output: jax.Array  # [H * E, D]
    content_bias: jax.Array | None  # u, [H, E], divided by sqrt(E); None: the encoding has none.
    by_distance: PositionKeys | None  # None: absolute positions.
    added: (
        jax.Array | None
    )  # [P, D], what Al-Rfou's layers add to positions at the distances P - 1, .., 0 from the end.
    norms: tuple[Any, Any]  # Of attention and feed-forward part.
    feed_forward: Any


@flax.struct.dataclass
class DecodeParams:
    """Parameters of a `TransformerXL`, laid out for reading at given lengths."""

    outer: Any  # Embedding and final norm, by the names of the model's own parameters.
    layers: tuple[Layer, ...]
    clusters: tuple[adaptive_softmax.Cluster, ...]  # Of the softmax.
    start: InitialKeyValue  # What an empty memory holds.
    clamp_len: int | None = flax.struct.field(pytree_node=False)  # What `embed` takes.
    longest: int = flax.struct.field(pytree_node=False)  # Slots and tokens of a segment together, at most.


def prepare_params(
    params: Any, model: TransformerXL, *, segment_len: int, mem_len: int, clamp_len: int | None
) -> DecodeParams:
    """The weights for segments of up to `segment_len` tokens and `mem_len` slots of memory; to be jitted."""
    c = model.config
    capacity = cache_lib.cache_capacity(mem_len=mem_len, segment_len=segment_len)
    n_position = table_length(segment_len=segment_len, capacity=capacity, clamp_len=c.clamp(clamp_len))
    distances = positions.key_distances(n_position)
    if c.encoding is Encoding.AL_RFOU:  # Of the segment's own places only.
        distances = positions.key_distances(segment_len, clamp_len=c.clamp(clamp_len))
    stacked = params["stack"]["layers"]
    shared_biases = params["stack"].get("biases")
    each = [jax.tree.map(lambda stack, i=i: stack[i], stacked) for i in range(c.n_layer)]
    layers = tuple(_prepare_layer(layer, layer.get("biases", shared_biases), distances, model) for layer in each)
    return DecodeParams(
        outer=_cast({name: part for name, part in params.items() if name not in ("stack", "softmax")}, model),
        layers=layers,
        clusters=tuple(model.apply({"params": params}, method=model.clusters)),
        start=_start_rows(layers, model),
        clamp_len=clamp_len,
        longest=capacity + segment_len,
    )


def for_single_tokens(weights: DecodeParams, *, mem_len: int) -> DecodeParams:
    """The weights for segments of one token: of the position keys, those of distances up to M."""

    def shorten(layer: Layer) -> Layer:
        if layer.by_distance is None:
            return layer
        key, score = layer.by_distance.key, layer.by_distance.score
        score = None if score is None else score[:, -(mem_len + 1) :]
        return layer.replace(by_distance=layer.by_distance.replace(key=key[:, :, -(mem_len + 1) :], score=score))

    return weights.replace(layers=tuple(shorten(layer) for layer in weights.layers), longest=mem_len + 1)


def init_memory(
    weights: DecodeParams,
    model: TransformerXL,
    *,
    batch_size: int,
    mem_len: int,
    segment_len: int,
    dtype: jnp.dtype | None = None,
) -> KVCache:
    """The memory before the first segment, stored as `dtype`; None: as computed."""
    return cache_lib.init_cache(
        weights.start,
        batch_size=batch_size,
        mem_len=mem_len,
        segment_len=segment_len,
        dtype=dtype or jnp.dtype(model.config.dtype),
        start=model.compat.memory_start,
    )


def read(
    weights: DecodeParams, model: TransformerXL, tokens: jax.Array, memory: KVCache, *, window: int | None
) -> tuple[jax.Array, KVCache]:
    """Reads a segment as `TransformerXL.encode` does, without dropout.

    Args:
      tokens: int [B, L], L at most what the weights were frozen for.
      window: keys that a query sees at most, itself included; None: no limit but the memory's.

    Returns:
      Hidden states [B, L, D] of the last layer, and the memory moved on by L positions.

    Raises:
      ValueError: segments of L tokens do not fill the memory's ring evenly, or both are longer than the weights were
        frozen for.
    """
    segment_len = tokens.shape[1]
    if memory.capacity + segment_len > weights.longest:
        raise ValueError(
            f"the memory has {memory.capacity} slots and the segment {segment_len} tokens, together more than the "
            f"{weights.longest} that the weights were frozen for; freeze them for these lengths"
        )
    if memory.capacity % segment_len:
        raise ValueError(
            f"the segment has {segment_len} tokens and the memory a ring of {memory.capacity} slots, which segments must "
            "fill evenly; make the memory for this segment length"
        )
    seen = visible(memory.valid, memory.write_index, segment_len=segment_len, capacity=memory.capacity, window=window)
    outer = {"params": weights.outer}
    hidden = model.apply(outer, tokens, clamp_len=weights.clamp_len, method=model.embed)
    keys, values = [], []
    for layer, *ring in zip(weights.layers, memory.keys, memory.values, strict=True):
        hidden, key, value = _read_layer(layer, model, hidden, tuple(ring), memory.write_index, seen)
        hidden = constrain(hidden, axes.BATCH, axes.LENGTH, None)
        keys.append(key)
        values.append(value)
    memory = cache_lib.write(memory, keys, values, after=hidden)
    return model.apply(outer, hidden, method=model.finish), memory


def nll(weights: DecodeParams, model: TransformerXL, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats of each target: [B, L, D] and int [B, L] -> [B, L]."""
    check_ambient_mesh(model.num_devices)
    return adaptive_softmax.negative_log_likelihood(hidden, targets, weights.clusters, None, model.config.cutoffs)


def _read_layer(
    layer: Layer,
    model: TransformerXL,
    inputs: jax.Array,
    ring: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    seen: Visible,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, L, D] -> outputs [B, L, D], and this segment's keys and values [B, H, L, E]."""
    attention_norm, feed_forward_norm = (_norm(model, scales) for scales in layer.norms)
    pre = model.config.layer_norm is NormPlace.PRE
    if layer.added is not None:
        inputs += layer.added[-inputs.shape[1] :][None]
    heads = _project(layer, attention_norm(inputs) if pre else inputs)
    query, key, value = (constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM) for states in heads)
    position, by_distance = None, layer.by_distance
    if by_distance is not None:
        position = _biased(query, by_distance.bias), by_distance.key, by_distance.score
    attended = cached_attention(_biased(query, layer.content_bias), key, value, ring, position, slot, seen)
    batch, _, segment_len, _ = attended.shape
    attended = project(attended.swapaxes(1, 2).reshape(batch, segment_len, -1), layer.output)
    feed_forward = FeedForward(model.config, deterministic=True)

    def inner(states: jax.Array) -> jax.Array:
        return feed_forward.apply({"params": layer.feed_forward}, states)

    if pre:
        middle = inputs + attended
        return middle + inner(feed_forward_norm(middle)), key, value
    middle = attention_norm(inputs + attended)
    return feed_forward_norm(middle + inner(middle)), key, value


def _biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[B, H, L, E] and [H, E] -> [B, H, L, E]."""
    return query if bias is None else query + bias[None, :, None, :]


def _project(layer: Layer, states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of states [B, L, D], each [B, H, L, E]."""
    projected = project(states, layer.query_key_value)
    query, key, value = (projected[:, :, i].swapaxes(1, 2) for i in range(3))
    return query, key, value


def _norm(model: TransformerXL, scales: Any):
    norm = layer_norm("norm", compat=model.compat, dtype=jnp.dtype(model.config.dtype))
    return lambda states: norm.apply({"params": scales}, states)


def _prepare_layer(params: Any, biases: Any, distances: jax.Array, model: TransformerXL) -> Layer:
    """One layer of the model's parameters; `biases`: u and v, its own or those of all, if there are any."""
    attention, encoding = params["attention"], model.config.encoding
    scale, dtype = model.config.d_head**-0.5, jnp.dtype(model.config.dtype)
    parts = attention["query"] * scale, attention["key"], attention["value"]
    content_bias, by_distance = None, None
    if encoding is Encoding.RELATIVE:
        codes = positions.sinusoids(distances, model.config.d_model, dtype)
        if model.config.tie_positions:
            own = jnp.einsum("d,dhe->he", codes[-1], parts[0].astype(dtype))
            content_bias, position_bias, kernel = own, own, attention["key"]
        else:
            content_bias, position_bias = ((biases[name] * scale).astype(dtype) for name in ("content", "position"))
            kernel = attention["position_key"]
        key = jnp.einsum("pd,dhe->hep", codes, kernel.astype(dtype))
        by_distance = PositionKeys(bias=position_bias, key=key, score=None)
    elif encoding is Encoding.SHAW:
        table = {name: leaf.astype(dtype) for name, leaf in attention["positions"].items()}
        key = table["key"][distances].transpose(1, 2, 0)
        original = "score" in table  # As the original has it, beside what the paper says.
        content_bias = table["content"] * scale if original else None
        score = table["score"][distances].T * scale if original else None
        by_distance = PositionKeys(bias=None, key=key, score=score)
    return Layer(
        query_key_value=jnp.stack(parts, axis=1).astype(dtype),
        output=attention["output"].reshape(-1, model.config.d_model).astype(dtype),
        content_bias=content_bias,
        by_distance=by_distance,
        added=params["positions"]["vector"].astype(dtype)[distances] if encoding is Encoding.AL_RFOU else None,
        norms=(params["attention_norm"], params["feed_forward_norm"]),
        feed_forward=_cast(params["feed_forward"], model),
    )


def _start_rows(layers: Sequence[Layer], model: TransformerXL) -> InitialKeyValue:
    """Keys and values of a state of zeros: zeros themselves, unless a layer norm with a bias comes first."""
    dtype = jnp.dtype(model.config.dtype)
    zeros = jnp.zeros((1, 1, model.config.d_model), dtype)
    keys, values = [], []
    for layer in layers:
        pre = model.config.layer_norm is NormPlace.PRE
        _, key, value = _project(layer, _norm(model, layer.norms[0])(zeros) if pre else zeros)
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
    return InitialKeyValue(tuple(keys), tuple(values))


def _cast(params: Any, model: TransformerXL) -> Any:
    """Matrices in the compute type; vectors (biases, scales of norms) as they are."""
    dtype = jnp.dtype(model.config.dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
