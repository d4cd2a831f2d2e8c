"""The device mesh, and the one table from logical axis names to its axes.

A mesh has three axes: `data` (data parallel: replicas of the model), `fsdp` (FSDP, fully sharded data parallel:
devices that share the parameters of one replica) and `tensor` (tensor parallel: devices that share heads, inner width
and vocabulary). Batch rows are sharded over `data` and `fsdp`. XLA inserts the collectives: an all-reduce of gradients
over `data`; over `fsdp` an all-gather of each layer's weights and a reduce-scatter of gradients; over `tensor` an
all-reduce of the outputs of attention and of the feed-forward layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from txl_jax.config import MeshConfig
from txl_jax.errors import UserError
from txl_jax.sharding import axes
from txl_jax.sharding.ambient import ambient_mesh

DATA, FSDP, TENSOR = _NAMES = "data", "fsdp", "tensor"

_MESH_AXES = {
    axes.BATCH: (DATA, FSDP),
    axes.LENGTH: None,
    axes.LAYERS: None,
    axes.EMBED: FSDP,
    axes.CLUSTER_EMBED: None,
    axes.HEADS: TENSOR,
    axes.HEAD_DIM: None,
    axes.INNER: TENSOR,
    axes.VOCAB: TENSOR,
    axes.CLUSTERS: None,
    axes.POSITIONS: None,
    axes.NORM: None,
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over this run's devices; with `data` given, devices beyond the product stay idle.

    Neighbours along an axis of the mesh are neighbours in the interconnect, where devices have coordinates.

    Args:
      config: the sizes of the axes.
      devices: None: those of this run; else others, such as those of a topology that is not attached.

    Raises:
      UserError: the sizes need more devices than there are, or leave a remainder where `data` is None.
    """
    devices = jax.devices() if devices is None else devices
    shape = _shape(config, len(devices))
    try:  # As `jax.make_mesh`, which does not split physical axes.
        grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)], allow_split_physical_axes=True)
    except AssertionError:  # Such a number of chips is no box of the torus; any order works.
        grid = np.asarray(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, _NAMES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, n_device: int) -> AbstractMesh:
    """Makes a mesh without devices, for shapes and shardings only.

    Raises:
      UserError: as `make_mesh`.
    """
    return AbstractMesh(_shape(config, n_device), _NAMES, axis_types=(AxisType.Auto,) * 3)


def _shape(config: MeshConfig, n_device: int) -> tuple[int, int, int]:
    shared = config.fsdp * config.tensor
    data = config.data or n_device // shared
    if data * shared > n_device or (not config.data and data * shared != n_device):
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {config.data or 'all'} x {config.fsdp} x {config.tensor} and "
            f"there are {n_device} devices; the product must not exceed that, nor leave a remainder where data is none"
        )
    return data, config.fsdp, config.tensor


def spec(*names: str | None) -> PartitionSpec:
    """Returns the mesh axes of an array with these logical axes; None: replicated.

    Raises:
      ValueError: a name without a row in the table (flax would silently replicate it).
    """
    for name in names:
        if name is not None and name not in _MESH_AXES:
            raise ValueError(f"logical axis {name!r} has no row in the sharding table; known: {', '.join(_MESH_AXES)}")
    return PartitionSpec(*(None if name is None else _MESH_AXES[name] for name in names))


def named_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*names))


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """Returns the shardings of a tree of parameters boxed with logical axis names; bare arrays are replicated.

    The sizes of vocabularies and clusters come from the text (205 bytes in enwik8). A table whose tokens do not divide
    over `tensor` is replicated there, and over `fsdp` its tokens are sharded if its width does not divide. (Sharding
    the width over `tensor` would need an all-gather for every use, which reads parts of the tokens.)

    The result is shaped like `nn.unbox(tree)`.
    """

    def place(names: PartitionSpec, array: Any) -> NamedSharding:
        if tuple(names) == (axes.VOCAB,):  # A bias, which is sliced at the cutoffs: replicated.
            return named_sharding(mesh)
        if axes.VOCAB not in names:
            return named_sharding(mesh, *names)
        return NamedSharding(mesh, _of_table(mesh, dict(zip(names, array.shape, strict=True))))

    return jax.tree.map(
        place, nn.get_partition_spec(tree), nn.unbox(tree), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def _of_table(mesh: Mesh, sizes: dict[str, int]) -> PartitionSpec:
    """Returns the mesh axes of an embedding table, from its sizes by logical axis."""
    found: dict[str, list[str]] = {name: [] for name in sizes}

    def divides(name: str, axis: str) -> bool:
        return sizes[name] % math.prod(mesh.shape[other] for other in (axis, *found[name])) == 0

    if divides(axes.VOCAB, TENSOR):
        found[axes.VOCAB].append(TENSOR)
    for name in (axes.CLUSTER_EMBED, axes.VOCAB):
        if divides(name, FSDP):
            found[name].append(FSDP)
            break
    return PartitionSpec(*(tuple(axes_of) or None for axes_of in found.values()))


def batch_axes(mesh: Mesh | AbstractMesh, batch_size: int) -> str | None:
    """Returns `axes.BATCH` if the rows of a batch divide among the devices, else None (replicated).

    Published evaluations read one row, whatever the number of devices.
    """
    return axes.BATCH if batch_size % num_batch_shards(mesh) == 0 else None


def num_batch_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """Returns how many devices share the rows of a batch; of the ambient mesh if `mesh` is None."""
    return _num_shards(axes.BATCH, mesh)


def num_vocab_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """Returns how many devices share the tokens of a cluster; of the ambient mesh if `mesh` is None."""
    return _num_shards(axes.VOCAB, mesh)


def vocab_axis(mesh: Mesh | AbstractMesh | None = None) -> str | None:
    """Returns the mesh axis that shares the tokens of a cluster; None if it has one device."""
    return spec(axes.VOCAB)[0] if num_vocab_shards(mesh) > 1 else None


def _num_shards(name: str, mesh: Mesh | AbstractMesh | None) -> int:
    """Devices that share an array's axis of this logical name."""
    mesh = ambient_mesh() if mesh is None else mesh
    [mesh_axes] = spec(name)
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in names)
