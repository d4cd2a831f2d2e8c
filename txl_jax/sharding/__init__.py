"""The device mesh: logical axis names, the one table that maps them to mesh axes, sharding constraints."""

from txl_jax.sharding.mesh import (
    DATA,
    FSDP,
    TENSOR,
    abstract_mesh,
    batch_axes,
    make_mesh,
    named_sharding,
    num_batch_shards,
    param_shardings,
    spec,
    spread,
)

__all__ = [
    "DATA",
    "FSDP",
    "TENSOR",
    "abstract_mesh",
    "make_mesh",
    "named_sharding",
    "param_shardings",
    "num_batch_shards",
    "batch_axes",
    "spec",
    "spread",
]
