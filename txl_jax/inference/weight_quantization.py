"""Weight quantization: int8 in place of the matrices of prepared parameters (`inference.forward.DecodeParams`).

Each has a scale per channel: a column of a matrix, the code of a distance, a word of the softmax. Embeddings (a token
reads one row), layer norms and biases stay as they are.
"""

from typing import Any, TypeVar

import jax

from txl_jax.errors import UserError
from txl_jax.modules.feed_forward import Dense
from txl_jax.ops.adaptive_softmax import Cluster
from txl_jax.ops.matmul import Int8Table, quantize

LayerT = TypeVar("LayerT", bound=Any)  # `inference.forward.Layer`, which imports this.


def check_devices(weight_dtype: str | None, num_devices: int) -> None:
    """Raises `UserError` for int8 on several devices: the scales of a sharded table would need specs of their own."""
    if weight_dtype is not None and num_devices > 1:
        raise UserError(
            f"eval.weight_dtype is {weight_dtype} and the mesh has {num_devices} devices; use one (--mesh.data=1), or "
            "leave the type out"
        )


def quantize_layer(layer: LayerT) -> LayerT:
    """Returns a layer with int8 for its matrices and position keys."""
    keys = layer.position_keys
    if keys is not None and keys.key is not None:
        keys = keys.replace(key=quantize(keys.key, axis=1))
    inner, outer = layer.feed_forward
    quantized: LayerT = layer.replace(
        query_key_value=quantize(layer.query_key_value, axis=0),
        output=quantize(layer.output, axis=0),
        position_keys=keys,
        feed_forward=(_quantize_dense(inner), _quantize_dense(outer)),
    )
    return quantized


def quantize_cluster(cluster: Cluster) -> Cluster:
    """Returns a cluster of the softmax with int8 for its table and its projection."""
    projection = None if cluster.projection is None else _quantize_table(cluster.projection)
    return cluster._replace(table=_quantize_table(cluster.table), projection=projection)


def _quantize_dense(dense: Dense) -> Dense:
    return dense._replace(kernel=quantize(dense.kernel, axis=0))


def _quantize_table(table: jax.Array) -> Int8Table:
    return Int8Table(quantize(table.T, axis=0))
