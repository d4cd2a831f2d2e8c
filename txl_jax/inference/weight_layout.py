"""Layout of prepared parameters in memory, which changes their speed and, up to rounding, nothing else."""

from typing import Any

import jax.numpy as jnp

from txl_jax.inference.forward import DecodeParams, Layer
from txl_jax.modules.feed_forward import Dense
from txl_jax.ops.matmul import transpose


def transpose_layers(params: DecodeParams) -> DecodeParams:
    """Returns parameters whose layers keep their matrices `Transposed`, for a few rows on a CPU.

    Those of int8 and of bfloat16 stay as they are.
    """
    return params.replace(layers=tuple(map(_transpose_layer, params.layers)))


def _transpose_layer(layer: Layer) -> Layer:
    inner, outer = layer.feed_forward
    return layer.replace(
        query_key_value=_transpose(layer.query_key_value),
        output=_transpose(layer.output),
        feed_forward=(_transpose_dense(inner), _transpose_dense(outer)),
    )


def _transpose_dense(dense: Dense) -> Dense:
    return dense._replace(kernel=_transpose(dense.kernel))


def _transpose(kernel: Any) -> Any:
    return transpose(kernel) if kernel.dtype in (jnp.float32, jnp.float64) else kernel
