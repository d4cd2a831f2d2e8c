"""Inference: the forward pass with a KV cache and prepared parameters.

    params = prepare_params(variables["params"], model, segment_len=128, mem_len=3800, clamp_len=1000)
    cache = init_cache(params, model, batch_size=1, segment_len=128, mem_len=3800)
    hidden, cache = forward(params, model, tokens, cache, window=3800)

This is the twin of `TransformerXL.__call__` (`modules.transformer_xl`, `modules.block`, `modules.attention`), which
projects the whole memory to keys and values, and the position codes to position keys, in every segment and layer, as
training must. Here the cache holds keys and values, and position keys are computed once. Both passes share `ops` and
the objects of `modules.positions`; the numbers are the same up to rounding (tests/inference/test_forward.py).

Every encoding admits it: with relative positions (as the paper's and Shaw's) keys do not depend on their position, and
absolute positions are in the stored states, which are reused as they are. An RNN has no keys (`inference.scorer`).

Layers are unrolled and not a `lax.scan`: a scan would slice each layer's parameters and cache out of stacked arrays,
that is copy them, in every step. Compile time therefore grows with N (0.2 s a layer on a CPU).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import EvalConfig, NormPlace, WeightDType
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.cache import InitialKeyValue, KVCache
from txl_jax.inference.weight_quantization import quantize_cluster, quantize_layer
from txl_jax.modules.block import layer_norm
from txl_jax.modules.feed_forward import Dense, feed_forward
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.positions.encoding import PositionKeys
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import adaptive_softmax
from txl_jax.ops.attention import CachedVisibility, cached_attention
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes, check_ambient_mesh
from txl_jax.sharding.activations import constrain


class Layer(flax.struct.PyTreeNode):
    """Prepared parameters of one layer, in the compute type; matrices may be `Int8` or `Transposed`."""

    query_key_value: Any  # [D, 3, H, E]; the query's part is divided by sqrt(E).
    output: Any  # [H * E, D]
    content_bias: jax.Array | None  # u, [H, E], divided by sqrt(E); None: the encoding has none.
    position_keys: PositionKeys | None  # None: absolute positions.
    position_vectors: jax.Array | None  # [L, D], added at the distances L - 1, .., 0 from the end; None: nothing.
    norms: tuple[Any, Any]  # Of attention and feed-forward part.
    feed_forward: tuple[Dense, Dense]


class DecodeParams(flax.struct.PyTreeNode):
    """Parameters of a `TransformerXL`, prepared for inference at given lengths."""

    embed_and_norm: Any  # Embedding and final norm, by the names of the model's own parameters.
    layers: tuple[Layer, ...]
    clusters: tuple[adaptive_softmax.Cluster, ...]  # Of the softmax.
    initial: InitialKeyValue  # Keys and values of an empty cache.
    clamp_len: int | None = flax.struct.field(pytree_node=False)  # Argument of `TransformerXL.embed`.
    max_keys: int = flax.struct.field(pytree_node=False)  # Slots of the cache and tokens of a segment, at most.


class SegmentStates(NamedTuple):
    """States of a segment, of which nothing is in the cache yet."""

    hidden: jax.Array  # [B, L, D], of the last layer, before `finish`.
    keys: Sequence[jax.Array]  # Per layer [B, H, L, E].
    values: Sequence[jax.Array]  # Per layer [B, H, L, E].


def prepare_params(
    params: Any,
    model: TransformerXL,
    *,
    segment_len: int,
    mem_len: int,
    clamp_len: int | None,
    weight_dtype: WeightDType | None = None,
) -> DecodeParams:
    """Prepares parameters for segments of up to `segment_len` tokens and `mem_len` slots of memory; to be jitted.

    `weight_dtype` is that of matrices which every token is multiplied with; None: the model's. For int8
    `weight_quantization.check_devices` has to allow the mesh.
    """
    capacity = cache_lib.cache_capacity(mem_len=mem_len, segment_len=segment_len)
    lengths: dict[str, Any] = {"segment_len": segment_len, "capacity": capacity, "clamp_len": clamp_len}
    stacked, shared = params["stack"]["layers"], params["stack"].get("biases")
    each = [jax.tree.map(lambda stack, i=i: stack[i], stacked) for i in range(model.config.n_layer)]
    layers = tuple(_prepare_layer(layer, shared, model, **lengths) for layer in each)
    clusters = tuple(_apply(model, params, method=model.clusters))
    initial = _initial_key_value(layers, model)
    if weight_dtype is WeightDType.INT8:
        layers, clusters = tuple(map(quantize_layer, layers)), tuple(map(quantize_cluster, clusters))
    return DecodeParams(
        embed_and_norm=_cast({name: part for name, part in params.items() if name not in ("stack", "softmax")}, model),
        layers=layers,
        clusters=clusters,
        initial=initial,
        clamp_len=clamp_len,
        max_keys=capacity + segment_len,
    )


def for_single_tokens(params: DecodeParams, *, mem_len: int) -> DecodeParams:
    """Returns the parameters for segments of one token: of position keys and scores, those of distances up to M."""

    def shorten(layer: Layer) -> Layer:
        keys = layer.position_keys
        if keys is None:
            return layer
        tables = jax.tree.map(lambda table: table[..., -(mem_len + 1) :], (keys.key, keys.score))
        key, score = tables
        return layer.replace(position_keys=keys.replace(key=key, score=score))

    return params.replace(layers=tuple(shorten(layer) for layer in params.layers), max_keys=mem_len + 1)


def init_cache(
    params: DecodeParams,
    model: TransformerXL,
    *,
    batch_size: int,
    mem_len: int,
    segment_len: int,
    dtype: jnp.dtype | None = None,
) -> KVCache:
    """Returns the cache before the first segment, stored as `dtype`; None: as computed."""
    return cache_lib.init_cache(
        params.initial,
        batch_size=batch_size,
        mem_len=mem_len,
        segment_len=segment_len,
        dtype=dtype or jnp.dtype(model.config.dtype),
        start=model.compat.memory_start,
    )


def forward(
    params: DecodeParams, model: TransformerXL, tokens: jax.Array, cache: KVCache, *, window: int | None
) -> tuple[jax.Array, KVCache]:
    """Computes the hidden states of a segment as `TransformerXL.__call__` does, without dropout.

    Args:
      tokens: int [B, L], L at most that of `prepare_params`.
      window: keys that a query sees at most, itself included; None: no limit but the cache's.

    Returns:
      Hidden states [B, L, D] of the last layer, and the cache moved on by L positions.

    Raises:
      UserError: L does not divide the cache's capacity, or both are longer than the parameters were prepared for.
    """
    segment_len = tokens.shape[1]
    if cache.capacity + segment_len > params.max_keys:
        raise UserError(
            f"the cache has {cache.capacity} slots and the segment {segment_len} tokens, together more than the "
            f"{params.max_keys} that the parameters were prepared for; prepare them for these lengths"
        )
    if cache.capacity % segment_len:
        raise UserError(
            f"the segment has {segment_len} tokens and the cache a ring of {cache.capacity} slots, which segments must "
            "fill evenly; make the cache for this segment length"
        )
    states = apply_layers(params, model, tokens, cache, window=window)
    cache = cache_lib.write(cache, states.keys, states.values, after=states.hidden)
    if (documents := memory_lib.documents(tokens, model.end_token)) is not None:
        cache = cache.replace(valid=documents.valid(cache.valid))
    return finish(params, model, states.hidden), cache


def apply_layers(
    params: DecodeParams, model: TransformerXL, tokens: jax.Array, cache: KVCache, *, window: int | None
) -> SegmentStates:
    """Computes what `forward` does without writing to the cache, whose index may be any; `finish` has what follows.

    The rows of the cache may also be at indices of their own: `write_index` [B].
    """
    segment_len = tokens.shape[1]
    documents = memory_lib.documents(tokens, model.end_token)
    start = None if documents is None else documents.start
    visibility = CachedVisibility(cache.valid, cache.write_index, segment_len, cache.capacity, window, start)
    hidden = _apply(model, params.embed_and_norm, tokens, clamp_len=params.clamp_len, method=model.embed)
    keys, values = [], []
    for layer, stored_keys, stored_values in zip(params.layers, cache.keys, cache.values, strict=True):
        hidden, key, value = _forward_layer(layer, model, hidden, (stored_keys, stored_values), visibility)
        hidden = constrain(hidden, axes.BATCH, axes.LENGTH, None)
        keys.append(key)
        values.append(value)
    return SegmentStates(hidden, keys, values)


def finish(params: DecodeParams, model: TransformerXL, hidden: jax.Array) -> jax.Array:
    """Computes the softmax's inputs of the last layer's states: [B, L, D] -> [B, L, D]."""
    found: jax.Array = _apply(model, params.embed_and_norm, hidden, method=model.finish)
    return found


def generation_window(model: TransformerXL, eval_config: EvalConfig) -> int:
    """Returns the keys that a query sees while text is generated: as many at every position of its segment."""
    limit = model.compat.window(eval_config.mem_len, same_length=eval_config.same_length)
    return eval_config.mem_len + 1 if limit is None else limit


def nll(params: DecodeParams, model: TransformerXL, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the nats of each target: [B, L, D] and int [B, L] -> [B, L]."""
    check_ambient_mesh(model.num_devices)
    return adaptive_softmax.negative_log_likelihood(hidden, targets, params.clusters, None, model.config.cutoffs)


