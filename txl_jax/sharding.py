"""The device mesh, and the one table from logical axis names to its axes.

A mesh has three axes: `data` (copies of the model), `fsdp` (devices that share one copy's parameters)
and `model` (devices that share heads, inner width and vocabulary). Batch rows are spread over `data` and
`fsdp`. `jax.jit` with these shardings is what used to be called pjit.
"""

import math
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax import axes
from txl_jax.config import MeshConfig

DATA, FSDP, MODEL = "data", "fsdp", "model"

_MESH_AXES = {
    axes.BATCH: (DATA, FSDP),
    axes.LENGTH: None,
    axes.LAYERS: None,
    axes.EMBED: FSDP,
    axes.CLUSTER_EMBED: None,
    axes.HEADS: MODEL,
    axes.HEAD_DIM: None,
    axes.INNER: MODEL,
    axes.VOCAB: MODEL,
    axes.CLUSTERS: None,
    axes.POSITIONS: None,
    axes.NORM: None,
}


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over this run's devices; with `data` given, those beyond the product stay idle.

    Raises:
      ValueError: the sizes ask for more devices than there are, or leave a remainder where `data` is 0.
    """
    devices = jax.devices()
    shared = config.fsdp * config.model
    data = config.data or len(devices) // shared
    if data * shared > len(devices) or (not config.data and data * shared != len(devices)):
        raise ValueError(
            f"mesh.data x mesh.fsdp x mesh.model is {config.data or 'all'} x {config.fsdp} x {config.model} and there "
            f"are {len(devices)} devices; the product must not exceed that, nor leave a remainder where data is 0"
        )
    return jax.make_mesh(
        (data, config.fsdp, config.model),
        (DATA, FSDP, MODEL),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[: data * shared],
    )


def spec(*names: str | None) -> PartitionSpec:
    """The mesh axes of an array whose axes are called `names`; None stays whole.

    Raises:
      ValueError: a name without a row in the table (flax would silently replicate it).
    """
    for name in names:
        if name is not None and name not in _MESH_AXES:
            raise ValueError(f"logical axis {name!r} has no row in the sharding table; known: {', '.join(_MESH_AXES)}")
    return PartitionSpec(*(None if name is None else _MESH_AXES[name] for name in names))


def named(mesh: Mesh, *names: str | None) -> NamedSharding:
    """The sharding of one array whose axes are called `names`."""
    return NamedSharding(mesh, spec(*names))


def of_boxed(mesh: Mesh, tree: Any) -> Any:
    """Shardings for a tree whose arrays sit in boxes with logical axis names; bare arrays are replicated.

    Vocabularies and their clusters have the size that the text gives them (205 bytes in enwik8), so such
    an axis stays whole where it does not divide among the devices.

    Shaped like `nn.unbox(tree)`.
    """

    def place(names: PartitionSpec, array: Any) -> NamedSharding:
        uneven = [
            name == axes.VOCAB and size % mesh.shape[MODEL] for name, size in zip(names, array.shape, strict=False)
        ]
        return named(mesh, *(None if whole else name for name, whole in zip(names, uneven, strict=False)))

    return jax.tree.map(
        place, nn.get_partition_spec(tree), nn.unbox(tree), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def rows(mesh: Mesh, batch_size: int) -> str | None:
    """The name of a batch axis: `axes.BATCH` if the rows divide among the devices, else None (replicated).

    A published evaluation reads one row, whatever the number of devices.
    """
    return axes.BATCH if batch_size % row_groups(mesh) == 0 else None


def row_groups(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are spread."""
    return math.prod(mesh.shape[name] for name in (DATA, FSDP))
