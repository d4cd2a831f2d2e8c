"""Parses names of TPU slices and GPUs (v5e:4x8, 2*v5e:4x8, h200x8), to compile for them."""

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.bench.chips import CHIPS, GPUS_PER_HOST, HOST_SIZES
from txl_jax.errors import UserError, first_line

INSTALL = {
    "libtpu": "pip install 'jax[tpu]'",
    "CUDA plugin": "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt",
}
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # libtpu searches for its chips, and for other processes that use them, unless these are set.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # The CUDA plugin searches for its GPUs, and complains that there is no driver.
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_SLICES = re.compile(r"(?:([1-9]\d*)\*)?(v\w+):(\d+(?:x\d+){1,2})")
_GPUS = re.compile(r"((?:a|h|rtx)\d+)(?:x(\d+))?")
# A GPU in XLA's format: `GpuTargetConfigProto` as text, with the fields of a chip.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 device_memory_size: %d %s
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA %s"
"""


class Topology(NamedTuple):
    """A parsed topology name.

    Examples are `v5e:4x8` (chips along each axis), `2*v5e:4x8` (two slices) and `h200x8` (GPUs).
    """

    # Key of `CHIPS`.
    generation: str
    # Chips along each axis of a slice, or the number of GPUs.
    shape: str
    # Slices of TPUs. It is 1 for GPUs.
    num_slices: int
    # Devices as jax counts them, over all slices.
    num_devices: int


def set_environment() -> None:
    """Keeps this process from searching for accelerators. Call it before jax uses any device."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def parse(name: str) -> Topology:
    """Parses the name of a topology.

    Raises:
      UserError: If such a topology cannot exist.
    """
    topology = _parse_gpus(name) or _parse_slices(name)
    if topology is not None:
        return topology

    slices = _SLICES.fullmatch(name)
    known = f"{', '.join(CHIPS)} with a size"
    if slices and slices[2] in CHIPS:
        known = f"{slices[2]} with {', '.join(CHIPS[slices[2]].sizes)}, or larger slices"
    raise UserError(
        "a topology must be a TPU slice, such as v5e:4x8, multiple slices, such as 2*v5e:4x8, or "
        f"1, 2, 4 or a multiple of {GPUS_PER_HOST} GPUs, such as h200x8, got {name!r}. Valid: "
        f"{known}."
    )


def _parse_gpus(name: str) -> Topology | None:
    gpus = _GPUS.fullmatch(name)
    if not gpus or gpus[1] not in CHIPS:
        return None
    count = gpus[2] or "1"
    is_whole_hosts = int(count) > 0 and int(count) % GPUS_PER_HOST == 0
    if count not in HOST_SIZES and not is_whole_hosts:
        return None
    return Topology(gpus[1], count, num_slices=1, num_devices=int(count))


def _parse_slices(name: str) -> Topology | None:
    slices = _SLICES.fullmatch(name)
    if not slices or slices[2] not in CHIPS:
        return None
    generation = slices[2]
    shape = slices[3]
    num_slices = int(slices[1] or 1)
    chips = [int(length) for length in shape.split("x")]
    sizes = CHIPS[generation].sizes

    # A host has 2 x 2 chips.
    has_all_axes = len(chips) == sizes[0].count("x") + 1
    is_whole_hosts = has_all_axes and all(n and n % 2 == 0 for n in chips[:2])
    if shape not in sizes and not is_whole_hosts:
        return None
    devices_per_chip = 2 if generation == "v3" else 1
    num_devices = num_slices * math.prod(chips) * devices_per_chip
    return Topology(generation, shape, num_slices, num_devices)


def slices(name: str) -> list[str]:
    """Returns the topologies of a name: one, or all sizes of a generation, from small to large.

    Raises:
      UserError: As `parse`.
    """
    if name not in CHIPS:
        parse(name)
        return [name]
    separator = "x" if CHIPS[name].gpu else ":"
    return [f"{name}{separator}{size}" for size in CHIPS[name].sizes]


def compiler_of(topology: str) -> tuple[str, str | None]:
    """Returns the name and the version of a topology's compiler.

    The version is None if the compiler is not installed.
    """
    name = "libtpu"
    packages = ["libtpu"]
    if CHIPS[parse(slices(topology)[0]).generation].gpu:
        name = "CUDA plugin"
        packages = ["jax_cuda13_plugin", "jax_cuda12_plugin"]
    for package in packages:
        if importlib.util.find_spec(package):
            return name, importlib.metadata.version(package)
    return name, None


def devices(name: str) -> Sequence[jax.Device] | None:
    """Returns a topology's devices to compile for, or None if its compiler is not installed.

    Raises:
      UserError: As `parse`, or if the compiler does not know the topology.
    """
    topology = parse(name)
    compiler, version = compiler_of(name)
    if version is None:
        return None
    options = _gpu_options(topology) if CHIPS[topology.generation].gpu else _tpu_options(topology)
    try:
        return topologies.get_topology_desc(**options).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"{compiler} does not know the topology {name} ({first_line(error)}). "
            "Choose another --topology."
        ) from None


def _gpu_options(topology: Topology) -> dict[str, Any]:
    chip = CHIPS[topology.generation]
    num_hosts = math.ceil(topology.num_devices / GPUS_PER_HOST)
    return {
        "platform": "cuda",
        "topology_name": topology.generation,
        "target_config": _TARGET % (chip.memory_bytes, chip.gpu, chip.kind),
        # Slices, hosts, GPUs of a host.
        "topology": f"1x{num_hosts}x{topology.num_devices // num_hosts}",
    }


def _tpu_options(topology: Topology) -> dict[str, Any]:
    options: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": f"{topology.generation}:{topology.shape}",
    }
    # Both cores of a chip are one device.
    if topology.generation in ("v4", "v5p"):
        options["chip_config_name"] = "megacore"
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    # A single chip is less than a host, which has four.
    if set(topology.shape) == {"1", "x"}:
        options["chips_per_host_bounds"] = [1, 1, 1]
    return options
