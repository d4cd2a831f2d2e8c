"""Device, versions and date of a measurement, and numbers formatted for people."""

import datetime
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax

from txl_jax.version import __version__


def describe() -> dict[str, Any]:
    """Returns device, versions and date, which are written beside every measured number."""
    return {
        "device": device_kind(),
        "devices": jax.device_count(),
        "threads": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "txl_jax": __version__,
        "date": datetime.date.today().isoformat(),
    }


def device_kind() -> str:
    """Returns the first device's name; for a CPU the processor's and its cores, as jax only returns "cpu"."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU ({_processor()}, {os.cpu_count()} cores)"


def _processor() -> str:
    """The processor's model where the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def megabytes(size: float) -> str:
    """Formats a number of bytes.

    >>> megabytes(52_428_800), megabytes(4.8e9)
    ('52 MB', '4.8 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes that a tree of arrays takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def device_memory_bytes() -> int | None:
    """Returns the most memory that was in use so far on any device of this process; None: not reported (CPUs)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found), default=None)


def brief_number(number: float) -> str:
    """Formats a positive number with three digits.

    >>> brief_number(0.0517), brief_number(123_456), brief_number(1234.5), brief_number(2.0)
    ('0.0517', '123k', '1.23k', '2')
    """
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{_three_digits(number / limit)}{unit}"
    return _three_digits(number)


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def brief_duration(seconds: float) -> str:
    """Formats seconds with the two largest units.

    >>> brief_duration(45), brief_duration(3723), brief_duration(200000)
    ('45s', '1h 2m', '2d 7h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    rest = round(seconds)
    found: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or found:
            found.append(f"{count}{unit}")
    return " ".join(found[:2]) or "0s"


def duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss, with days before that.

    >>> duration(3723), duration(200000)
    ('1:02:03', '2d 7:33:20')
    """
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"
