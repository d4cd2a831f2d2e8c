"""The device mesh: logical axis names, the one table that maps them to mesh axes, sharding constraints."""

from txl_jax.sharding.ambient import ambient_mesh, bind_mesh, check_ambient_mesh, use_mesh
from txl_jax.sharding.mesh import (
    DATA,
    FSDP,
    TENSOR,
    abstract_mesh,
    batch_axes,
    make_mesh,
    named_sharding,
    num_batch_shards,
    num_slices,
    num_vocab_shards,
    param_shardings,
    spec,
    vocab_axis,
)

__all__ = [
    "DATA",
    "FSDP",
    "TENSOR",
    "abstract_mesh",
    "ambient_mesh",
    "batch_axes",
    "bind_mesh",
    "check_ambient_mesh",
    "make_mesh",
    "named_sharding",
    "num_batch_shards",
    "num_slices",
    "num_vocab_shards",
    "param_shardings",
    "spec",
    "use_mesh",
    "vocab_axis",
]
