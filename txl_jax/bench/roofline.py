"""What a chip can do at best, and the least time that a piece of work takes on it."""

from typing import NamedTuple

from txl_jax import flops


class Chip(NamedTuple):
    """One device as jax counts them, from Google Cloud's pages on each generation (read 2026-11-22)."""

    kind: str  # As jax calls it; its peak is `flops.device_peak`.
    memory: float  # Bytes of high-bandwidth memory.
    bandwidth: float  # Bytes per second to and from it.
    links: float  # Bytes per second sent over all its links to other chips, in one direction.

    @property
    def peak(self) -> float:
        """Operations per second of dense products in bfloat16."""
        return flops.device_peak(self.kind)


# By the generation in a topology's name. v3 has two devices on a chip, each with half of it. Links: the all-reduce
# bandwidth of a pod over its chips where the page gives it (v3, v5e, v6e), else the chip's, in one direction.
CHIPS = {
    "v3": Chip("TPU v3", 16 * 2**30, 900e9 / 2, 340e12 / 1024 / 2),
    "v4": Chip("TPU v4", 32 * 2**30, 1228e9, 2400e9 / 8),
    "v5e": Chip("TPU v5 lite", 16 * 2**30, 819e9, 51.2e12 / 256),
    "v5p": Chip("TPU v5", 95 * 2**30, 2765e9, 4800e9 / 8),
    "v6e": Chip("TPU v6 lite", 32 * 2**30, 1638e9, 102.4e12 / 256),
}


class Work(NamedTuple):
    """What one device does."""

    flops: float
    memory_bytes: float  # Read from and written to its memory.
    sent_bytes: float


class Bounds(NamedTuple):
    """Seconds at the rates of the data sheets, which programs do not reach."""

    compute: float
    memory: float
    links: float

    @property
    def overlapped(self) -> float:
        """If all goes on at once."""
        return max(self)

    @property
    def in_turn(self) -> float:
        """If one waits for the other."""
        return sum(self)


def bounds(work: Work, chip: Chip) -> Bounds:
    """The time of some work on a chip."""
    return Bounds(work.flops / chip.peak, work.memory_bytes / chip.bandwidth, work.sent_bytes / chip.links)
