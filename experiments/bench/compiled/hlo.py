"""Parses the text of a compiled program: XLA's optimized HLO from `compiled.as_text()`.

A program is a set of computations, a computation a list of instructions, and an instruction has a
result of one or more arrays:

    %fusion.7 = bf16[22,512]{1,0:T(8,128)(2,1)S(1)} fusion(%p, %q), kind=kLoop, calls=%computation

The braces after a shape are its layout: the axes from the fastest to the slowest, the tile that
the array is stored in (T), and the memory that it is in (S). Without S it is the device's main
memory (HBM). S(1) is a TPU's vector memory. The GPU compiler writes only the axes.
"""

import dataclasses
import functools
import math
import re

from experiments.bench.compiled.source_lines import short_path, source_lines

# Bits of an element. Tokens, and types that are not listed, are not data.
_BITS = {
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "pred": 8,
    "s8": 8,
    "u8": 8,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "f8e8m0fnu": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\((.*)$")
# A comment that the printer writes into long tuples.
_TUPLE_INDEX = re.compile(r"/\*index=\d+\*/")
# From a slice that is fetched, over its second half and the join of slices, to the user of it.
_LONGEST_CHAIN = 6
_OPENING = "([{"
_CLOSING = ")]}"


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape, dtype and location of an array."""

    dtype: str
    dims: tuple[int, ...]
    # Axes from the fastest to the slowest, or empty if the text has no layout.
    minor_to_major: tuple[int, ...] = ()
    # Lengths of a tile, from its slowest axis to the fastest, or empty if the array is not tiled.
    tile: tuple[int, ...] = ()
    # Number of the memory that the array is in. 0 is HBM.
    memory: int = 0

    @property
    def in_hbm(self) -> bool:
        """Whether the array is in the device's main memory."""
        return self.memory == 0

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @functools.cached_property
    def num_bytes(self) -> float:
        """Bytes of the elements, without padding."""
        return self.size * _BITS[self.dtype] / 8

    @functools.cached_property
    def stored_bytes(self) -> float:
        """Bytes of the array in memory: each tiled axis is padded to whole tiles.

        For example, bf16[22,8,512,64] in tiles of 8 x 128 takes twice the bytes of its elements.
        """
        lengths = [self.dims[axis] for axis in self.minor_to_major]
        for place, tile in enumerate(reversed(self.tile)):
            if place < len(lengths):
                lengths[place] = math.ceil(lengths[place] / tile) * tile
        if not lengths:
            return self.num_bytes
        return math.prod(lengths) * _BITS[self.dtype] / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    # The result, with the tuples in it flattened.
    arrays: tuple[Array, ...]
    # Names of the instructions whose results it reads.
    operands: tuple[str, ...]
    # The text between the brackets: a parameter's number, a constant's value.
    argument: str
    # The rest of the line: `calls=%computation, metadata={op_name="..."}`.
    attributes: str
    is_root: bool

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a regular expression that is searched in the attributes."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def called(self, attribute: str = "calls") -> str | None:
        """Returns the name of a computation that the instruction calls, if it has one."""
        return self.attribute(rf"\b{attribute}=%?([\w.\-]+)")

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of the operation: modules, transformations, primitive."""
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclasses.dataclass(eq=False)
class Computation:
    """A function of the program."""

    name: str
    # Instructions by name, in the order of the text, in which a scheduled program runs them.
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(line for line in self.instructions.values() if line.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        return {
            int(line.argument): line
            for line in self.instructions.values()
            if line.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """The users of each instruction's result by name, with the index of the operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for line in self.instructions.values():
            for place, operand in enumerate(line.operands):
                users.setdefault(operand, []).append((line, place))
        return users

    def operand(self, line: Instruction, place: int) -> Instruction | None:
        """Returns the instruction whose result is an operand, or None if it has no such operand."""
        if place >= len(line.operands):
            return None
        return self.instructions.get(line.operands[place])

    def operand_arrays(self, line: Instruction) -> list[Array]:
        """Returns the arrays of all operands, one after the other."""
        arrays: list[Array] = []
        for name in line.operands:
            if name in self.instructions:
                arrays.extend(self.instructions[name].arrays)
        return arrays


@dataclasses.dataclass(eq=False)
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    # Name of the computation that a call of the program runs.
    entry: str
    # Number of devices that run the program together, each its own part.
    num_devices: int
    # File and line of Python code by the number of a stack frame, if the text contains them.
    source_lines: dict[str, str]

    def fused(self, line: Instruction) -> Computation | None:
        """Returns the computation of a fusion, or None for other instructions."""
        if line.opcode != "fusion":
            return None
        return self.computations[line.called() or ""]

    def source_of(self, line: Instruction, computation: Computation) -> tuple[str, str]:
        """Returns the file and line of Python code of an instruction, and JAX's name of it.

        Copies and fetches that the compiler has added get the source of the first instruction that
        uses their result. Both texts are empty if it has no source either.
        """
        for _ in range(_LONGEST_CHAIN):
            source = self._own_source(line)
            if source:
                return source, line.op_name
            users = computation.users[line.name]
            if not users:
                break
            line = users[0][0]
        return "", ""

    def _own_source(self, line: Instruction) -> str:
        file = line.attribute(r'source_file="([^"]*)"')
        if file:
            number = line.attribute(r"source_line=(\d+)")
            return f"{short_path(file)}:{number}"
        frame = line.attribute(r"stack_frame_id=(\d+)")
        return self.source_lines.get(frame or "", "")


def parse(text: str) -> Program:
    """Reads the text of a compiled program.

    Raises:
      ValueError: If the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for row in text.splitlines():
        header = _COMPUTATION.match(row)
        if header:
            current = Computation(header[2], {})
            computations[current.name] = current
            if header[1]:
                entry = current.name
        elif row.startswith("}"):
            current = None
        elif current is not None:
            line = _instruction(row)
            if line is not None:
                current.instructions[line.name] = line
    if not entry:
        raise ValueError("the text must have an ENTRY computation, got none")
    return Program(computations, entry, _num_devices(text), source_lines(text))


def arrays_of(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape's text, with the tuples in it flattened."""
    return tuple(
        _array(dtype, dims, layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
        if dtype in _BITS
    )


@functools.cache
def _array(dtype: str, dims: str, layout: str) -> Array:
    # A dimension whose length is known only as a bound is written `<=8`.
    lengths = _integers(dims.replace("<=", ""))
    axes = _integers(layout.partition(":")[0])

    # Only the first tile determines the padding. The tiles after it order the content of a tile.
    # A star joins an axis of the tile with the next one, so the axis itself is not padded.
    tile = re.search(r"T\(([\d,*]+)\)", layout)
    tile_lengths = _integers(tile[1].replace("*", "1")) if tile else ()
    memory = re.search(r"S\((\d+)\)", layout)
    return Array(dtype, lengths, axes, tile_lengths, int(memory[1]) if memory else 0)


def _integers(text: str) -> tuple[int, ...]:
    """Reads integers with commas between them."""
    return tuple(int(number) for number in text.split(",") if number)


def _instruction(row: str) -> Instruction | None:
    """Parses an instruction. Returns None for other lines."""
    match = _INSTRUCTION.match(row)
    if not match:
        return None
    shape, rest = _split_shape(_TUPLE_INDEX.sub("", match[3]))
    call = _OPCODE.match(rest)
    if not call:
        return None
    argument, attributes = _split_brackets(call[2])
    operands: tuple[str, ...] = ()
    if call[1] not in ("parameter", "constant"):
        operands = tuple(re.findall(r"%([\w.\-]+)", argument))
    return Instruction(
        name=match[2],
        opcode=call[1],
        arrays=arrays_of(shape),
        operands=operands,
        argument=argument.strip(),
        attributes=attributes,
        is_root=bool(match[1]),
    )


def _split_shape(text: str) -> tuple[str, str]:
    """Splits `SHAPE opcode(...), ...` after the shape, which may be a tuple."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    inside, rest = _split_brackets(text[1:])
    return inside, rest.strip()


def _split_brackets(text: str) -> tuple[str, str]:
    """Splits text at the bracket that closes the one opened just before it. Drops the bracket."""
    depth = 1
    for place, letter in enumerate(text):
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
            if depth == 0:
                return text[:place], text[place + 1 :]
    return text, ""


def _num_devices(text: str) -> int:
    """Returns the number of devices from the first line of a program."""
    head = text[: text.find("\n")]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return math.prod(int(count) for count in counts)
