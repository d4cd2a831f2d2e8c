"""Parameters prepared for inference: cast, scaled and laid out once instead of in every segment.

    params = prepare_params(variables["params"], model, window=None, segment_len=128, mem_len=3800,
    clamp_len=1000)

With int8 each matrix has a scale per channel: a column of a matrix, the code of a distance, a word
of the softmax. Embeddings (a token reads one row), layer norms and biases stay as they are.
"""

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
    """Prepared parameters of one layer, in the compute type.

    Matrices may be `Int8` or `Transposed`.
    """

    # [D, 3, H, E]; the query's part is divided by sqrt(E).
    query_key_value: Any
    # [H * E, D]
    output: Any
    # u, [H, E], divided by sqrt(E), or None if the encoding has none.
    content_bias: jax.Array | None
    # None if positions are absolute.
    position_keys: PositionKeys | None
    # [L, D], added at the distances L - 1, .., 0 from the end, or None.
    position_vectors: jax.Array | None
    # Of attention and feed-forward part.
    norms: tuple[Any, Any]
    feed_forward: tuple[Dense, Dense]


class DecodeParams(flax.struct.PyTreeNode):
    """Parameters of a `TransformerXL`, prepared for inference at given lengths."""

    # Embedding and final norm, by the names of the model's own parameters.
    embed_and_norm: Any
    layers: tuple[Layer, ...]
    # Of the softmax.
    clusters: tuple[Cluster, ...]
    # Keys and values of an empty cache.
    initial: InitialKeyValue
    model: TransformerXL = flax.struct.field(pytree_node=False)
    # Maximum keys per query, itself included, or None.
    window: int | None = flax.struct.field(pytree_node=False)
    # Argument of `TransformerXL.embed`.
    clamp_len: int | None = flax.struct.field(pytree_node=False)
    # Maximum slots of the cache plus tokens of a segment.
    max_keys: int = flax.struct.field(pytree_node=False)

    def for_generation(self, *, mem_len: int) -> "DecodeParams":
        """Returns the parameters with a window.

        With the window, each query of a segment has as many keys as the next query.
        """
        return self.replace(window=mem_len + 1 if self.window is None else self.window)

    def for_single_tokens(self, *, mem_len: int) -> "DecodeParams":
        """Returns the parameters for segments of one token.

        They have position keys and scores up to the distance M.
        """

        def shorten(layer: Layer) -> Layer:
            if (keys := layer.position_keys) is None:
                return layer
            key, score = jax.tree.map(
                lambda table: table[..., -(mem_len + 1) :], (keys.key, keys.score)
            )
            return layer.replace(position_keys=keys.replace(key=key, score=score))

        return self.replace(layers=tuple(map(shorten, self.layers)), max_keys=mem_len + 1)


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
    """Prepares parameters for segments of up to `segment_len` tokens and `mem_len` slots of memory.

    To be jitted.

    `window` and `clamp_len` are as in `DecodeParams`. For int8 weights `check_devices` has to allow
    the mesh. With `transposed` the layers keep float matrices of at least 32 bits `Transposed`,
    which is faster for a few rows on a CPU and changes nothing but rounding.
    """
    capacity = cache_capacity(mem_len=mem_len, segment_len=segment_len)
    lengths = {"segment_len": segment_len, "capacity": capacity, "clamp_len": clamp_len}
    stacked, shared = params["stack"]["layers"], params["stack"].get("biases")
    each = [jax.tree.map(lambda stack, i=i: stack[i], stacked) for i in range(model.config.n_layer)]
    layers = tuple(_prepare_layer(layer, shared, model, **lengths) for layer in each)
    clusters = tuple(apply(model, params, method=model.clusters))
    initial = _initial_key_value(layers, model)
    if weight_dtype is WeightDType.INT8:
        layers, clusters = (
            tuple(map(_quantize_layer, layers)),
            tuple(map(_quantize_cluster, clusters)),
        )
    elif transposed and jnp.dtype(model.config.dtype).itemsize >= 4:
        layers = tuple(_with_matrices(layer, transpose) for layer in layers)
    return DecodeParams(
        # Matrices in the compute type. Vectors (biases, scales of norms) stay as they are.
        embed_and_norm=jax.tree.map(
            lambda leaf: leaf.astype(model.config.dtype) if leaf.ndim > 1 else leaf,
            {name: part for name, part in params.items() if name not in ("stack", "softmax")},
        ),
        layers=layers,
        clusters=clusters,
        initial=initial,
        model=model,
        window=window,
        clamp_len=clamp_len,
        max_keys=capacity + segment_len,
    )