def _forward_layer(
    layer: Layer,
    model: TransformerXL,
    inputs: jax.Array,
    ring: tuple[Any, Any],
    visibility: CachedVisibility,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies one layer, as `modules.block.Block` does.

    [B, L, D] -> outputs [B, L, D], and this segment's keys and values [B, H, L, E].
    """
    attention_norm, feed_forward_norm = (_norm(model, scales) for scales in layer.norms)
    pre = model.config.layer_norm is NormPlace.PRE
    if layer.position_vectors is not None:
        inputs += layer.position_vectors[-inputs.shape[1] :][None]
    heads = _project(layer, attention_norm(inputs) if pre else inputs)
    query, key, value = (constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM) for states in heads)
    position, position_keys = None, layer.position_keys
    if position_keys is not None:
        position = _biased(query, position_keys.bias), position_keys.key, position_keys.score
    content = _biased(query, layer.content_bias), key, value, ring
    attended = _attend(*content, position, visibility, implementation=model.implementations.cached)
    batch, _, segment_len, _ = attended.shape
    attended = project(attended.swapaxes(1, 2).reshape(batch, segment_len, -1), layer.output)
    if pre:
        middle = inputs + attended
        return middle + feed_forward(feed_forward_norm(middle), *layer.feed_forward), key, value
    middle = attention_norm(inputs + attended)
    return feed_forward_norm(middle + feed_forward(middle, *layer.feed_forward)), key, value


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ring: Any,
    position: Any,
    visibility: CachedVisibility,
    **how: Any,
) -> jax.Array:
    """Computes `cached_attention`, row by row where each is at an index of its own.

    Only attention is: with `vmap` over all of a step, products of 16 rows with a matrix are made as those of one row
    are (`ops.matmul`), and the server writes 138 tokens/s, not 152 (wt103_base, an AMD EPYC).
    """
    if jnp.ndim(visibility.write_index) == 0:
        return cached_attention(query, key, value, ring, position, visibility, **how)
    position_query, *of_all = (None,) if position is None else position

    def of_row(of_one: Any, write_index: jax.Array) -> jax.Array:
        query, key, value, ring, position_query, valid = jax.tree.map(lambda array: array[None], of_one)
        own = dataclasses.replace(visibility, valid=valid, write_index=write_index)
        place = None if position is None else (position_query, *of_all)
        return cached_attention(query, key, value, ring, place, own, **how)[0]

    rows = query, key, value, ring, position_query, visibility.valid
    attended: jax.Array = jax.vmap(of_row)(rows, visibility.write_index)
    return attended


def _biased(query: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds [H, E] to [B, H, L, E]."""
    return query if bias is None else query + bias[None, :, None, :]


def _project(layer: Layer, states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries, keys and values of states [B, L, D], each [B, H, L, E]."""
    projected = project(states, layer.query_key_value)
    query, key, value = (projected[:, :, i].swapaxes(1, 2) for i in range(3))
    return query, key, value


def _norm(model: TransformerXL, scales: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the layer norm with the parameters `scales`."""
    norm = layer_norm("norm", compat=model.compat, dtype=jnp.dtype(model.config.dtype))
    return lambda states: _apply(norm, scales, states)


def _prepare_layer(
    params: Any, shared: Any, model: TransformerXL, *, segment_len: int, capacity: int, clamp_len: int | None
) -> Layer:
    """Prepares one layer of the model's parameters; `shared`: the encoding's parameters of all layers."""
    c, attention = model.config, params["attention"]
    dtype = jnp.dtype(c.dtype)
    parts = attention["query"] * c.d_head**-0.5, attention["key"], attention["value"]
    lengths: dict[str, Any] = {"segment_len": segment_len, "capacity": capacity, "clamp_len": clamp_len}
    terms = encoding_of(c, model.compat).decode_terms(params, shared, **lengths)
    return Layer(
        query_key_value=jnp.stack(parts, axis=1).astype(dtype),
        output=attention["output"].reshape(-1, c.d_model).astype(dtype),
        **terms._asdict(),
        norms=(params["attention_norm"], params["feed_forward_norm"]),
        feed_forward=(_dense(params["feed_forward"], "inner", dtype), _dense(params["feed_forward"], "outer", dtype)),
    )


def _dense(params: Any, name: str, dtype: jnp.dtype) -> Dense:
    return Dense(params[f"{name}_kernel"].astype(dtype), params[f"{name}_bias"].astype(dtype))


def _initial_key_value(layers: Sequence[Layer], model: TransformerXL) -> InitialKeyValue:
    """Computes keys and values of a state of zeros: zeros themselves, unless a layer norm with a bias comes first."""
    dtype = jnp.dtype(model.config.dtype)
    zeros = jnp.zeros((1, 1, model.config.d_model), dtype)
    keys, values = [], []
    for layer in layers:
        pre = model.config.layer_norm is NormPlace.PRE
        _, key, value = _project(layer, _norm(model, layer.norms[0])(zeros) if pre else zeros)
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
    return InitialKeyValue(tuple(keys), tuple(values))


def _apply(module: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    """Applies a module to parameters; its results are arrays, where flax's types allow more."""
    return module.apply({"params": params}, *args, **options)


def _cast(params: Any, model: TransformerXL) -> Any:
    """Casts matrices to the compute type; vectors (biases, scales of norms) stay as they are."""
    dtype = jnp.dtype(model.config.dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
