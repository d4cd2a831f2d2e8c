"""Parameters prepared for inference: cast, scaled and laid out once instead of in every segment.

    params = prepare_params(
        variables["params"], model, window=None, segment_len=128, mem_len=3800, clamp_len=1000
    )

With int8 each matrix has a scale per channel: a column of a matrix, the code of a distance, a word
of the softmax. Embeddings (a token reads one row), layer norms and biases stay as they are.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import NormPlace, WeightDType
from txl_jax.errors import UserError
from txl_jax.inference.cache import InitialKeyValue, cache_capacity
from txl_jax.modules.block import Dense, layer_norm
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.positions.encoding import PositionKeys
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.adaptive_softmax import Cluster
from txl_jax.ops.matmul import Int8Table, project, quantize, transpose


class Layer(flax.struct.PyTreeNode):
    """Prepared parameters of one layer, in the compute dtype.

    Matrices may be `Int8` or `Transposed`.
    """

    # Matrices [D, 3, H, E] of queries, divided by sqrt(E), of keys and of values.
    query_key_value: Any
    # Matrix [H * E, D] that attention's outputs are multiplied by.
    output: Any
    # u, [H, E], divided by sqrt(E), or None if the encoding has no u.
    content_bias: jax.Array | None
    # Position keys and scores by distance, or None if positions are absolute.
    position_keys: PositionKeys | None
    # [L, D], added to the inputs at the distances L - 1, .., 0 from the end, or None.
    position_vectors: jax.Array | None
    # Scale and bias of the two layer norms, by flax's names.
    attention_norm: Any
    feed_forward_norm: Any
    # The inner layer, D -> F, and the outer one, F -> D.
    feed_forward: tuple[Dense, Dense]


class DecodeParams(flax.struct.PyTreeNode):
    """Parameters of a `TransformerXL`, prepared for inference at given lengths."""

    # Embedding and final norm, by the names of the model's own parameters.
    embed_and_norm: Any
    layers: tuple[Layer, ...]
    # Clusters of the adaptive softmax. A full softmax is one cluster.
    clusters: tuple[Cluster, ...]
    # The key and value in each slot of an empty cache.
    initial: InitialKeyValue
    model: TransformerXL = flax.struct.field(pytree_node=False)
    # Maximum keys per query, itself included, or None for no limit.
    window: int | None = flax.struct.field(pytree_node=False)
    # Largest distance with an encoding of its own (`TransformerXL.embed`), or None for no limit.
    clamp_len: int | None = flax.struct.field(pytree_node=False)
    # Maximum slots of the cache plus tokens of a segment.
    max_keys: int = flax.struct.field(pytree_node=False)

    def for_generation(self, *, mem_len: int) -> "DecodeParams":
        """Returns the parameters with a window, of M + 1 keys unless they have one already.

        Without a window, a segment's first query attends to the M slots and itself, and each query
        after it to one key more. With it, all have the same number, so that a text does not depend
        on how its prompt was cut into segments.
        """
        if self.window is not None:
            return self
        return self.replace(window=mem_len + 1)

    def for_single_tokens(self, *, mem_len: int) -> "DecodeParams":
        """Returns the parameters for segments of one token.

        They have position keys and scores up to the distance M.
        """
        max_keys = mem_len + 1
        layers = tuple(_shorten_positions(layer, max_keys) for layer in self.layers)
        return self.replace(layers=layers, max_keys=max_keys)


def _shorten_positions(layer: Layer, n_distance: int) -> Layer:
    """Returns a layer with the position keys and scores of the `n_distance` smallest distances."""
    keys = layer.position_keys
    if keys is None:
        return layer

    def shorten(table: Any) -> Any:
        # The distances are the last axis, from the largest to 0. int8 has two arrays.
        return jax.tree.map(lambda array: array[..., -n_distance:], table)

    return layer.replace(
        position_keys=keys.replace(key=shorten(keys.key), score=shorten(keys.score))
    )


def prepare_params(
    params: Any,
    model: TransformerXL,
    *,
    window: int | None = None,
    segment_len: int,
    mem_len: int,
    clamp_len: int | None,
    weight_dtype: WeightDType | None = None,
    transposed: bool = False,
) -> DecodeParams:
    """Prepares parameters for segments of up to `segment_len` tokens. To be jitted.

    Args:
      params: The model's parameters.
      model: The model.
      window: As in `DecodeParams`.
      segment_len: L, the maximum tokens of a segment.
      mem_len: M, the maximum slots of memory.
      clamp_len: As in `DecodeParams`.
      weight_dtype: INT8, for which `check_devices` has to allow the mesh, or None for the compute
        dtype.
      transposed: Whether the layers keep float matrices of at least 32 bits `Transposed`, which is
        faster for a few rows on a CPU and changes nothing but rounding.
    """
    capacity = cache_capacity(mem_len=mem_len, segment_len=segment_len)
    # The parameters of `modules.block.Stack` are "layers", stacked along a first axis, and
    # "biases", which contains u and v if all layers share them.
    stacked = params["stack"]["layers"]
    shared = params["stack"].get("biases")
    layers = []
    for number in range(model.config.n_layer):
        layer = _prepare_layer(
            jax.tree.map(operator.itemgetter(number), stacked),
            shared,
            model,
            segment_len=segment_len,
            capacity=capacity,
            clamp_len=clamp_len,
        )
        layers.append(layer)
    # The softmax's tables, projections and biases, with the embedding's where they are tied.
    clusters = list(apply(model, params, method=model.clusters))

    # The cache starts with keys and values of matrices that are not rounded to int8.
    initial = _initial_key_value(layers, model)
    if weight_dtype is WeightDType.INT8:
        layers = [_quantize_layer(layer) for layer in layers]
        clusters = [_quantize_cluster(cluster) for cluster in clusters]
    elif transposed and jnp.dtype(model.config.dtype).itemsize >= 4:
        layers = [_with_matrices(layer, transpose) for layer in layers]

    # What is in neither the layers nor the clusters: the embedding and the final norm.
    rest = {name: part for name, part in params.items() if name not in ("stack", "softmax")}
    cast = functools.partial(_cast_matrix, dtype=model.config.dtype)
    return DecodeParams(
        embed_and_norm=jax.tree.map(cast, rest),
        layers=tuple(layers),
        clusters=tuple(clusters),
        initial=initial,
        model=model,
        window=window,
        clamp_len=clamp_len,
        max_keys=capacity + segment_len,
    )


def _cast_matrix(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns a matrix in the compute dtype. Vectors (biases, scales of norms) are not cast."""
    if array.ndim > 1:
        return array.astype(dtype)
    return array


