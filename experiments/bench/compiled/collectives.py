"""Collectives: the bytes that a device sends to others.

Bytes sent by a device in a group of n, by the algorithms that send the least:

    all-gather, of a result of R bytes               R (n - 1) / n
    reduce-scatter, of an operand of R bytes         R (n - 1) / n
    all-reduce, a reduce-scatter and an all-gather   2 R (n - 1) / n
    all-to-all                                       R (n - 1) / n
    collective-permute                               R

An all-reduce of which a fusion keeps only this device's part counts as a reduce-scatter. An
asynchronous collective counts where it starts. The TPU compiler also spreads a collective over a
chain of fusions and repeats it in each of them: it counts where the chain starts. Collectives read
and write HBM as well: `hbm_bytes`, which is not part of the other traffic.
"""

import dataclasses
import math
import re

from experiments.bench.compiled.hlo import Array, Computation, Instruction, Program

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# The custom call that a chain of fusions begins with.
_CHAIN_START = "AsyncCollectiveStart"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective each time that it runs."""

    kind: str
    line: Instruction
    # Dtype and shape of the largest array.
    array: Array
    # Devices that exchange data with each other.
    group: int
    # Bytes that a device sends.
    sent: float
    # Bytes that it reads from its own HBM, and writes to it, for that.
    hbm_bytes: float


def kind_of(line: Instruction) -> str | None:
    """Returns the kind of a collective, or None for second halves and other instructions."""
    kind = line.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def is_collective(line: Instruction) -> bool:
    """Whether an instruction is a collective, or the second half of one."""
    return line.opcode.removesuffix("-start").removesuffix("-done") in KINDS


def collectives_of(
    program: Program, line: Instruction, computation: Computation
) -> list[Collective]:
    """Returns the collective that an instruction is, or the collectives that begin in a fusion."""
    kind = kind_of(line)
    if kind is not None:
        if _is_continued(line, computation):
            return []
        return [_collective(program, kind, line, computation)]
    fused = program.fused(line)
    collectives: list[Collective] = []
    if fused is not None:
        for part in fused.instructions.values():
            collectives.extend(collectives_of(program, part, fused))
    return collectives


def _is_continued(line: Instruction, computation: Computation) -> bool:
    """Whether an instruction continues a collective that began in another fusion."""
    if "chain_id=" not in line.attributes:
        return False
    users = computation.users[line.name]
    return not any(_CHAIN_START in user.attributes for user, _ in users)


def _collective(
    program: Program, kind: str, line: Instruction, computation: Computation
) -> Collective:
    operands = computation.operand_arrays(line)
    results = _results(kind, line, operands)
    arrays = [*operands, *results]
    group = _group_size(program, line)
    others = (group - 1) / group
    operand_bytes = sum(array.num_bytes for array in operands)
    result_bytes = sum(array.num_bytes for array in results)

    if kind == "collective-permute":
        sent = operand_bytes
    elif kind == "all-gather":
        sent = result_bytes * others
    elif kind == "all-reduce" and not _is_scattered(line, computation):
        sent = 2 * operand_bytes * others
    else:
        sent = operand_bytes * others
    if kind == "all-reduce" and _is_scattered(line, computation):
        kind = "reduce-scatter"
    return Collective(
        kind,
        line,
        max(arrays, key=lambda array: array.num_bytes),
        group,
        sent,
        sum(array.stored_bytes for array in arrays if array.in_hbm),
    )


def _results(kind: str, line: Instruction, operands: list[Array]) -> list[Array]:
    """Returns the result arrays of a collective. A collective that starts also lists operands."""
    if not line.opcode.endswith("-start") or kind == "all-reduce":
        return list(line.arrays[: len(operands)])
    return list(line.arrays[len(operands) : 2 * len(operands)])


def _is_scattered(line: Instruction, computation: Computation) -> bool:
    """Whether all users of an all-reduce take a slice of it, in the same fusion."""
    users = [user for user, _ in computation.users[line.name]]
    # An all-reduce of several arrays has a tuple as its result.
    of_tuple = [user for user in users if user.opcode == "get-tuple-element"]
    for element in of_tuple:
        users.remove(element)
        users.extend(user for user, _ in computation.users[element.name])
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _group_size(program: Program, line: Instruction) -> int:
    """Returns the number of devices in a group of a collective.

    Groups are written as lists of devices, `{{0,1},{2,3}}`; as a shape, `[2,2]<=[4]` (two groups of
    two); as axes of a mesh, `mesh['a'=2,'b'=8] {'b'}`; or as `{}`, which means all devices.
    """
    counted = line.attribute(r"replica_groups=\[\d+,(\d+)\]")
    if counted:
        return int(counted)
    listed = line.attribute(r"replica_groups=\{\{([\d,]*)\}")
    if listed:
        return len(listed.split(","))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line.attributes)
    if mesh:
        lengths = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        # A part of an axis is written with its own length: `'b':(2)4`.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or lengths[axis]) for axis, part in axes)
    return max(program.num_devices, 1)
