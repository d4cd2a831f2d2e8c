"""Roofline model: the least time that a piece of work takes on a chip, by the rates of its data sheet."""

from typing import NamedTuple

from txl_jax import flops
from txl_jax.bench.gpu_topologies import GPUS


class Chip(NamedTuple):
    """Rates of one device as jax counts devices, by its maker.

    Of TPUs from Google Cloud's page on each generation (read 2026-11-22), of GPUs from NVIDIA's data sheets of the
    modules with NVLink (SXM; H200 and H100 of 2024, A100 of 2021).

    Attributes:
      kind: its name in jax; `flops.device_peak` knows its peak.
      hbm_bytes: size of its high-bandwidth memory; of a GPU as CUDA reports it.
      hbm_bandwidth: bytes per second to and from that memory.
      link_bandwidth: bytes per second sent over all its links to other chips, in one direction.
    """

    kind: str
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of dense matrix products in bfloat16."""
        peak = flops.device_peak(self.kind)
        assert peak is not None, f"{self.kind} has no peak in flops.py"
        return peak


# NVLink of a GPU in one direction: half of the data sheet's figure.
_NVLINK_4, _NVLINK_3 = 900e9 / 2, 600e9 / 2

# By the generation or the GPU in a topology's name. v3 has two devices per chip, each with half of it. Links of TPUs:
# the all-reduce bandwidth of a pod divided by its chips where the page gives it (v3, v5e, v6e), else the chip's, in one
# direction.
CHIPS = {
    "v3": Chip("TPU v3", 16 * 2**30, 900e9 / 2, 340e12 / 1024 / 2),
    "v4": Chip("TPU v4", 32 * 2**30, 1228e9, 2400e9 / 8),
    "v5e": Chip("TPU v5 lite", 16 * 2**30, 819e9, 51.2e12 / 256),
    "v5p": Chip("TPU v5", 95 * 2**30, 2765e9, 4800e9 / 8),
    "v6e": Chip("TPU v6 lite", 32 * 2**30, 1638e9, 102.4e12 / 256),
    "h200": Chip("H200", GPUS["h200"].memory_bytes, 4.8e12, _NVLINK_4),
    "h100": Chip("H100", GPUS["h100"].memory_bytes, 3.35e12, _NVLINK_4),
    "a100": Chip("A100", GPUS["a100"].memory_bytes, 2.039e12, _NVLINK_3),
}


class Work(NamedTuple):
    """Work of one device: operations, bytes read from and written to its memory, bytes sent to other devices."""

    flops: float
    hbm_bytes: float
    sent_bytes: float


class Bounds(NamedTuple):
    """Lower bounds of the time in seconds, by resource; programs do not reach the rates of data sheets."""

    compute: float
    hbm: float
    communication: float

    @property
    def overlapped(self) -> float:
        """The bound if all three overlap perfectly."""
        return max(self)

    @property
    def serial(self) -> float:
        """The bound if nothing overlaps."""
        return sum(self)


def lower_bounds(work: Work, chip: Chip) -> Bounds:
    """Computes the lower bounds of the time of some work on a chip."""
    return Bounds(
        compute=work.flops / chip.peak_flops,
        hbm=work.hbm_bytes / chip.hbm_bandwidth,
        communication=work.sent_bytes / chip.link_bandwidth,
    )
