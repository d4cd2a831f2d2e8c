"""Devices to compile for on a machine without them, by name: slices of Cloud TPUs and NVIDIA GPUs ("topologies").

`v5e:4x8` is a slice, by the chips along each axis, `2*v5e:4x8` two of them, and `h200x8` eight GPUs. libtpu compiles
for TPUs. XLA with jax's CUDA plugin compiles for GPUs, through to machine code. What is tuned by running it (algorithms
of cuBLAS and cuDNN) keeps its default.
"""

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.errors import UserError

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
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_MISSING_LIBTPU = "libtpu, the TPU's compiler, is not installed (pip install 'jax[tpu]')"
_MISSING_PLUGIN = "jax's CUDA plugin is not installed (pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt)"
_PER_HOST = 8  # GPUs that share NVLink.
_HOST = ("1", "2", "4", "8")
_MEGACORE = ("v4", "v5p")  # Both cores of a chip are one device.


class Gpu(NamedTuple):
    """What XLA must know of a GPU, as CUDA reports it, and as XLA's own files of known GPUs have it."""

    description: str  # Its name in CUDA.
    capability: tuple[int, int]  # Compute capability, (major, minor).
    cores: int  # Streaming multiprocessors.
    units_per_core: int  # Multiply-add units of a core for float32.
    clock_ghz: float  # Highest clock.
    bandwidth: int  # Bytes per second to and from its memory.
    l2_bytes: int  # Size of its level 2 cache.
    shared_bytes: int  # Shared memory of a core; a block can have 1 KiB less.


class Chip(NamedTuple):
    """A kind of device."""

    kind: str  # Its name in jax; `flops.device_peak` knows its peak.
    memory_bytes: int  # Size of a device's memory; of a GPU as CUDA reports it.
    sizes: tuple[str, ...]  # Slices that Google Cloud offers, or numbers of GPUs of a host, from small to large.
    gpu: Gpu | None = None  # None for TPUs.


_H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 4_800_000_000_000, 60 << 20, 228 << 10)
_H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3_352_320_000_000, 50 << 20, 228 << 10)
_A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2_039_040_000_000, 40 << 20, 164 << 10)
# Of GPUs the modules with NVLink (SXM), not the cards.
CHIPS = {
    "v3": Chip("TPU v3", 16 << 30, ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v4": Chip("TPU v4", 32 << 30, ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")),
    "v5e": Chip("TPU v5 lite", 16 << 30, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v5p": Chip("TPU v5", 95 << 30, ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")),
    "v6e": Chip("TPU v6 lite", 32 << 30, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "h200": Chip("H200", 150_754_820_096, _HOST, _H200),
    "h100": Chip("H100", 84_942_979_072, _HOST, _H100),
    "a100": Chip("A100", 85_100_068_864, _HOST, _A100),
}


class Topology(NamedTuple):
    """A topology's name, taken apart."""

    generation: str  # Key of `CHIPS`.
    shape: str  # Chips along each axis of a slice, or the number of GPUs.
    num_slices: int  # Slices of TPUs; 1 for GPUs.
    num_devices: int  # As jax counts them, over all slices.

    @property
    def chip(self) -> Chip:
        """The kind of its devices."""
        return CHIPS[self.generation]


def set_environment() -> None:
    """Keeps this process from searching for accelerators; call it before jax uses any device."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def parse(name: str) -> Topology:
    """Takes the name of a topology apart.

    Raises:
      UserError: If the notation or the generation is unknown, or there cannot be such a topology.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)\*)?(\w+):(\d+(?:x\d+){1,2})|([a-z]\d+)(?:x(\d+))?", name)
    several, generation, shape, gpu, count = found.groups("") if found else [""] * 5
    if gpu in CHIPS and CHIPS[gpu].gpu:
        number = int(count or 1)
        if str(number) not in _HOST and (number % _PER_HOST or not number):
            raise UserError(
                f"the topology {name} has {number} GPUs; give {', '.join(_HOST)} or a multiple of {_PER_HOST}"
            )
        return Topology(gpu, str(number), 1, number)
    if generation not in CHIPS or CHIPS[generation].gpu:
        tpus, gpus = ([one for one, chip in CHIPS.items() if bool(chip.gpu) is is_gpu] for is_gpu in (False, True))
        raise UserError(
            f"the topology is {name!r}; give a slice of TPUs ({', '.join(tpus)}, and the chips along each axis: "
            f"v5e:4x8 or v4:2x2x4; two of them: 2*v5e:4x8) or GPUs ({', '.join(gpus)}, and how many: h200 or h200x8)"
        )
    chips, known = [int(n) for n in shape.split("x")], CHIPS[generation].sizes
    whole_hosts = all(n and n % 2 == 0 for n in chips[:2])  # A host has 2 x 2 chips.
    if shape not in known and not (len(chips) == known[0].count("x") + 1 and whole_hosts):
        raise UserError(f"there is no slice {name}; those of {generation} are {', '.join(known)} and larger ones")
    num_slices = int(several or 1)
    return Topology(generation, shape, num_slices, num_slices * math.prod(chips) * (2 if generation == "v3" else 1))


