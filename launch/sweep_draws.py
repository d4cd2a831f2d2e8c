"""Random search: the [random] table of a sweep's file becomes settings that are drawn from ranges."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError

_OWN = ("samples", "seed")
_WRITE = "write it as {uniform = [low, high]}, or {log = [low, high]} for a logarithmic range"


class _Range(NamedTuple):
    """A range of a setting: between two numbers, or between their logarithms."""

    low: float
    high: float
    log: bool
    whole: bool

    def at(self, share: float) -> int | float:
        """The value below which lies a share, from 0 to 1, of the range; of whole numbers, both ends belong to it."""
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        if self.whole:
            return int(min(value // 1, self.high))
        # Four digits keep the names of runs short; rounding may not leave the range.
        return min(max(float(f"{value:.4g}"), self.low), self.high)


def drawn(table: Mapping[str, Any], flat: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of each sample, without those that are equal to an earlier one.

    A value depends on the seed, the number of the sample and the setting alone: more samples, or another setting, leave
    the values of the others as they were.

    Args:
      table: [random], with `samples`, `seed` (default 0) and ranges.
      flat: flattens tables to dotted names.

    Raises:
      UserError: a range or a number that cannot be.
    """
    samples, seed = (_whole(table, name, default) for name, default in (("samples", None), ("seed", 0)))
    if samples < 1:
        raise UserError(f"random has samples = {samples}; give the number of draws, 1 or more")
    ranges = _ranges(flat({name: value for name, value in table.items() if name not in _OWN}))
    if not ranges:
        raise UserError(f"random has no range to draw from; {_WRITE}")
    found: list[dict[str, Any]] = []
    for number in range(samples):
        point = {name: each.at(_share(seed, number, name)) for name, each in ranges.items()}
        if point not in found:
            found.append(point)
    return found


def _share(seed: int, number: int, name: str) -> float:
    return float(np.random.default_rng([seed, number, zlib.crc32(name.encode())]).random())


def _whole(table: Mapping[str, Any], name: str, default: int | None) -> int:
    value = table.get(name, default)
    if type(value) is not int or value < 0:
        hint = "; the seeds of the runs go into [grid]" if name == "seed" else ""
        raise UserError(f"random has {name} = {value!r}; give a whole number, as {name} = 20{hint}")
    return value


def _ranges(flat: Mapping[str, Any]) -> dict[str, _Range]:
    types = {leaf.name: leaf.type for leaf in config_tree.leaves()}
    found = {}
    for full, value in flat.items():
        name, _, kind = full.rpartition(".")
        if kind not in ("log", "uniform") or not name:
            raise UserError(f"random has {full} = {value!r}; {_WRITE}")
        if name in found:
            raise UserError(f"random has two ranges of {name}; {_WRITE}")
        ends = value if isinstance(value, list) and all(type(end) in (int, float) for end in value) else []
        if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
            raise UserError(f"random has {full} = {value!r}; give two numbers, the lower one first")
        if kind == "log" and ends[0] <= 0:
            raise UserError(f"random has {full} = {value!r}; a logarithmic range begins above 0")
        found[name] = _Range(float(ends[0]), float(ends[1]), log=kind == "log", whole=types.get(name) is int)
    return found
