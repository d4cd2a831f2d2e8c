"""What a compiled program sends between devices, read from its text (`compiled.as_text()`).

XLA lists a program as computations; loops, fusions and calls name the ones they run. A collective in a loop's body is
performed in every round. XLA cuts some into pieces that overlap with arithmetic; they share a channel and count once.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The TPU's compiler writes a reduce-scatter as a computation of this name: an all-reduce, of which a slice is taken.
_SCATTERED = "all-reduce-scatter"
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_CALLED = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d+)?(?:\w*)\[([\d,]*)\]")
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_COMPARE = re.compile(r" compare\(.*?%?([\w.\-]+)\), direction=LT")


class Collective(NamedTuple):
    """One instruction that sends arrays between devices."""

    kind: str  # One of `KINDS`.
    n_bytes: int  # Of its results on one device.
    largest: int  # Bytes of the largest array among them.
    shape: str  # Of that array, as XLA writes it.
    devices: int  # That take part in one exchange.
    loops: int  # Within one another around it.
    times: int  # In one call of the program, where each loop's number of rounds is known; others count once.
    source: str  # Where the model asks for it, as jax names it; empty for what XLA adds.

    @property
    def sent(self) -> float:
        """Bytes that a device sends each time, by the usual rings: an all-reduce sends its array almost twice."""
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
    """The collectives of a compiled program that more than one device takes part in."""
    partitions = _PARTITIONS.search(text)
    if not partitions:
        return []
    computations, n_device = _computations(text), int(partitions[1])
    found: dict[Any, Collective] = {}
    for name, loops, times in _walk(computations, _entry(text)):
        for number, line in enumerate(computations[name]):
            match = _COLLECTIVE.search(line)
            if not match or (devices := _group(line, n_device)) < 2:
                continue
            one = _collective(match, line, devices, loops, times)
            if name.startswith(_SCATTERED):
                one = one._replace(kind="reduce-scatter", n_bytes=one.n_bytes // devices)
            found.setdefault((one.kind, *_piece(line, name, number), loops), one)
    return list(found.values())


def _piece(line: str, name: str, number: int) -> tuple:
    """What the pieces of one collective have in common."""
    chain = re.search(r'chain_id="(\d+)"', line)
    channel = re.search(r"channel_id=(\d+)", line)
    return (channel[1], chain[1]) if chain and channel else (name, number)


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation by its name."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[2], [])
        else:
            lines.append(line)
    return computations


def _entry(text: str) -> str:
    return next(header[2] for line in text.splitlines() if (header := _HEADER.match(line)) and header[1])


def _walk(
    computations: dict[str, list[str]], name: str, loops: int = 0, times: int = 1
) -> Iterator[tuple[str, int, int]]:
    """Each computation that runs, with the loops around it and how often it runs."""
    yield name, loops, times
    for line in computations[name]:
        called = {role: other for role, other in _CALLED.findall(line) if role != "to_apply" or " call(" in line}
        if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            called |= {other: other for other in re.findall(r"[\w.\-]+", branches[1])}
        rounds = _rounds(line, computations[called["condition"]]) if "condition" in called else None
        for role, other in called.items():
            if other in computations and role != "condition":
                inside = role == "body"
                yield from _walk(computations, other, loops + inside, times * (rounds or 1) if inside else times)


def _rounds(loop: str, condition: list[str]) -> int | None:
    """How often a loop runs, as XLA says beside it or as its condition's limit says; None: it depends on the numbers."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(known[1])
    constants = {found[1]: int(found[2]) for line in condition if (found := _CONSTANT.search(line))}
    limits = [constants.get(found[1]) for line in condition if (found := _COMPARE.search(line))]
    return limits[0] if len(limits) == 1 else None


def _collective(match: re.Match, line: str, devices: int, loops: int, times: int) -> Collective:
    kind, results = match[2], re.sub(r"\{[^}]*\}", "", match[1])
    if match[3] and kind != "all-reduce":  # A tuple of operands, results, and maybe counters.
        results = _second(results)
    arrays = [(_size(*array.groups()), array[0]) for array in _ARRAY.finditer(results)]
    source = re.search(r'op_name="([^"]*)"', line)
    largest, shape = max(arrays)
    n_bytes = sum(size for size, _ in arrays)
    return Collective(kind, n_bytes, largest, shape, devices, loops, times, source[1] if source else "")


def _second(tuple_: str) -> str:
    """The second member of a tuple such as (f32[2], (f32[4], f32[8]), u32[]), which may be a tuple itself."""
    depth, members = 0, [""]
    for letter in tuple_.strip()[1:-1]:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            members.append("")
        else:
            members[-1] += letter
    return members[1]


def _size(letters: str, bits: str | None, dimensions: str) -> int:
    """Bytes of an array such as bf16[2,3]."""
    n_bit = 8 if letters == "pred" else int(bits)
    return math.prod(map(int, filter(None, dimensions.split(",")))) * n_bit // 8


def _group(line: str, n_device: int) -> int:
    """How many devices exchange with one another, in any of the ways that XLA writes groups."""
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
        raise ValueError(f"XLA wrote groups of devices in an unknown way: {line.strip()[:300]}")
    return n_device
