"""Finds arrays that a loop fills, one part in each round, such as a scan over layers.

A scan over N layers keeps arrays [N, ...] for its backward pass, and returns others (gradients of
stacked weights, the new memory). In a compiled program they are values that the loop carries, with
N as the first axis, that its body updates.
"""

import dataclasses

from experiments.bench.compiled.execution import Loop
from experiments.bench.compiled.hlo import Array, Computation, Instruction, Program

_UPDATES = ("dynamic-update-slice", "dynamic-update-slice-start")
_SAME_ELEMENTS = ("bitcast", "copy", "copy-done", "copy-start", "dynamic-update-slice-done")


@dataclasses.dataclass(frozen=True)
class FilledArray:
    """An array that a loop fills."""

    array: Array
    # Name of the `while` instruction.
    loop: str
    # JAX's name of the loop.
    op_name: str

    @property
    def is_backward(self) -> bool:
        """Whether the loop is one of the backward pass, by JAX's name of it."""
        return "transpose(" in self.op_name


def stacks_of(program: Program, loop: Loop) -> list[FilledArray]:
    """Returns the arrays that a loop fills, [rounds, ...]."""
    stacks: list[FilledArray] = []
    results = loop.body.root
    if loop.rounds < 2 or results.opcode != "tuple":
        return stacks
    for array, name in zip(loop.line.arrays, results.operands, strict=False):
        is_stacked = len(array.dims) > 1 and array.dims[0] == loop.rounds
        if is_stacked and _is_updated(program, loop.body, loop.body.instructions[name]):
            stacks.append(FilledArray(array, loop.line.name, loop.line.op_name))
    return stacks


def _is_updated(program: Program, body: Computation, line: Instruction) -> bool:
    """Whether a value is another one with a slice updated."""
    while line.opcode in (*_SAME_ELEMENTS, "get-tuple-element"):
        before = body.operand(line, 0)
        if before is None:
            return False
        line = before
    fused = program.fused(line)
    if fused is not None:
        return any(part.opcode in _UPDATES for part in fused.instructions.values())
    return line.opcode in _UPDATES
