"""The device mesh: how it is made, and how code enters and finds it.

A mesh has three axes: `data` (data parallel: replicas of the model), `fsdp` (FSDP, fully sharded
data parallel:
devices that share the parameters of one replica) and `tensor` (tensor parallel: devices that share
heads, inner width and vocabulary). Batch rows are sharded over `data` and `fsdp`. XLA inserts the
collectives: an all-reduce of gradients over `data`; over `fsdp` an all-gather of each layer's
weights and a reduce-scatter of gradients; over `tensor` an all-reduce of the outputs of attention
and of the feed-forward layers.

Slices of TPUs that only a data-centre network (DCN) connects (multislice) are replicas: the
outermost part of `data` is over the slices, so that only the all-reduce of gradients and of a few
numbers crosses them.

Code finds the ambient mesh while it is traced (`jax.set_mesh`). A new thread has none. `bind_mesh`
makes a compiled function enter its mesh itself, whoever calls it; everywhere else `with
use_mesh(mesh):` does.
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

DATA, FSDP, TENSOR = _NAMES = "data", "fsdp", "tensor"


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over this run's devices, or over other devices if `devices` is passed.

    The other devices can be a topology that is not attached, for example.

    With `data` given, devices beyond the product stay idle. Neighbours along an axis of the mesh
    are neighbours in the interconnect, where devices have coordinates. Raises `UserError` if the
    sizes need more devices than there are, or leave a remainder where `data` is None, or slices
    have different numbers of devices.
    """
    slices = _slices(jax.devices() if devices is None else devices)
    shape = _shape(config, sum(map(len, slices)), num_slices=len(slices))
    return Mesh(_device_grid(slices, shape), _NAMES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, n_device: int, *, num_slices: int = 1) -> AbstractMesh:
    """Makes a mesh of `n_device` devices in all slices, without the devices.

    Raises `UserError` like `make_mesh`.
    """
    shape = _shape(config, n_device, num_slices=num_slices)
    return AbstractMesh(shape, _NAMES, axis_types=(AxisType.Auto,) * 3)


def num_slices(mesh: Mesh) -> int:
    """Returns how many slices of TPUs a mesh is over; 1 for other devices."""
    return len(_slices(mesh.devices.flat))


def _device_grid(slices: Sequence[Sequence[jax.Device]], shape: tuple[int, int, int]) -> np.ndarray:
    """Returns devices [data, fsdp, tensor], each slice in its interconnect's order.

    `data` is a multiple of slices.
    """
    data, fsdp, tensor = shape
    in_slice = data // len(slices), fsdp, tensor
    chosen = [device for one in slices for device in one[: math.prod(in_slice)]]
    try:  # As `jax.make_mesh`, which does not split physical axes.
        if len(slices) == 1:
            return mesh_utils.create_device_mesh(shape, chosen, allow_split_physical_axes=True)
        over_slices = len(slices), 1, 1
        return mesh_utils.create_hybrid_device_mesh(
            in_slice, over_slices, chosen, allow_split_physical_axes=True
        )
    except AssertionError:
        # Such a number of chips does not fill a box of the torus; any order within a slice works.
        return np.asarray(chosen).reshape(shape)


def _slices(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    """Groups devices by slice of TPUs, in the order of the slices' indices.

    Other devices are one group.
    """
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        # GPUs have a slice_index too, their host's, over which FSDP remains a choice.
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        found.setdefault(index or 0, []).append(device)
    return [found[index] for index in sorted(found)]


def _shape(config: MeshConfig, n_device: int, *, num_slices: int) -> tuple[int, int, int]:
    """Returns data x fsdp x tensor over all slices."""
    in_slice, rest = divmod(n_device, num_slices)
    if rest:
        found = f"there are {n_device} devices in {num_slices} slices of TPUs"
        raise UserError(f"{found}. Each slice must have the same number.")
    shared = config.fsdp * config.tensor
    data = config.data or in_slice // shared
    if data * shared > in_slice or (not config.data and data * shared != in_slice):
        where = f" in each of {num_slices} slices" if num_slices > 1 else ""
        raise UserError(
            f"mesh.data x mesh.fsdp x mesh.tensor is {config.data or 'all'} x {config.fsdp} x "
            f"{config.tensor} and there are {in_slice} devices{where}; "
            "the product must not exceed that, nor leave a remainder where data is none"
        )
    return num_slices * data, config.fsdp, config.tensor


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Enters a mesh of several devices; does nothing with one device or None.

    Not to be used while tracing.
    """
    entered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if mesh is not None and mesh.size > 1:
        entered = (
            jax.sharding.use_abstract_mesh(mesh)
            if isinstance(mesh, AbstractMesh)
            else jax.set_mesh(mesh)
        )
    with entered:
        yield


def ambient_mesh() -> AbstractMesh | None:
    """Returns the ambient mesh if it has several devices, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh is not None and not mesh.empty and mesh.size > 1 else None


def bind_mesh(mesh: Mesh | AbstractMesh | None, jitted: Any) -> Any:
    """Returns a jitted function that enters `mesh` whenever it is called or lowered.

    If `mesh` is None or has one device, `jitted` itself is returned.
    """
    if mesh is None or mesh.size == 1:
        return jitted
    entering = use_mesh(mesh)  # As a decorator it enters the mesh again in each call.
    bound: Any = entering(jitted)
    bound.lower, bound.eval_shape = entering(jitted.lower), entering(jitted.eval_shape)
    return bound
