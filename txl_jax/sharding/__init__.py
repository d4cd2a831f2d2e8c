"""The device mesh, the one table from logical axis names to its axes, and sharding constraints."""

from txl_jax.sharding.axes import (
    batch_axes,
    named_sharding,
    num_batch_shards,
    num_vocab_shards,
    param_shardings,
    spec,
    vocab_axis,
)
from txl_jax.sharding.mesh import (
    DATA,
    FSDP,
    TENSOR,
    abstract_mesh,
    ambient_mesh,
    bind_mesh,
    make_mesh,
    num_slices,
    use_mesh,
)

__all__ = [
    "DATA",
    "FSDP",
    "TENSOR",
    "abstract_mesh",
    "ambient_mesh",
    "batch_axes",
    "bind_mesh",
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
