"""GPUs of NVIDIA by name ("topologies"), described to XLA on a machine that has none.

Pallas on Triton, cuBLAS and XLA's own kernels go through to machine code. What is tuned by running it (algorithms of
cuBLAS and cuDNN) keeps its default.
"""

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import topologies

from txl_jax.errors import UserError

INSTALL = "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt"
PER_HOST = 8  # GPUs that share NVLink.
_SIZES = (1, 2, 4, 8)
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


class Gpu(NamedTuple):
    """Facts of a GPU that XLA needs; as CUDA reports it, and as XLA's own files of known GPUs have it.

    Attributes:
      description: its name in jax.
      capability: compute capability, (major, minor).
      cores: streaming multiprocessors.
      units_per_core: multiply-add units of a core for float32.
      clock_ghz: highest clock.
      memory_bytes: size of its memory.
      bandwidth: bytes per second to and from that memory.
      l2_bytes: size of its level 2 cache.
      shared_bytes: shared memory of a core; a block can have 1 KiB less.
    """

    description: str
    capability: tuple[int, int]
    cores: int
    units_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    shared_bytes: int


# The modules with NVLink (SXM), not the cards.
GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 150_754_820_096, 4_800_000_000_000, 60 << 20, 228 << 10),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 84_942_979_072, 3_352_320_000_000, 50 << 20, 228 << 10
    ),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 85_100_068_864, 2_039_040_000_000, 40 << 20, 164 << 10),
}


def is_gpu(topology: str) -> bool:
    """Returns whether a name begins like that of a GPU; the rest of it may be wrong."""
    return re.match("[a-z0-9]*", topology)[0].partition("x")[0] in GPUS  # type: ignore[index]


def split(topology: str) -> tuple[str, int]:
    """Splits `h200x8` into the GPU and how many of them there are.

    Raises:
      UserError: another notation, an unknown GPU, or several hosts that are not full.
    """
    found = re.fullmatch(r"([a-z]\d+)(?:x(\d+))?", topology)
    if not found or found[1] not in GPUS:
        raise UserError(
            f"the topology is {topology!r}; give a GPU ({', '.join(GPUS)}) and how many of them, such as h200 or h200x8"
        )
    count = int(found[2] or 1)
    if count not in _SIZES and (count % PER_HOST or not count):
        raise UserError(
            f"the topology {topology} has {count} GPUs; give {', '.join(map(str, _SIZES))} or a multiple of {PER_HOST} "
            "(a host's)"
        )
    return found[1], count


def slices(topology: str) -> list[str]:
    """Returns the topologies of a name: one, or for a GPU without a number those of one host, from small to large."""
    name, _ = split(topology)
    return [f"{name}x{count}" for count in _SIZES] if topology == name else [topology]


def num_devices(topology: str) -> int:
    """Returns how many GPUs a topology has."""
    return split(topology)[1]


def plugin_version() -> str | None:
    """Returns the version of jax's plugin for NVIDIA GPUs; None: it is not installed."""
    for name in _PLUGINS:
        if importlib.util.find_spec(name) is not None:
            return importlib.metadata.version(name)
    return None


def devices(topology: str) -> Sequence[jax.Device] | None:
    """Returns the GPUs of a topology, to compile for; None: the plugin is not installed.

    Raises:
      UserError: an unknown topology, or one that the plugin does not describe.
    """
    name, count = split(topology)
    if plugin_version() is None:
        return None
    hosts = math.ceil(count / PER_HOST)
    shape = f"1x{hosts}x{count // hosts}"  # Slices, hosts, GPUs of a host.
    try:
        return topologies.get_topology_desc(
            topology_name=name, platform="cuda", target_config=target_config(GPUS[name]), topology=shape
        ).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"the CUDA plugin describes no {topology} ({reason}); {INSTALL}") from None


def target_config(gpu: Gpu) -> str:
    """Returns the description of a GPU as XLA reads it (`GpuTargetConfigProto` as text)."""
    major, minor = gpu.capability
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": gpu.shared_bytes - 1024,
        "shared_memory_per_core": gpu.shared_bytes,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
        "memory_bandwidth": gpu.bandwidth,
    }
    fields = "\n".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{\n{fields}\ncuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 patch: 0 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{gpu.description}"\n'
    )
