"""Counts the bytes that an instruction reads from and writes to a device's main memory (HBM).

Operands and results in HBM are counted with their padding: tiled axes are padded to whole tiles.
Each counts once, even if the hardware fetches a part of it more than once.

- Arrays in a TPU's vector memory are free. Moving them there and back (copies, slices,
  updates, synchronous or not) counts at the side that is in HBM.
- A slice or a gather reads as much as its result has. So does a fusion that only slices an operand.
- An update of a slice in place reads the update and writes as many bytes. A scatter also reads the
  elements that it adds to. In a fusion, an update is in place if there is only a change of layout
  between it and an operand of the fusion.
- A kernel (a custom call) reads its operands and writes its results once. If its own cost estimate
  contains more bytes, it reads the difference once more. The estimate ignores padding, so the
  difference is computed from arrays without padding.
- Loops and conditionals are free, because the instructions of their bodies count. Also free are
  names for parts of other results (bitcast, tuple, get-tuple-element), parameters, constants, new
  buffers without contents, and the second halves of asynchronous pairs.
- Collectives are counted by `collectives`.
- Caches are not modelled. On a GPU, data that fits in the L2 cache may never reach HBM.
"""

import dataclasses
from collections.abc import Sequence

from experiments.bench.compiled import collectives
from experiments.bench.compiled.hlo import Array, Computation, Instruction, Program
from experiments.bench.compiled.kernels import kernel_estimate

