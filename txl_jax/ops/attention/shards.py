"""The part of attention that one device of the ambient mesh computes: rows over data x fsdp, heads over tensor."""

import math
from typing import NamedTuple

from jax.sharding import AxisType, PartitionSpec

from txl_jax.sharding import DATA, FSDP, TENSOR, ambient_mesh, axes, spec
from txl_jax.sharding.activations import batch_spec


class Shards(NamedTuple):
    """A division of rows and heads among devices.

    Attributes:
      rows: mesh axes that share the rows; none: each device has all.
      heads: the mesh axis that shares the heads; None: each device has all.
      batch: rows of one device.
      n_head: heads of one device.
    """

    rows: tuple[str, ...]
    heads: str | None
    batch: int
    n_head: int

    def by_row(self) -> PartitionSpec:
        """Returns the sharding of an array [B, ...]."""
        return PartitionSpec(self.rows or None)

    def by_head(self) -> PartitionSpec:
        """Returns the sharding of an array [H, ...]."""
        return PartitionSpec(self.heads)

    def by_both(self) -> PartitionSpec:
        """Returns the sharding of an array [B, H, ...]."""
        return PartitionSpec(self.rows or None, self.heads)


def shards_of(batch: int, n_head: int) -> Shards | None:
    """Returns how B rows and H heads are divided; None: not here.

    Not here: there is one device, the ambient mesh is the caller's with axes of other names, or the call is inside the
    caller's own `shard_map`, where arrays already are those of one device.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types.get(name, AxisType.Manual) == AxisType.Manual for name in (DATA, FSDP, TENSOR)):
        return None
    rows, [heads] = batch_spec(batch), spec(axes.HEADS)
    if n_head % mesh.shape[heads]:
        heads = None
    num_heads = 1 if heads is None else mesh.shape[heads]
    return Shards(rows, heads, batch // math.prod(mesh.shape[name] for name in rows), n_head // num_heads)