def check_devices(weight_dtype: str | None, num_devices: int) -> None:
    """Checks that the parameters can have this dtype on so many devices.

    The scales of a sharded table would need separate specs.

    Raises:
      UserError: If the dtype is int8 and there are multiple devices.
    """
    if weight_dtype is not None and num_devices > 1:
        raise UserError(
            f"eval.weight_dtype {weight_dtype} supports only one device, got a mesh of "
            f"{num_devices}. Pass --mesh.data=1, or omit the dtype."
        )


def apply(module: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    """Applies a module to parameters. Its results are arrays, where flax's types allow more."""
    return module.apply({"params": params}, *args, **options)


def norm_of(model: TransformerXL, scales: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the layer norm with the parameters `scales`."""
    norm = layer_norm("norm", model.config)
    return lambda states: apply(norm, scales, states)


def query_key_value(layer: Layer, states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries, keys and values of states [B, L, D], each [B, H, L, E]."""
    # The kernel is [D, 3, H, E], so the products are [B, L, 3, H, E].
    projected = project(states, layer.query_key_value)
    query = projected[:, :, 0].swapaxes(1, 2)
    key = projected[:, :, 1].swapaxes(1, 2)
    value = projected[:, :, 2].swapaxes(1, 2)
    return query, key, value


def _prepare_layer(
    params: Any,
    shared: Any,
    model: TransformerXL,
    *,
    segment_len: int,
    capacity: int,
    clamp_len: int | None,
) -> Layer:
    """Prepares one layer of the model's parameters.

    `shared` has the encoding's parameters of all layers.
    """
    config = model.config
    dtype = jnp.dtype(config.dtype)
    attention = params["attention"]

    # Queries are divided by sqrt(E) here, so that no score has to be.
    query = attention["query"] * config.d_head**-0.5
    query_key_value = jnp.stack([query, attention["key"], attention["value"]], axis=1)
    terms = encoding_of(config).decode_terms(
        params, shared, segment_len=segment_len, capacity=capacity, clamp_len=clamp_len
    )
    inner = _dense(params["feed_forward"], "inner", dtype)
    outer = _dense(params["feed_forward"], "outer", dtype)
    return Layer(
        query_key_value=query_key_value.astype(dtype),
        output=attention["output"].reshape(-1, config.d_model).astype(dtype),
        content_bias=terms.content_bias,
        position_keys=terms.position_keys,
        position_vectors=terms.position_vectors,
        attention_norm=params["attention_norm"],
        feed_forward_norm=params["feed_forward_norm"],
        feed_forward=(inner, outer),
    )


def _dense(params: Any, name: str, dtype: jnp.dtype) -> Dense:
    return Dense(params[f"{name}_kernel"].astype(dtype), params[f"{name}_bias"].astype(dtype))


def _initial_key_value(layers: Sequence[Layer], model: TransformerXL) -> InitialKeyValue:
    """Computes the key and value of a state of zeros.

    They are zeros themselves, unless a layer norm with a bias comes first.
    """
    is_pre_norm = model.config.layer_norm is NormPlace.PRE
    zeros = jnp.zeros((1, 1, model.config.d_model), jnp.dtype(model.config.dtype))
    keys = []
    values = []
    for layer in layers:
        states = zeros
        if is_pre_norm:
            states = norm_of(model, layer.attention_norm)(zeros)
        _, key, value = query_key_value(layer, states)
        # [1, H, 1, E] -> [H, E]
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
    return InitialKeyValue(tuple(keys), tuple(values))


def _with_matrices(layer: Layer, change: Callable[[jax.Array], Any]) -> Layer:
    """Returns a layer with `change` applied to each of its matrices [n, ..]."""
    inner, outer = layer.feed_forward
    inner = inner._replace(kernel=change(inner.kernel))
    outer = outer._replace(kernel=change(outer.kernel))
    return layer.replace(
        query_key_value=change(layer.query_key_value),
        output=change(layer.output),
        feed_forward=(inner, outer),
    )


def _quantize_layer(layer: Layer) -> Layer:
    """Returns a layer with int8 for its matrices and position keys."""
    keys = layer.position_keys
    if keys is not None and keys.key is not None:
        keys = keys.replace(key=quantize(keys.key, axis=1))
    quantized = _with_matrices(layer, lambda kernel: quantize(kernel, axis=0))
    return quantized.replace(position_keys=keys)


def _quantize_cluster(cluster: Cluster) -> Cluster:
    """Returns a cluster of the softmax with int8 for its table and its projection."""
    quantized = cluster._replace(table=_quantize_table(cluster.table))
    if cluster.projection is None:
        return quantized
    return quantized._replace(projection=_quantize_table(cluster.projection))


def _quantize_table(table: jax.Array) -> Int8Table:
    return Int8Table(quantize(table.T, axis=0))
