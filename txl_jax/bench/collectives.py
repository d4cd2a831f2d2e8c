"""Collectives (all-gather, all-reduce, ...) of a compiled program, parsed from its HLO text (`compiled.as_text()`).

A collective in a loop's body runs once per iteration. XLA splits some collectives into pieces that overlap with
arithmetic; the pieces share a channel and count once.

Of a program for several slices of TPUs the text is that of one slice: its `replica_groups` are of the chips of a slice.
What crosses slices are transfers through the hosts, over the data-centre network (`crossings`).
"""

import math
import re
from typing import Any, NamedTuple

from txl_jax.bench import hlo_text

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# The TPU's compiler writes a reduce-scatter as a computation of this name: an all-reduce, of which a slice is taken.
_SCATTERED = "all-reduce-scatter"
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
# A transfer between slices, as the TPU's compiler writes its end: its kind, and the chips that take part.
_TRANSFER = re.compile(r"= (.*?) recv\(.*_xla_host_transfer_handler_name=\"xla_megascale_runtime\"")
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_ARRAY = re.compile(r"\b[a-z]+(\d+)?\w*\[([\d,]*)\]")


class Collective(NamedTuple):
    """One instruction that sends arrays between devices.

    Attributes:
      kind: one of `KINDS`.
      n_bytes: size of its results on one device.
      largest: bytes of the largest array among the results.
      shape: shape of that array, as XLA writes it.
      devices: size of a group of devices that exchange with one another.
      loops: number of nested loops around it.
      times: executions per call of the program; a loop with an unknown trip count counts as one iteration.
      source: place in the model that it comes from, as jax names it; empty for what XLA adds.
    """

    kind: str
    n_bytes: int
    largest: int
    shape: str
    devices: int
    loops: int
    times: int
    source: str

    @property
    def bytes_sent(self) -> float:
        """Bytes that a device sends per execution with ring algorithms; an all-reduce sends its array almost twice."""
        others = self.devices - 1
        per_device = {
            "all-gather": others / self.devices,
            "all-reduce": 2 * others / self.devices,
            "reduce-scatter": others,
            "all-to-all": others / self.devices,
            "collective-permute": 1,
        }
        return per_device[self.kind] * self.n_bytes


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program in which more than one device takes part."""
    partitions = _PARTITIONS.search(text)
    if not partitions:
        return []
    computations, num_devices = hlo_text.computations(text), int(partitions[1])
    found: dict[Any, Collective] = {}
    for name, loops, times in hlo_text.executed(computations, hlo_text.entry(text)):
        for number, line in enumerate(computations[name]):
            match = _COLLECTIVE.search(line)
            if not match or (devices := _group_size(line, num_devices)) < 2:
                continue
            one = _collective(match, line, devices, loops, times)
            if name.startswith(_SCATTERED):
                one = one._replace(kind="reduce-scatter", n_bytes=one.n_bytes // devices)
            found.setdefault((one.kind, *_piece(line, name, number), loops), one)
    return list(found.values())


def crossings(text: str, num_slices: int) -> list[Collective]:
    """Returns what a compiled program for several slices of TPUs sends between them, over the data-centre network.

    Args:
      text: HLO text of one slice's program.
      num_slices: slices that take part; `Collective.devices` is this number, and the sizes are those of one chip.

    Raises:
      ValueError: a kind of transfer that is no collective of `KINDS`.
    """
    computations = hlo_text.computations(text)
    found = []
    for name, loops, times in hlo_text.executed(computations, hlo_text.entry(text)):
        for line in computations[name]:
            if not (match := _TRANSFER.search(line)):
                continue
            written = _TRANSFER_TYPE.search(line)
            kind = written[1].lower().replace("_", "-") if written else "unnamed"
            if kind not in KINDS:
                raise ValueError(f"a transfer between slices is {kind}, no collective: {line.strip()[:300]}")
            arrays = [(_size(*array.groups()), array[0]) for array in _ARRAY.finditer(_without_layouts(match[1]))]
            size, shape = max(arrays)
            source = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(kind, size, size, shape, num_slices, loops, times, source[1] if source else ""))
    return found


def _piece(line: str, name: str, number: int) -> tuple[str, str | int]:
    """Returns a key that the pieces of one collective share."""
    chain = re.search(r'chain_id="(\d+)"', line)
    channel = re.search(r"channel_id=(\d+)", line)
    return (channel[1], chain[1]) if chain and channel else (name, number)


def _collective(match: re.Match[str], line: str, devices: int, loops: int, times: int) -> Collective:
    """Parses one instruction."""
    kind, results = match[2], _without_layouts(match[1])
    if match[3] and kind != "all-reduce":  # A tuple of operands, results, and maybe counters.
        results = _second(results)
    arrays = [(_size(*array.groups()), array[0]) for array in _ARRAY.finditer(results)]
    source = re.search(r'op_name="([^"]*)"', line)
    largest, shape = max(arrays)
    n_bytes = sum(size for size, _ in arrays)
    return Collective(kind, n_bytes, largest, shape, devices, loops, times, source[1] if source else "")


def _without_layouts(results: str) -> str:
    """Returns types such as f32[2,3]{1,0:T(8,128)} without what is in braces."""
    return re.sub(r"\{[^}]*\}", "", results)


def _second(tuple_: str) -> str:
    """Returns the second member of a tuple such as (f32[2], (f32[4], f32[8]), u32[]), which may be a tuple itself."""
    depth, members = 0, [""]
    for letter in tuple_.strip()[1:-1]:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            members.append("")
        else:
            members[-1] += letter
    return members[1]


def _size(bits: str | None, dimensions: str) -> int:
    """Returns the bytes of an array such as bf16[2,3]."""
    n_bit = 8 if bits is None else int(bits)  # A truth value (pred) has a byte.
    return math.prod(map(int, filter(None, dimensions.split(",")))) * n_bit // 8


def _group_size(line: str, num_devices: int) -> int:
    """Returns how many devices exchange with one another, in any of the notations in which XLA writes groups."""
    if "source_target_pairs" in line:
        return 2
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(axis.split("=") for axis in found[1].split(","))
        return math.prod(int(sizes[axis]) for axis in found[2].split(","))
    if re.search(r"replica_groups=[^{]|replica_groups=\{[^}]", line):
        raise ValueError(f"unknown notation of replica_groups in XLA's text: {line.strip()[:300]}")
    return num_devices
