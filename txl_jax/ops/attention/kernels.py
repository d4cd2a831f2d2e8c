"""Functions of the tiled and the fused implementations, imported when they are first used: Pallas takes a while."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from txl_jax.ops.attention.problem import Implementation, Tile


def training(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function with the arguments of `attention`, `implementation` aside."""
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled.training import tiled_attention

        return functools.partial(tiled_attention, tile=_tile(implementation))
    options = _options(implementation)
    if implementation.platform == "tpu":
        from txl_jax.ops.attention.tpu.kernels import tpu_attention

        return functools.partial(tpu_attention, **options)
    from txl_jax.ops.attention.gpu.attention import gpu_attention

    return functools.partial(gpu_attention, **options)


def cached(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function with the arguments of `cached_attention`, `implementation` aside."""
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled.cached import tiled_cached_attention

        return functools.partial(tiled_cached_attention, tile=_tile(implementation))
    if implementation.platform == "tpu":
        from txl_jax.ops.attention.tpu.cached import tpu_cached_attention

        return functools.partial(tpu_cached_attention, tile=_tile(implementation), interpret=implementation.interpret)
    from txl_jax.ops.attention.gpu.cached import gpu_cached_attention

    return functools.partial(gpu_cached_attention, **_options(implementation))


def _tile(implementation: Implementation) -> Tile:
    assert implementation.tile is not None, "it has a tile"
    return implementation.tile


def _options(implementation: Implementation) -> dict[str, Any]:
    return {"tile": implementation.tile, "kernel": implementation.kernel, "interpret": implementation.interpret}
