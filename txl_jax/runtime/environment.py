"""Device, versions and date of a measurement, and human-readable numbers and tables."""

import contextlib
import datetime
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from txl_jax.errors import one_line
from txl_jax.version import __version__

# A flag of somebody's own program.
_SECRET = re.compile(r"(?is)^(--?[\w.-]*(?:key|token|secret|password)=).*")


def describe() -> dict[str, Any]:
    """Returns device, versions and date, which are stored with every measured number."""
    return {
        "device": device_kind(),
        "devices": jax.device_count(),
        "threads": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "txl_jax": __version__,
        "date": datetime.date.today().isoformat(),
    }


def origin() -> list[str]:
    """Returns lines about this process: its command line, versions and commit.

    The commit is included only if the package is in a checkout.
    """
    words = [_SECRET.sub(r"\1...", word) for word in sys.orig_argv]
    device_and_versions = describe()
    versions = [f"{name} {device_and_versions[name]}" for name in ("txl_jax", "jax", "python")]

    # Without this directory git would name the checkout around a virtual environment.
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git = ["git", "-C", str(root), "rev-parse", "HEAD"]
            commit = subprocess.check_output(git, stderr=subprocess.DEVNULL, text=True)
            versions.append(f"commit {commit.strip()}")
    return [f"command   {shlex.join(words)}", f"versions  {', '.join(versions)}"]


def device_kind() -> str:
    """Returns the first device's name, or for a CPU the processor's name and its cores.

    For a CPU, JAX only returns "cpu".
    """
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU ({_processor_name()}, {os.cpu_count()} cores)"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search("^model name.*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes that a tree of arrays takes on one device."""
    size = 0
    for leaf in jax.tree.leaves(tree):
        shape_on_device = leaf.sharding.shard_shape(leaf.shape)
        size += math.prod(shape_on_device) * leaf.dtype.itemsize
    return size


def device_memory_bytes() -> int | None:
    """Returns the most memory in use so far on any device, or None if unknown.

    Only devices of this process count. The memory in use is unknown for CPUs.
    """
    peaks = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(stats["peak_bytes_in_use"])
    return max(peaks, default=None)


def device_memory_limit(device: jax.Device) -> int | None:
    """Returns the bytes that JAX may use on a device of this process, or None if unknown.

    It is unknown for CPUs and for devices that are only compiled for.
    """
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    return stats.get("bytes_limit")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that a device or this machine has no more memory.

    JAX names the status RESOURCE_EXHAUSTED where it allocates an array. On a CPU a function that is
    running reports INTERNAL, with the reason in words.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return bool(re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE))
    return isinstance(error, MemoryError)


def memory_bytes() -> int:
    """Returns the memory of the first device, or the machine's if the device does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def megabytes(size: float) -> str:
    """Formats a number of bytes.

    >>> megabytes(52_428_800), megabytes(4.8e9)
    ('52 MB', '4.8 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def brief_number(number: float) -> str:
    """Formats a positive number with three digits, or all of its trillions.

    >>> brief_number(0.0517), brief_number(123_456), brief_number(1234.5), brief_number(2.0)
    ('0.0517', '123k', '1.23k', '2')
    """
    unit = ""
    for size, symbol in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Three digits of a number just below are rounded up to the unit.
        if number >= size * 0.9995:
            number /= size
            unit = symbol
            break
    if number >= 1000:
        # No unit is above T: 1234T, not 1.23e+03T.
        return f"{number:.0f}{unit}"
    return f"{number:.3g}{unit}"


def duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss, with days before that.

    >>> duration(3723), duration(200000), duration(1e20)
    ('1:02:03', '2d 7:33:20', 'unknown')
    """
    try:
        exact = datetime.timedelta(seconds=round(seconds))
    except (OverflowError, ValueError):
        # Infinite, not a number, or more than a million years.
        return "unknown"
    return re.sub(" days?,", "d", str(exact))


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table. Each row is asked for when its line is."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(map(one_line, row))} |"
