"""Creates the device mesh, and lets code enter and find it.

A mesh has three axes: `data` (data parallel: replicas of the model), `fsdp` (FSDP, fully sharded
data parallel: devices that share the parameters of one replica) and `tensor` (tensor parallel:
devices that share heads, inner width and vocabulary). Batch rows are sharded over `data` and
`fsdp`. XLA inserts the collectives: an all-reduce of gradients over `data`; over `fsdp` an
all-gather of each layer's weights and a reduce-scatter of gradients; over `tensor` an all-reduce of
the outputs of attention and of the feed-forward layers.

Slices of TPUs that only a data-centre network (DCN) connects (multislice) are replicas: the
outermost part of `data` is over the slices, so that only the all-reduce of gradients and of a few
numbers crosses them.

Code finds the ambient mesh while it is traced (`jax.set_mesh`). A new thread has none. `bind_mesh`
makes a compiled function enter its mesh itself, whoever calls it. Everywhere else use
`with use_mesh(mesh):`.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from txl_jax.config import MeshConfig
from txl_jax.errors import UserError

DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
_NAMES = (DATA, FSDP, TENSOR)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over this run's devices, or over other devices if `devices` is passed.

    With `config.data` set, devices beyond the product stay idle. Neighbours along an axis of the
    mesh are neighbours in the interconnect, where devices have coordinates.

    Args:
      config: Sizes of the mesh's axes.
      devices: The devices, for example of a topology that is not attached, or None for this run's.

    Raises:
      UserError: If the sizes need more devices than there are, or leave a remainder where
        `config.data` is None, or slices have different numbers of devices.
    """
    if devices is None:
        devices = jax.devices()
    slices = _slices(devices)
    n_device = sum(map(len, slices))
    shape = _shape(config, n_device, num_slices=len(slices))
    return Mesh(_device_grid(slices, shape), _NAMES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, n_device: int, *, num_slices: int = 1) -> AbstractMesh:
    """Makes a mesh of `n_device` devices in all slices, without the devices.

    Raises:
      UserError: If the devices do not fit the sizes, as in `make_mesh`.
    """
    shape = _shape(config, n_device, num_slices=num_slices)
    return AbstractMesh(shape, _NAMES, axis_types=(AxisType.Auto,) * 3)


def num_slices(mesh: Mesh) -> int:
    """Returns how many slices of TPUs a mesh is over, or 1 for other devices."""
    return len(_slices(mesh.devices.flat))


def _slices(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    """Groups devices by slice of TPUs, in the order of the slices' indices.

    Other devices are one group.
    """
    by_index: dict[int, list[jax.Device]] = {}
    for device in devices:
        index = 0
        # GPUs have a slice_index too, their host's, over which FSDP remains a choice.
        if device.platform == "tpu":
            index = getattr(device, "slice_index", 0) or 0
        by_index.setdefault(index, []).append(device)
    return [by_index[index] for index in sorted(by_index)]


def _shape(config: MeshConfig, n_device: int, *, num_slices: int) -> tuple[int, int, int]:
    """Returns data x fsdp x tensor over all slices."""
    slice_size, remainder = divmod(n_device, num_slices)
    if remainder:
        raise UserError(
            f"the {num_slices} TPU slices must have the same number of devices, got {n_device} "
            "devices in total."
        )

    # A replica's parameters are on fsdp x tensor devices, all in one slice.
    replica_size = config.fsdp * config.tensor
    # Replicas in one slice. 0 if a replica needs more devices, which is an error below.
    data = config.data or slice_size // replica_size
    is_too_large = data * replica_size > slice_size
    has_remainder = not config.data and data * replica_size != slice_size
    if is_too_large or has_remainder:
        place = f" in each of {num_slices} slices" if num_slices > 1 else ""
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor must be at most {slice_size} (the number of "
            f"devices{place}), and fsdp x tensor must divide it if data is none, got "
            f"{config.data or 'all'} x {config.fsdp} x {config.tensor}. Lower one of them."
        )
    return num_slices * data, config.fsdp, config.tensor


def _device_grid(slices: Sequence[Sequence[jax.Device]], shape: tuple[int, int, int]) -> np.ndarray:
    """Returns devices [data, fsdp, tensor], each slice in its interconnect's order.

    `data` is a multiple of slices.
    """
    data, fsdp, tensor = shape
    slice_shape = (data // len(slices), fsdp, tensor)

    # Devices beyond the product stay idle.
    devices: list[jax.Device] = []
    for slice_devices in slices:
        devices += slice_devices[: math.prod(slice_shape)]

    try:
        # Like `jax.make_mesh`, which however splits physical axes only on TPU v5e.
        if len(slices) == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(
            mesh_shape=slice_shape,
            dcn_mesh_shape=(len(slices), 1, 1),
            devices=devices,
            allow_split_physical_axes=True,
        )
    except AssertionError:
        # The chips do not fill a box of the torus. Then any order within a slice works.
        return np.asarray(devices).reshape(shape)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Enters a mesh of several devices, or does nothing with one device or None.

    Not to be used while tracing.
    """
    context: contextlib.AbstractContextManager[Any]
    if mesh is None or mesh.size <= 1:
        context = contextlib.nullcontext()
    elif isinstance(mesh, AbstractMesh):
        context = jax.sharding.use_abstract_mesh(mesh)
    else:
        context = jax.set_mesh(mesh)
    with context:
        yield


def ambient_mesh() -> AbstractMesh | None:
    """Returns the ambient mesh if it has multiple devices, otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty or mesh.size <= 1:
        return None
    return mesh


def bind_mesh(mesh: Mesh | AbstractMesh | None, jitted: Any) -> Any:
    """Returns a jitted function that enters `mesh` whenever it is called or lowered.

    If `mesh` is None or has one device, `jitted` itself is returned.
    """
    if mesh is None or mesh.size == 1:
        return jitted
    entering = use_mesh(mesh)  # As a decorator it enters the mesh again in each call.
    bound: Any = entering(jitted)
    bound.lower = entering(jitted.lower)
    bound.eval_shape = entering(jitted.eval_shape)
    return bound