_FREE = {
    "after-all",
    "async-done",
    "async-update",
    "bitcast",
    "constant",
    "conditional",
    "copy-done",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
# A part of the first operand.
_SLICES = ("dynamic-slice", "slice", "gather")
# Index of the update among the operands. The first operand is the updated array.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Operations that change the layout or the name of an array, not its elements.
_SAME_ELEMENTS = ("bitcast", "copy", "copy-done", "reshape", "transpose")
# A custom call that creates a buffer without contents.
_NEW_BUFFER = "AllocateBuffer"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to HBM."""

    read: float = 0.0
    written: float = 0.0

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


class TrafficOf:
    """Counts the traffic of a program's instructions."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # Bytes that a fusion reads from a parameter, by the names of computation and parameter.
        self._parameter_bytes: dict[tuple[str, str], float | None] = {}

    def __call__(self, line: Instruction, computation: Computation) -> Traffic:
        """Returns the traffic of an instruction each time that it runs."""
        if _is_free(line) or collectives.is_collective(line):
            return Traffic()
        if line.opcode.endswith("-start"):
            return self._of_start(line, computation)
        if line.opcode == "fusion":
            return self._of_fusion(line, computation)

        operands = _operands(computation, line)
        traffic = _of_operation(line.opcode, operands, line.arrays)
        if line.opcode == "custom-call":
            again = _bytes_read_again(line, computation)
            traffic = dataclasses.replace(traffic, read=traffic.read + again)
        return traffic

    def _of_start(self, line: Instruction, computation: Computation) -> Traffic:
        """Counts the first half of an asynchronous pair as the operation that it starts.

        Its result is a tuple. Copies have the result first. Others have the operands first, and
        then the result.
        """
        opcode = line.opcode.removesuffix("-start")
        operands = _operands(computation, line)
        if opcode == "copy":
            return _of_operation(opcode, operands, line.arrays[:1])
        num_operand_arrays = sum(len(arrays) for arrays in operands)
        results = line.arrays[num_operand_arrays : num_operand_arrays + 1]
        return _of_operation(opcode, operands, results)

    def _of_fusion(self, line: Instruction, computation: Computation) -> Traffic:
        fused = self._program.computations[line.called() or ""]
        read = 0.0
        for number, name in enumerate(line.operands):
            arrays = _operand_arrays(computation, name)
            if not all(array.in_hbm for array in arrays):
                continue
            whole = sum(array.stored_bytes for array in arrays)
            part = None
            if number in fused.parameters:
                part = self._bytes_read(fused, fused.parameters[number].name)
            read += whole if part is None else min(part, whole)

        outputs = [fused.root]
        if fused.root.opcode == "tuple":
            outputs = [fused.instructions[name] for name in fused.root.operands]
        written = 0.0
        for array, output in zip(line.arrays, outputs, strict=False):
            if array.in_hbm:
                written += min(self._bytes_written(fused, output), array.stored_bytes)
        return Traffic(read, written)

    def _bytes_read(self, computation: Computation, name: str) -> float | None:
        """Returns the bytes that a fusion reads from a value, or None if it reads all of it."""
        key = (computation.name, name)
        if key not in self._parameter_bytes:
            self._parameter_bytes[key] = self._count_bytes_read(computation, name)
        return self._parameter_bytes[key]

    def _count_bytes_read(self, computation: Computation, name: str) -> float | None:
        if computation.instructions[name].is_root:
            return None
        total = 0.0
        for user, place in computation.users[name]:
            part = self._bytes_read_by(computation, user, place)
            if part is None:
                return None
            total += part
        return total

    def _bytes_read_by(
        self, computation: Computation, user: Instruction, place: int
    ) -> float | None:
        """Returns the bytes that a user in a fusion reads from an operand, or None for all."""
        if user.opcode in _SLICES and place == 0:
            return _stored_bytes(user.arrays)
        if user.opcode in _UPDATES and place == 0:
            return _bytes_updated_from(user.opcode, _operands(computation, user))
        if user.opcode in _SAME_ELEMENTS:
            return self._bytes_read(computation, user.name)
        fused = self._program.fused(user)
        if fused is None or place not in fused.parameters:
            return None
        if _only_changes_layout(fused):
            return self._bytes_read(computation, user.name)
        return self._bytes_read(fused, fused.parameters[place].name)

    def _bytes_written(self, computation: Computation, line: Instruction) -> float:
        """Returns the bytes that a fusion writes for an output."""
        origin = self._origin(computation, line)
        fused = self._program.fused(origin)
        if fused is not None and fused.root.opcode != "tuple":
            return self._bytes_written(fused, fused.root)
        if origin.opcode in _UPDATES and self._is_in_place(computation, origin):
            update = computation.operand(origin, _UPDATES[origin.opcode])
            if update is not None:
                return _stored_bytes(update.arrays)
        return _stored_bytes(line.arrays)

    def _is_in_place(self, computation: Computation, update: Instruction) -> bool:
        """Whether an update in a fusion changes an operand of the fusion."""
        updated = computation.operand(update, 0)
        while updated is not None:
            origin = self._origin(computation, updated)
            if origin.opcode not in _UPDATES:
                return origin.opcode == "parameter"
            # Several updates of the same array, one after the other.
            updated = computation.operand(origin, 0)
        return False

    def _origin(self, computation: Computation, line: Instruction) -> Instruction:
        """Returns the instruction whose elements a value contains, before changes of the layout."""
        while line.opcode in _SAME_ELEMENTS or self._is_layout_fusion(line):
            before = computation.operand(line, 0)
            if before is None:
                break
            line = before
        return line

    def _is_layout_fusion(self, line: Instruction) -> bool:
        fused = self._program.fused(line)
        return fused is not None and _only_changes_layout(fused)


def _bytes_read_again(line: Instruction, computation: Computation) -> float:
    """Returns the bytes of a kernel's cost estimate beyond its operands and results."""
    arrays = [*computation.operand_arrays(line), *line.arrays]
    once = sum(array.num_bytes for array in arrays)
    return max(kernel_estimate(line).get("bytes_accessed", 0.0) - once, 0.0)


def _is_free(line: Instruction) -> bool:
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return True
    target = line.attribute(r'custom_call_target="([^"]*)"')
    return line.opcode == "custom-call" and target == _NEW_BUFFER


def _of_operation(
    opcode: str, operands: Sequence[Sequence[Array]], results: Sequence[Array]
) -> Traffic:
    """Returns the traffic of an operation that is not fused."""
    if opcode in _UPDATES:
        read = sum(map(_hbm_bytes, operands[1:]))
        if not results[0].in_hbm:
            return Traffic(read)
        update = operands[_UPDATES[opcode]]
        return Traffic(read + _bytes_updated_from(opcode, operands), _stored_bytes(update))

    read = 0.0
    for place, arrays in enumerate(operands):
        whole = _hbm_bytes(arrays)
        if opcode in _SLICES and place == 0:
            whole = min(whole, _stored_bytes(results))
        read += whole
    return Traffic(read, _hbm_bytes(results))


def _bytes_updated_from(opcode: str, operands: Sequence[Sequence[Array]]) -> float:
    """Returns the bytes of the updated array that an update reads: a scatter may add to them."""
    return _stored_bytes(operands[_UPDATES[opcode]]) if opcode == "scatter" else 0.0


def _operands(computation: Computation, line: Instruction) -> list[Sequence[Array]]:
    """Returns the arrays of each operand."""
    return [_operand_arrays(computation, name) for name in line.operands]


def _operand_arrays(computation: Computation, name: str) -> Sequence[Array]:
    if name not in computation.instructions:
        return ()
    return computation.instructions[name].arrays


def _stored_bytes(arrays: Sequence[Array]) -> float:
    return sum(array.stored_bytes for array in arrays)


def _hbm_bytes(arrays: Sequence[Array]) -> float:
    return sum(array.stored_bytes for array in arrays if array.in_hbm)


def _only_changes_layout(fused: Computation) -> bool:
    """Whether a fusion only copies, transposes or reshapes its one parameter."""
    opcodes = {line.opcode for line in fused.instructions.values()}
    return len(fused.parameters) == 1 and opcodes <= {"parameter", *_SAME_ELEMENTS}
