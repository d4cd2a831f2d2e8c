"""Arithmetic of an instruction: floating-point operations of matmuls, and integer operations.

FLOPs are counted for dots and convolutions, in fusions too, at two per multiply-add. In a
convolution, only multiplications with an element of the input (not of its padding) are counted,
because the TPU compiler writes batched dots as convolutions with much padding. A kernel (a custom
call) counts with the work that `kernels` finds. Elementwise operations, exponentials and reductions
in floating point are not counted.

Integer operations are counted for elementwise 32-bit additions, multiplications, shifts and bitwise
operations, one per element. Random bits and hashes consist of them.
"""

import functools
import math
import re

import numpy as np

from experiments.bench.compiled.hlo import Array, Computation, Instruction, Program
from experiments.bench.compiled.kernels import is_kernel, kernel_work

_INTEGER_DTYPES = ("s32", "u32")
_INTEGER_OPCODES = {
    "add",
    "and",
    "multiply",
    "not",
    "or",
    "shift-left",
    "shift-right-arithmetic",
    "shift-right-logical",
    "subtract",
    "xor",
}


class WorkOf:
    """Counts the arithmetic of a program's instructions."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._flops: dict[str, float] = {}
        self._integer_ops: dict[str, float] = {}

    def flops(self, line: Instruction, computation: Computation) -> float:
        """Returns the floating-point operations of an instruction."""
        if line.opcode == "dot":
            return _dot_flops(line, computation)
        if line.opcode == "convolution":
            return _convolution_flops(line, computation)
        if line.opcode == "custom-call":
            return _custom_call_flops(line, computation)
        fused = self._program.fused(line)
        if fused is None:
            return 0.0
        if fused.name not in self._flops:
            parts = [self.flops(part, fused) for part in fused.instructions.values()]
            self._flops[fused.name] = sum(parts)
        return self._flops[fused.name]

    def integer_ops(self, line: Instruction) -> float:
        """Returns the 32-bit integer operations of an instruction."""
        if line.opcode in _INTEGER_OPCODES and line.arrays[0].dtype in _INTEGER_DTYPES:
            return line.arrays[0].size
        if is_kernel(line):
            return kernel_work(line).integer_ops
        fused = self._program.fused(line)
        if fused is None:
            return 0.0
        if fused.name not in self._integer_ops:
            parts = [self.integer_ops(part) for part in fused.instructions.values()]
            self._integer_ops[fused.name] = sum(parts)
        return self._integer_ops[fused.name]


def _dot_flops(line: Instruction, computation: Computation) -> float:
    left, _ = _two_operands(line, computation)
    axes = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2 * line.arrays[0].size * _product(left, axes)


def _custom_call_flops(line: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of a kernel or of a GPU library's matmul (cuBLAS), otherwise 0."""
    if is_kernel(line):
        return kernel_work(line).flops
    axes = line.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    if axes is None:
        return 0.0
    left, _ = _two_operands(line, computation)
    return 2 * line.arrays[0].size * _product(left, axes.replace('"', ""))


def _convolution_flops(line: Instruction, computation: Computation) -> float:
    left, right = _two_operands(line, computation)
    result = line.arrays[0]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    assert labels, f"a convolution must have labels, got {line.attributes}"

    # Each spatial axis (a number in the labels) has a window that moves over it.
    windows = _windows(line.attribute(r"window=\{([^}]*)\}") or "")
    num_pairs = 1
    for axis in range(len(labels[1]) - 2):
        window = {name: values[axis] for name, values in windows.items()}
        num_pairs *= _window_pairs(
            left.dims[labels[1].index(str(axis))],
            result.dims[labels[3].index(str(axis))],
            size=int(window.get("size", 1)),
            stride=int(window.get("stride", 1)),
            padding=int(window.get("pad", "0_0").split("_")[0]),
            left_dilation=int(window.get("lhs_dilate", 1)),
            right_dilation=int(window.get("rhs_dilate", 1)),
        )
    num_outputs = result.dims[labels[3].index("b")] * result.dims[labels[3].index("f")]
    num_inputs = right.dims[labels[2].index("i")]
    return 2 * num_pairs * num_outputs * num_inputs


def _windows(text: str) -> dict[str, list[str]]:
    """Reads `size=3x3 pad=1_1x1_1` as a list of values, one per spatial axis, for each name."""
    windows: dict[str, list[str]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        windows[name] = values.split("x")
    return windows


@functools.cache
def _window_pairs(
    num_inputs: int,
    num_outputs: int,
    *,
    size: int,
    stride: int,
    padding: int,
    left_dilation: int,
    right_dilation: int,
) -> int:
    """Returns the number of pairs of an output and a window position with an input element."""
    outputs = np.arange(num_outputs)[:, None] * stride
    places = np.arange(size)[None, :] * right_dilation
    inputs = outputs + places - padding
    in_range = (inputs >= 0) & (inputs <= (num_inputs - 1) * left_dilation)
    return int(np.count_nonzero(in_range & (inputs % left_dilation == 0)))


def _two_operands(line: Instruction, computation: Computation) -> tuple[Array, Array]:
    left = computation.instructions[line.operands[0]]
    right = computation.instructions[line.operands[1]]
    return left.arrays[0], right.arrays[0]


def _product(array: Array, axes: str) -> int:
    """Returns the product of the lengths of axes, whose numbers are separated by commas."""
    return math.prod(array.dims[int(axis)] for axis in axes.split(",") if axis.strip())
