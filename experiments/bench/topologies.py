"""Slices of Cloud TPUs by name, described by libtpu on a machine that has none."""

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

# libtpu looks for its chips, and for other processes that have them, unless it is told not to.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# From small to large, as Google Cloud offers them.
SLICES = {
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
_MEGACORE = ("v4", "v5p")  # Both cores of a chip are one device.


def set_environment() -> None:
    """To be called before jax is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def split(topology: str) -> tuple[str, str]:
    """`v5e:4x8` as generation and shape.

    Raises:
      ValueError: it is not written so, of an unknown generation, or no such slice can be.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", topology)
    if not found or found[1] not in SLICES:
        raise ValueError(
            f"the topology is {topology!r}; give a generation ({', '.join(SLICES)}) and the chips along each axis, such as "
            "v5e:4x8 or v4:2x2x4"
        )
    generation, shape = found.groups()
    chips, known = [int(n) for n in shape.split("x")], SLICES[generation]
    hosts = [n % 2 == 0 for n in chips[:2]]  # A host has 2 x 2 chips.
    if shape not in known and not (len(chips) == known[0].count("x") + 1 and all(hosts)):
        raise ValueError(f"there is no slice {topology}; those of {generation} are {', '.join(known)} and larger ones")
    return generation, shape


def version() -> str | None:
    """Of libtpu; None: it is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    return importlib.metadata.version("libtpu")


def n_device(topology: str) -> int:
    """How many devices jax counts there."""
    generation, shape = split(topology)
    return math.prod(map(int, shape.split("x"))) * (2 if generation == "v3" else 1)


def devices(topology: str) -> Sequence[Any] | None:
    """The devices of a slice, to compile for; None: libtpu is not installed.

    Raises:
      ValueError: libtpu knows no such slice.
    """
    import jax  # Not at the top, which stands before `set_environment`.
    from jax.experimental import topologies

    generation, shape = split(topology)
    if version() is None:
        return None
    options = {"chip_config_name": "megacore"} if generation in _MEGACORE else {}
    if set(shape) == {"1", "x"}:  # Less than a host, which has four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"libtpu knows no slice {topology} ({reason}); give another --topology") from None
