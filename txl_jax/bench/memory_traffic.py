"""Arrays that a compiled program writes, and bytes that it moves, by XLA's count or from its HLO text.

An instruction reads its operands from memory and writes its results; what happens within a fusion stays in registers
or caches. Of a kernel (a custom call) operands and results count once, however often it reads them. XLA's own count
(`compiled.cost_analysis()`) follows such rules, but a loop's body counts once; its compiler for GPUs gives none.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from txl_jax.bench import hlo_text

# They name, regroup or reinterpret arrays, or run computations whose instructions count themselves.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "after-all", "partition-id"),
    *("while", "conditional", "call", "opt-barrier", "async-start", "async-update"),
}
_SLICES = ("dynamic-slice", "slice", "gather")  # They read of their operand what they return.
_COPIES = {"copy-start": 0, "slice-start": 1}  # Which of their results is the copy; others are the original, a counter.
_JOINED = 'custom_call_target="ConcatBitcast"'  # Slices that the TPU's compiler has put side by side already.
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_INDEX = re.compile(r"parameter\((\d+)\)")


class Array(NamedTuple):
    """Element type and shape of an array, as XLA writes them."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes; a truth value (pred) has one."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * int(bits[0] if bits else 8) // 8


class _Instruction(NamedTuple):
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def is_free(self) -> bool:
        return self.opcode in _FREE or self.opcode.endswith("-done") or _JOINED in self.line

    @property
    def n_bytes(self) -> int:
        return sum(array.n_bytes for array in self.results)


_Instructions = Mapping[str, _Instruction]


def arrays_written(text: str) -> Iterator[Array]:
    """Yields the arrays that a program writes to memory, results included; arguments are not among them."""
    for instructions, _ in _executed(text):
        for one in instructions.values():
            if not one.is_free:
                yield from one.results if one.opcode not in _COPIES else [one.results[_COPIES[one.opcode]]]


def bytes_of_program(compiled: Any) -> int:
    """Returns the bytes that one call of a compiled program reads and writes.

    By XLA's count, unless it has none, or the program has a loop, whose body counts once, or a kernel, of which it
    counts what its author gives (on TPUs; for a layer with 64 rows that was less than its arguments).
    """
    text, costs = compiled.as_text(), compiled.cost_analysis() or {}
    given = costs.get("bytes accessed")
    if given is None or " while(" in text or "tpu_custom_call" in text:
        return bytes_accessed(text)
    return int(given)


def bytes_accessed(text: str) -> int:
    """Returns the bytes that one call of a program reads and writes; a loop counts as often as it runs."""
    computations = {name: _parse(lines) for name, lines in hlo_text.computations(text).items()}
    return sum(
        times * _bytes_of(one, instructions, computations)
        for instructions, times in _executed(text)
        for one in instructions.values()
        if not one.is_free
    )


def _executed(text: str) -> Iterator[tuple[_Instructions, int]]:
    """Yields the instructions of each computation that is executed, fusions aside, and how often it is."""
    computations = hlo_text.computations(text)
    for name, _, times in hlo_text.executed(computations, hlo_text.entry(text), fusions=False):
        yield _parse(computations[name]), times


def _parse(lines: list[str]) -> _Instructions:
    """Returns the instructions of a computation by name."""
    found = {}
    for line in lines:
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        types, rest = _split_type(match[3])
        opcode = _OPCODE.match(rest)
        if opcode:
            results = tuple(Array(kind, _dimensions(sizes)) for kind, sizes in _ARRAY.findall(types))
            operands = tuple(re.findall(r"%([\w.\-]+)", _parenthesis(rest)))
            found[match[2]] = _Instruction(match[2], opcode[1], results, operands, line, bool(match[1]))
    return found


def _split_type(text: str) -> tuple[str, str]:
    """Splits `(f32[2]{0}, s32[]) fusion(...)` or `f32[2]{0:T(8)} add(...)` behind the type."""
    if not text.startswith("("):
        types, _, rest = text.partition(" ")
        return types, rest
    inside = _parenthesis(text)
    return inside, text[len(inside) + 2 :]


def _parenthesis(text: str) -> str:
    """Returns what is within the first parenthesis, which may have others in it."""
    start = text.index("(") + 1
    depth, end = 1, start
    while depth and end < len(text):
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    return text[start : end - 1]


def _dimensions(sizes: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, sizes.split(","))))


def _bytes_of(one: _Instruction, around: _Instructions, computations: Mapping[str, _Instructions]) -> int:
    """Returns the bytes that an instruction reads and writes."""
    operands = [around[name].n_bytes for name in one.operands if name in around]
    if one.opcode in _SLICES:
        return 2 * one.n_bytes
    if one.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if one.opcode in _COPIES:
        return 2 * one.results[_COPIES[one.opcode]].n_bytes
    inner = re.search(r"calls=%?([\w.\-]+)", one.line)
    if one.opcode == "fusion" and inner and inner[1] in computations:
        return _bytes_of_fusion(one, operands, computations[inner[1]])
    return sum(operands) + one.n_bytes


def _bytes_of_fusion(one: _Instruction, operands: list[int], inner: _Instructions) -> int:
    """Returns the bytes that a fusion reads and writes: of what it only slices, or updates in place, the slices."""
    read = 0
    for each in inner.values():
        index = _INDEX.search(each.line) if each.opcode == "parameter" else None
        if index and int(index[1]) < len(operands):
            parts = [_part_read(each, user, inner) for user in _users(each, inner)]
            whole = operands[int(index[1])]
            read += whole if None in parts else min(whole, sum(filter(None, parts)))
    return read + sum(_written(each, inner) for each in inner.values() if each.is_root)


def _users(one: _Instruction, inner: _Instructions) -> Iterator[_Instruction]:
    """Yields the instructions that use a result, as it is or as a bitcast."""
    for user in inner.values():
        if one.name in user.operands:
            if user.opcode == "bitcast":
                yield from _users(user, inner)
            else:
                yield user


def _part_read(one: _Instruction, user: _Instruction, inner: _Instructions) -> int | None:
    """Returns the bytes that an instruction reads of a parameter; None: all of it."""
    if user.opcode in _SLICES:
        return user.n_bytes
    if user.opcode == "dynamic-update-slice" and _behind_bitcasts(user.operands[0], inner) is one:
        return 0
    return None


def _written(one: _Instruction, inner: _Instructions) -> int:
    """Returns the bytes that a fusion writes for (a part of) its result."""
    one = _behind_bitcasts(one.name, inner)
    if one.opcode == "tuple":
        return sum(_written(inner[name], inner) for name in one.operands)
    return inner[one.operands[1]].n_bytes if one.opcode == "dynamic-update-slice" else one.n_bytes


def _behind_bitcasts(name: str, inner: _Instructions) -> _Instruction:
    one = inner[name]
    return _behind_bitcasts(one.operands[0], inner) if one.opcode == "bitcast" and one.operands else one
