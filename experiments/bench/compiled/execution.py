"""Determines which instructions of a compiled program run, and how often.

- The number of rounds of a `while` loop comes from the compiler (`known_trip_count`), or from its
  condition: a counter below a constant. The rounds of nested loops multiply.
- If the number of rounds depends on data, it is assumed: `rounds` for the outermost of these loops
  (tokens of generation, a tail of the adaptive softmax), and one for loops nested in them.
- The computation of a `call` or an asynchronous operation runs once.
- Every branch of a `conditional` counts with an equal fraction.
- A fusion is one instruction: its computation is not visited.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from experiments.bench.compiled.hlo import Computation, Instruction, Program

_COPIES = ("bitcast", "copy", "convert", "reshape")


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction that runs."""

    line: Instruction
    computation: Computation
    # How often it runs in a call of the program. For a branch of a conditional this is a fraction.
    times: float
    # Whether it is in a loop whose number of rounds was assumed.
    is_assumed: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `while` loop that runs."""

    line: Instruction
    computation: Computation
    body: Computation
    # How often the loop begins in a call of the program.
    times: float
    # Number of rounds each time.
    rounds: int
    # Whether the number of rounds depends on data, and `rounds` was assumed.
    is_assumed: bool


def executions(program: Program, *, rounds: int = 1) -> Iterator[Execution | Loop]:
    """Yields the instructions and loops that run in a call of the program.

    A loop comes before the instructions of its body.

    Args:
      program: The compiled program.
      rounds: Assumed rounds of the outermost loops whose number of rounds depends on data.
    """
    entry = program.computations[program.entry]
    yield from _walk(program, entry, 1.0, rounds, is_assumed=False)


def _walk(
    program: Program, computation: Computation, times: float, rounds: int, *, is_assumed: bool
) -> Iterator[Execution | Loop]:
    for line in computation.instructions.values():
        if line.opcode == "while":
            loop = _loop(program, computation, line, times, rounds)
            yield loop
            rounds_within = 1 if loop.is_assumed else rounds
            yield from _walk(
                program,
                loop.body,
                times * loop.rounds,
                rounds_within,
                is_assumed=is_assumed or loop.is_assumed,
            )
            continue

        callees = _callees(line)
        if not callees:
            yield Execution(line, computation, times, is_assumed)
        for name in callees:
            called = program.computations[name]
            share = times / len(callees)
            yield from _walk(program, called, share, rounds, is_assumed=is_assumed)


def _callees(line: Instruction) -> list[str]:
    """Returns the computations that an instruction may run, one of them each time."""
    if line.opcode == "call":
        return [line.called("to_apply") or line.called() or ""]
    if line.opcode == "async-start":
        name = line.called()
        return [name] if name else []
    if line.opcode == "conditional":
        branches = line.attribute(r"branch_computations=\{([^}]*)\}")
        if branches:
            return re.findall(r"%?([\w.\-]+)", branches)
        return [line.called("true_computation") or "", line.called("false_computation") or ""]
    return []


def _loop(
    program: Program, computation: Computation, line: Instruction, times: float, rounds: int
) -> Loop:
    body = program.computations[line.called("body") or ""]
    condition = program.computations[line.called("condition") or ""]
    known = line.attribute(r'"?known_trip_count"?:\{"n":"(\d+)"')
    counted = int(known) if known else _rounds_by_condition(program, condition, body)
    return Loop(
        line,
        computation,
        body,
        times,
        rounds=rounds if counted is None else counted,
        is_assumed=counted is None,
    )


def _rounds_by_condition(program: Program, condition: Computation, body: Computation) -> int | None:
    """Returns the rounds of a loop that runs while a counter from 0 is below a constant.

    Returns None if the loop has another condition.
    """
    result = condition.root
    fused = program.fused(result)
    comparison = result if fused is None else fused.root
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes:
        return None

    sides: list[Instruction | None] = []
    for name in comparison.operands:
        if fused is None:
            sides.append(_behind_copies(condition, name))
        else:
            sides.append(_behind_parameter(condition, result, fused, name))
    counter, limit = sides
    if counter is None or counter.opcode != "get-tuple-element" or limit is None:
        return None
    rounds = _constant(limit)
    return None if rounds is None else math.ceil(rounds / _counter_step(counter, body))


def _behind_parameter(
    computation: Computation, call: Instruction, fused: Computation, name: str
) -> Instruction | None:
    """Returns the source of a copied value in a fusion: an instruction in it, or an operand."""
    line = _behind_copies(fused, name)
    if line is not None and line.opcode == "parameter":
        return _behind_copies(computation, call.operands[int(line.argument)])
    return line


def _behind_copies(computation: Computation, name: str) -> Instruction | None:
    """Returns the instruction that a value is a copy of."""
    line = computation.instructions.get(name)
    while line is not None and line.opcode in _COPIES:
        line = computation.operand(line, 0)
    return line


def _constant(line: Instruction | None) -> int | None:
    """Returns the value of a constant, or None if it is not a positive integer."""
    if line is None or line.opcode != "constant" or not line.argument.isdecimal():
        return None
    return int(line.argument) or None


def _counter_step(counter: Instruction, body: Computation) -> int:
    """Returns the number that the body adds to the counter in a round, or 1 if it is unknown."""
    index = int(counter.attribute(r"index=(\d+)") or 0)
    added = body.operand(body.root, index)
    if added is None or added.opcode != "add":
        return 1
    for name in added.operands:
        step = _constant(_behind_copies(body, name))
        if step is not None:
            return step
    return 1