def check_devices(weight_dtype: str | None, num_devices: int) -> None:
    """Raises `UserError` for int8 on multiple devices.

    The scales of a sharded table would need separate specs.
    """
    if weight_dtype is not None and num_devices > 1:
        wrong = (
            f"eval.weight_dtype {weight_dtype} supports only one device, got a mesh of "
            f"{num_devices}"
        )
        raise UserError(f"{wrong}. Pass --mesh.data=1, or omit the dtype.")


def apply(module: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    """Applies a module to parameters. Its results are arrays, where flax's types allow more."""
    return module.apply({"params": params}, *args, **options)


def norm_of(model: TransformerXL, scales: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the layer norm with the parameters `scales`."""
    norm = layer_norm("norm", model.config)
    return lambda states: apply(norm, scales, states)


def query_key_value(layer: Layer, states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries, keys and values of states [B, L, D], each [B, H, L, E]."""
    projected = project(states, layer.query_key_value)
    query, key, value = (projected[:, :, i].swapaxes(1, 2) for i in range(3))
    return query, key, value


def _prepare_layer(params: Any, shared: Any, model: TransformerXL, **lengths: Any) -> Layer:
    """Prepares one layer of the model's parameters.

    `shared` has the encoding's parameters of all layers.
    """
    c, attention = model.config, params["attention"]
    dtype = jnp.dtype(c.dtype)
    parts = attention["query"] * c.d_head**-0.5, attention["key"], attention["value"]
    terms = encoding_of(c).decode_terms(params, shared, **lengths)
    return Layer(
        query_key_value=jnp.stack(parts, axis=1).astype(dtype),
        output=attention["output"].reshape(-1, c.d_model).astype(dtype),
        **terms._asdict(),
        norms=(params["attention_norm"], params["feed_forward_norm"]),
        feed_forward=(
            _dense(params["feed_forward"], "inner", dtype),
            _dense(params["feed_forward"], "outer", dtype),
        ),
    )


def _dense(params: Any, name: str, dtype: jnp.dtype) -> Dense:
    return Dense(params[f"{name}_kernel"].astype(dtype), params[f"{name}_bias"].astype(dtype))


def _initial_key_value(layers: Sequence[Layer], model: TransformerXL) -> InitialKeyValue:
    """Computes the keys and values of a state of zeros.

    They are zeros themselves, unless a layer norm with a bias comes first.
    """
    zeros, keys, values = (
        jnp.zeros((1, 1, model.config.d_model), jnp.dtype(model.config.dtype)),
        [],
        [],
    )
    for layer in layers:
        pre = model.config.layer_norm is NormPlace.PRE
        _, key, value = query_key_value(
            layer, norm_of(model, layer.norms[0])(zeros) if pre else zeros
        )
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
    return InitialKeyValue(tuple(keys), tuple(values))


def _with_matrices(layer: Layer, change: Callable[[jax.Array], Any]) -> Layer:
    """Returns a layer with `change` applied to each of its matrices [n, ..]."""
    inner, outer = (dense._replace(kernel=change(dense.kernel)) for dense in layer.feed_forward)
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
    projection = None if cluster.projection is None else _quantize_table(cluster.projection)
    return cluster._replace(table=_quantize_table(cluster.table), projection=projection)


def _quantize_table(table: jax.Array) -> Int8Table:
    return Int8Table(quantize(table.T, axis=0))
