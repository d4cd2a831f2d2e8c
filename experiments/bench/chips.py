"""Devices for which programs are estimated: sizes, memory and peaks."""

import re
from typing import NamedTuple

from experiments.bench.compiled.cost import Peaks
from txl_jax import flops


class Chip(NamedTuple):
    """A kind of device, as jax counts devices: a TPU v3 core, a chip of later TPUs, or a GPU."""

    # Name in jax. `flops.device_peak` has its peak.
    kind: str
    # Size of the device's memory. For a GPU, the size that CUDA reports.
    memory_bytes: int
    # Bandwidth of this memory (HBM) in bytes per second, from the data sheet.
    bandwidth: float
    # 32-bit integer operations per second.
    integer_ops: float
    # Slices that Google Cloud offers, or numbers of GPUs in a host, from small to large.
    sizes: tuple[str, ...]
    # Fields of `GpuDeviceInfoProto`, from CUDA and XLA's own files of known GPUs. Empty for TPUs.
    gpu: str = ""

    @property
    def peaks(self) -> Peaks:
        """The device's peak rates per second.

        The matmul peak is for bfloat16. A program in float32 is slower.
        """
        peak = flops.device_peak(self.kind)
        assert peak is not None, f"flops.device_peak must contain {self.kind}"
        return Peaks(flops=peak, hbm_bytes=self.bandwidth, integer_ops=self.integer_ops)


GIB = 1 << 30
# GPUs that share a host, and NVLink.
GPUS_PER_HOST = 8
# Numbers of GPUs that are at most one host.
HOST_SIZES = ("1", "2", "4", "8")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

# Integer operations of a TPU per cycle: registers of 8 x 128 lanes, and 2 (v3, v4) or 4 operations
# on each in every cycle. libtpu's estimates for random bits (threefry, 122 operations that are
# counted and some that are not) agree within 12% on all of them. On v5e it estimates up to 1.4
# times more for a hash with many multiplications. Clocks follow from the matmul peaks. A chip of v4
# or v5p has two cores.
_LANES = 8 * 128
# Multiprocessors, 32-bit integer operations of each per cycle, and clock.
_HOPPER_INTEGER_OPS = 132 * 64 * 1.98e9
_AMPERE_INTEGER_OPS = 108 * 64 * 1.41e9
_ADA_INTEGER_OPS = 128 * 64 * 2.52e9

_HOPPER = (
    "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 } "
    "threads_per_core_limit: 2048 "
    "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
)
_AMPERE = (
    "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 cuda_compute_capability { major: 8 } "
    "threads_per_core_limit: 2048 "
    "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"
)
_ADA = (
    "core_count: 128 fpus_per_core: 128 clock_rate_ghz: 2.52 "
    "cuda_compute_capability { major: 8 minor: 9 } threads_per_core_limit: 1536 "
    "shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376"
)

_V3 = Chip(
    kind="TPU v3",
    memory_bytes=16 * GIB,
    bandwidth=450e9,
    integer_ops=2 * _LANES * 0.94e9,
    sizes=("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
)
_V4 = Chip(
    kind="TPU v4",
    memory_bytes=32 * GIB,
    bandwidth=1228e9,
    integer_ops=2 * 2 * _LANES * 1.05e9,
    sizes=("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
)
_V5E = Chip(
    kind="TPU v5 lite",
    memory_bytes=16 * GIB,
    bandwidth=819e9,
    integer_ops=4 * _LANES * 1.5e9,
    sizes=_FLAT,
)
_V5P = Chip(
    kind="TPU v5",
    memory_bytes=95 * GIB,
    bandwidth=2765e9,
    integer_ops=2 * 4 * _LANES * 1.75e9,
    sizes=("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
)
_V6E = Chip(
    kind="TPU v6 lite",
    memory_bytes=32 * GIB,
    bandwidth=1640e9,
    integer_ops=4 * _LANES * 1.75e9,
    sizes=_FLAT,
)
# The modules with NVLink (SXM), not the cards.
_H200 = Chip(
    kind="H200",
    memory_bytes=150_754_820_096,
    bandwidth=4800e9,
    integer_ops=_HOPPER_INTEGER_OPS,
    sizes=HOST_SIZES,
    gpu=f"{_HOPPER} memory_bandwidth: 4800000000000 l2_cache_size: 62914560",
)
_H100 = Chip(
    kind="H100",
    memory_bytes=84_942_979_072,
    bandwidth=3352.32e9,
    integer_ops=_HOPPER_INTEGER_OPS,
    sizes=HOST_SIZES,
    gpu=f"{_HOPPER} memory_bandwidth: 3352320000000 l2_cache_size: 52428800",
)
_A100 = Chip(
    kind="A100",
    memory_bytes=85_100_068_864,
    bandwidth=2039.04e9,
    integer_ops=_AMPERE_INTEGER_OPS,
    sizes=HOST_SIZES,
    gpu=f"{_AMPERE} memory_bandwidth: 2039040000000 l2_cache_size: 41943040",
)
# A consumer card, without NVLink. Bandwidth, clock and caches are from NVIDIA's white paper about
# Ada, the architecture of this card.
_RTX4090 = Chip(
    kind="RTX 4090",
    memory_bytes=25_393_692_672,
    bandwidth=1008e9,
    integer_ops=_ADA_INTEGER_OPS,
    sizes=HOST_SIZES,
    gpu=f"{_ADA} memory_bandwidth: 1008000000000 l2_cache_size: 75497472",
)

# Chips by the name that a topology begins with.
CHIPS = {
    "v3": _V3,
    "v4": _V4,
    "v5e": _V5E,
    "v5p": _V5P,
    "v6e": _V6E,
    "h200": _H200,
    "h100": _H100,
    "a100": _A100,
    "rtx4090": _RTX4090,
}


def peaks_of(kind: str) -> Peaks | None:
    """Returns a device's peak rates per second, or None if it is not in the table.

    Args:
      kind: The device's name in jax, such as "TPU v5 lite" or "NVIDIA H200".
    """
    # Other versions of these GPUs have different or less memory.
    if re.search("PCIe|NVL|40GB|Laptop|4090 D", kind):
        return None
    # JAX has used both names.
    kind = kind.replace("TPU v5p", "TPU v5")
    chips = [chip for chip in CHIPS.values() if re.search(rf"\b{chip.kind}\b", kind)]
    if not chips:
        return None
    # "TPU v5 lite" also contains the name "TPU v5".
    return max(chips, key=lambda chip: len(chip.kind)).peaks
