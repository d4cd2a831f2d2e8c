"""Devices that are not at hand, by name: slices of Cloud TPUs (`v5e:4x8`) and GPUs of NVIDIA (`h200x8`)."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.bench import gpu_topologies, tpu_topologies
from txl_jax.bench.roofline import CHIPS, Chip
from txl_jax.errors import UserError


def chip(topology: str) -> Chip:
    """Returns the rates of one device of a topology.

    Raises:
      UserError: an unknown topology.
    """
    return CHIPS[_kind(topology).split(topology)[0]]


def slices(topology: str) -> list[str]:
    """Returns the topologies of a name: one, or for a generation without a shape all, from small to large."""
    return _kind(topology).slices(topology)


def num_devices(topology: str) -> int:
    """Returns how many devices jax counts in a topology."""
    return _kind(topology).num_devices(topology)


def count_slices(topology: str) -> int:
    """Returns how many slices of TPUs a topology has; 1 for GPUs."""
    return 1 if gpu_topologies.is_gpu(topology) else tpu_topologies.count_slices(topology)


def devices(topology: str) -> Sequence[jax.Device] | None:
    """Returns the devices of a topology, to compile for; None: its compiler is not installed.

    Raises:
      UserError: an unknown topology, or one that its compiler does not have.
    """
    return _kind(topology).devices(topology)


def smallest(topology: str) -> str:
    """Returns the smallest topology of a name: `v5e` is `v5e:1x1`, and `h200` one GPU."""
    return slices(topology)[0]


def missing_compiler(topology: str) -> str | None:
    """Names what is not installed and how to install it; None: the compiler of this topology is there."""
    if gpu_topologies.is_gpu(topology):
        if gpu_topologies.plugin_version() is None:
            return f"jax's CUDA plugin is not installed ({gpu_topologies.INSTALL})"
    elif tpu_topologies.libtpu_version() is None:
        return "libtpu, the TPU's compiler, is not installed (pip install 'jax[tpu]')"
    return None


def compiler_versions(topology: str) -> dict[str, str]:
    """Returns name and version of the compiler of a topology."""
    if gpu_topologies.is_gpu(topology):
        return {"CUDA plugin": gpu_topologies.plugin_version() or "not installed"}
    return {"libtpu": tpu_topologies.libtpu_version() or "not installed"}


def lower_for(device: jax.Device, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Lowers a function for one device that need not be at hand; `.compile()` of the result compiles it.

    Pallas asks the ambient mesh what device it lowers for, and from jax 0.11 on fails without one ("No supported GPU
    devices found").

    Args:
      device: of `devices`.
      function: what is jitted.
      arguments: trees of arrays or of their shapes and types.
      options: of `jax.jit`.
    """
    mesh = Mesh([device], ("device",))
    placed = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **options).lower(*shapes)


def _kind(topology: str) -> Any:
    """Returns the module of a topology.

    Raises:
      UserError: none does.
    """
    if gpu_topologies.is_gpu(topology):
        return gpu_topologies
    if re.sub(r"^[1-9]\d*\*", "", topology).partition(":")[0] in tpu_topologies.SLICES:
        return tpu_topologies
    raise UserError(
        f"the topology is {topology!r}; give a slice of TPUs ({', '.join(tpu_topologies.SLICES)}, and the chips along "
        "each axis: v5e:4x8 or v4:2x2x4; two of them: 2*v5e:4x8) "
        f"or GPUs ({', '.join(gpu_topologies.GPUS)}, and how many: h200 or h200x8)"
    )