def slices(name: str) -> list[str]:
    """Returns the topologies of a name: one, or for a generation or a GPU alone all, from small to large.

    Raises:
      UserError: If `parse` does.
    """
    if name in CHIPS:
        return [f"{name}{'x' if CHIPS[name].gpu else ':'}{size}" for size in CHIPS[name].sizes]
    parse(name)
    return [name]


def compiler_versions(name: str) -> dict[str, str]:
    """Returns name and version of the compiler of a topology."""
    is_gpu = parse(slices(name)[0]).chip.gpu
    found = [one for one in (_PLUGINS if is_gpu else ["libtpu"]) if importlib.util.find_spec(one)]
    version = importlib.metadata.version(found[0]) if found else "not installed"
    return {"CUDA plugin" if is_gpu else "libtpu": version}


def missing_compiler(name: str) -> str | None:
    """Names what is not installed and how to install it, or returns None if the compiler of a topology is there."""
    [(compiler, version)] = compiler_versions(name).items()
    if version != "not installed":
        return None
    return _MISSING_LIBTPU if compiler == "libtpu" else _MISSING_PLUGIN


def devices(name: str) -> Sequence[jax.Device] | None:
    """Returns the devices of a topology, to compile for, or None if its compiler is not installed.

    Raises:
      UserError: If `parse` does, or the compiler does not have this topology.
    """
    generation, shape, num_slices, count = parse(name)
    if missing_compiler(name):
        return None
    gpu = CHIPS[generation].gpu
    options: dict[str, Any]
    if gpu:
        hosts = math.ceil(count / _PER_HOST)  # In the shape: slices, hosts, GPUs of a host.
        options = {"platform": "cuda", "topology_name": generation, "topology": f"1x{hosts}x{count // hosts}"}
        options["target_config"] = target_config(CHIPS[generation])
    else:
        options = {"platform": "tpu", "topology_name": f"{generation}:{shape}"}
        if generation in _MEGACORE:
            options["chip_config_name"] = "megacore"
        if num_slices > 1:
            options["num_slices"] = num_slices
        if set(shape) == {"1", "x"}:  # Less than a host, which has four chips.
            options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(**options).devices
    except jax.errors.JaxRuntimeError as error:
        reason, [compiler] = str(error).partition("\n")[0], compiler_versions(name)
        raise UserError(f"{compiler} knows no topology {name} ({reason}); give another --topology") from None


def lower_for(device: jax.Device, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Lowers a function for one device of a topology; `.compile()` of the result compiles it.

    Pallas asks the ambient mesh what device it lowers for, and from jax 0.11 on fails without one ("No supported GPU
    devices found"). Arguments are trees of arrays, or of their shapes and types; options are those of `jax.jit`.
    """
    mesh = Mesh([device], ("device",))
    placed = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **options).lower(*shapes)


def target_config(chip: Chip) -> str:
    """Returns the description of a GPU as XLA reads it (`GpuTargetConfigProto` as text)."""
    gpu = chip.gpu
    assert gpu
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
        "device_memory_size": chip.memory_bytes,
        "memory_bandwidth": gpu.bandwidth,
    }
    fields = "\n".join(f"{name}: {value}" for name, value in info.items())
    major, minor = gpu.capability
    return (
        f"gpu_device_info {{\n{fields}\ncuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 patch: 0 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{gpu.description}"\n'
    )
