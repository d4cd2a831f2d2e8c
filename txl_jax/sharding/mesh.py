"""The device mesh, and the one table from logical axis names to its axes.

A mesh has three axes: `data` (data parallel: replicas of the model), `fsdp` (FSDP, fully sharded data parallel:
devices that share the parameters of one replica) and `tensor` (tensor parallel: devices that share heads, inner width
and vocabulary). Batch rows are sharded over `data` and `fsdp`. XLA inserts the collectives: an all-reduce of gradients
over `data`; over `fsdp` an all-gather of each layer's weights and a reduce-scatter of gradients; over `tensor` an
all-reduce of the outputs of attention and of the feed-forward layers.

Slices of TPUs that only a data-centre network (DCN) connects (multislice) are replicas: the outermost part of `data` is
over the slices, so that only the all-reduce of gradients and of a few numbers crosses them.
"""

import math
from collections.abc import Iterable, Sequence
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

    Neighbours along an axis of the mesh are neighbours in the interconnect, where devices have coordinates. Devices of
    one slice of TPUs are contiguous: of `data`, the slice is the outermost part.

    Args:
      config: the sizes of the axes.
      devices: None: those of this run; else others, such as those of a topology that is not attached.

    Raises:
      UserError: If the sizes need more devices than there are, or leave a remainder where `data` is None, or slices
        have different numbers of devices.
    """
    devices = jax.devices() if devices is None else devices
    slices = _slices(devices)
    shape = _shape(config, len(devices), num_slices=len(slices))
    return Mesh(_device_grid(slices, shape), _NAMES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, n_device: int, *, num_slices: int = 1) -> AbstractMesh:
    """Makes a mesh without devices, for shapes and shardings only.

    Args:
      config: the sizes of the axes.
      n_device: devices in all slices.
      num_slices: slices of TPUs that the devices are in.

    Raises:
      UserError: as `make_mesh`.
    """
    shape = _shape(config, n_device, num_slices=num_slices)
    return AbstractMesh(shape, _NAMES, axis_types=(AxisType.Auto,) * 3)


def num_slices(mesh: Mesh) -> int:
    """Returns how many slices of TPUs a mesh is over; 1 for other devices."""
    return len(_slices(mesh.devices.flat))


def _device_grid(slices: Sequence[Sequence[jax.Device]], shape: tuple[int, int, int]) -> np.ndarray:
    """Lays devices over a mesh of this shape, each slice in the order of its interconnect.

    Args:
      slices: devices by slice, as many in each.
      shape: data x fsdp x tensor over all slices, of which the number of slices divides `data`.

    Returns:
      Devices [data, fsdp, tensor].
    """
    data, fsdp, tensor = shape
    in_slice = data // len(slices), fsdp, tensor
    chosen = [device for one in slices for device in one[: math.prod(in_slice)]]
    try:  # As `jax.make_mesh`, which does not split physical axes.
        if len(slices) == 1:
            return mesh_utils.create_device_mesh(shape, chosen, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(
            in_slice, (len(slices), 1, 1), chosen, allow_split_physical_axes=True
        )
    except AssertionError:  # Such a number of chips is no box of the torus; any order within a slice works.
        return np.asarray(chosen).reshape(shape)


def _slices(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    """Groups devices by slice of TPUs, in the order of the slices' indices; other devices are one group.

    (jax gives GPUs a slice_index too, that of their host. Over those FSDP is usual, and remains a choice.)
    """
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        found.setdefault(index or 0, []).append(device)
    return [found[index] for index in sorted(found)]


def _shape(config: MeshConfig, n_device: int, *, num_slices: int) -> tuple[int, int, int]:
    """Returns data x fsdp x tensor over all slices."""
    in_slice, rest = divmod(n_device, num_slices)
    if rest:
        raise UserError(
            f"there are {n_device} devices in {num_slices} slices of TPUs; each slice must have as many as the others"
        )
    shared = config.fsdp * config.tensor
    data = config.data or in_slice // shared
    if data * shared > in_slice or (not config.data and data * shared != in_slice):
        where = f" in each of {num_slices} slices" if num_slices > 1 else ""
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {config.data or 'all'} x {config.fsdp} x {config.tensor} and "
            f"there are {in_slice} devices{where}; the product must not exceed that, nor leave a remainder where data "
            "is none"
        )
    return num_slices * data, config.fsdp, config.tensor


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
