"""Functions of the faster implementations, imported when they are first used: Pallas takes a while."""

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
    if implementation.path == "stored":
        from txl_jax.ops.attention.stored import stored_attention

        return stored_attention
    from txl_jax.ops.attention.tpu.kernels import tpu_attention

    options: Any = {"kernel": implementation.kernel, "interpret": implementation.interpret}
    return functools.partial(tpu_attention, tile=_tile(implementation), **options)


def cached(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function with the arguments of `cached_attention`, `implementation` aside."""
    if implementation.path == "tiled":
        from txl_jax.ops.attention.tiled.cached import tiled_cached_attention

        return functools.partial(tiled_cached_attention, tile=_tile(implementation))
    from txl_jax.ops.attention.tpu.cached import tpu_cached_attention

    return functools.partial(tpu_cached_attention, tile=_tile(implementation), interpret=implementation.interpret)


def _tile(implementation: Implementation) -> Tile:
    assert implementation.tile is not None, "it has a tile"
    return implementation.tile
