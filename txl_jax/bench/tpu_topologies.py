"""Slices of Cloud TPUs by name ("topologies"), described by libtpu on a machine that has no TPU."""

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from txl_jax.errors import UserError

# From small to large, as Google Cloud offers them.
SLICES = {
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
_SEVERAL = re.compile(r"([1-9]\d*)\*")  # Before a slice: so many of them.
_MEGACORE = ("v4", "v5p")  # Both cores of a chip are one device.


def count_slices(topology: str) -> int:
    """Returns how many slices a topology has: 2 for `2*v5e:4x8`, 1 for `v5e:4x8`."""
    found = _SEVERAL.match(topology)
    return int(found[1]) if found else 1


def split(topology: str) -> tuple[str, str]:
    """Splits `v5e:4x8`, or `2*v5e:4x8`, into generation and shape of a slice.

    Raises:
      UserError: another notation, an unknown generation, or a slice that cannot exist.
    """
    topology = _SEVERAL.sub("", topology)
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", topology)
    if not found or found[1] not in SLICES:
        raise UserError(
            f"the topology is {topology!r}; give a generation ({', '.join(SLICES)}) and the chips along each axis, "
            "such as v5e:4x8 or v4:2x2x4, and 2*v5e:4x8 for two slices"
        )
    generation, shape = found.groups()
    chips, known = [int(n) for n in shape.split("x")], SLICES[generation]
    whole_hosts = all(n % 2 == 0 for n in chips[:2])  # A host has 2 x 2 chips.
    if shape not in known and not (len(chips) == known[0].count("x") + 1 and whole_hosts):
        raise UserError(f"there is no slice {topology}; those of {generation} are {', '.join(known)} and larger ones")
    return generation, shape


def slices(topology: str) -> list[str]:
    """Returns the slices of a name: one, or for a generation without a shape all, from small to large."""
    if topology in SLICES:
        return [f"{topology}:{shape}" for shape in SLICES[topology]]
    split(topology)
    return [topology]


def libtpu_version() -> str | None:
    """Returns the version of libtpu; None: it is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    return importlib.metadata.version("libtpu")


def num_devices(topology: str) -> int:
    """Returns how many devices jax counts in a slice."""
    generation, shape = split(topology)
    in_slice = math.prod(map(int, shape.split("x"))) * (2 if generation == "v3" else 1)
    return count_slices(topology) * in_slice


def devices(topology: str) -> Sequence[jax.Device] | None:
    """Returns the devices of a slice, to compile for; None: libtpu is not installed.

    Raises:
      UserError: libtpu knows no such slice.
    """
    generation, shape = split(topology)
    if libtpu_version() is None:
        return None
    options: dict[str, object] = {"chip_config_name": "megacore"} if generation in _MEGACORE else {}
    if (num_slices := count_slices(topology)) > 1:
        options["num_slices"] = num_slices
    if set(shape) == {"1", "x"}:  # Less than a host, which has four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{shape}", **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"libtpu knows no slice {topology} ({reason}); give another --topology") from None
