"""Work of kernels (Pallas custom calls on TPUs), which the compiler does not analyze.

A kernel comes with a cost estimate by its author, and with its code (Mosaic's MLIR) and grid. The
code gives the maximum FLOPs and integer operations of a grid step, including steps that the kernel
skips, such as a masked tile. A kernel therefore counts with the FLOPs of its estimate, but at most
the FLOPs of its code times its grid. The integer operations, and the FLOPs of matrix units, count
with the same fraction. Matrix units compute 128 columns at a time: a head of 64 features costs as
much as a head of 128.

A kernel that contains loops, or whose code cannot be read, counts with its estimate only.
"""

import base64
import functools
import json
import math
import re
from typing import NamedTuple

from jax.experimental.mosaic.dialects import tpu
from jaxlib.mlir import ir

from experiments.bench.compiled.hlo import Instruction

# Columns of a matrix unit, and lanes of a vector register.
LANES = 128
_INTEGER_OPERATION = re.compile(
    r'arith\.(?:addi|subi|muli|xori|ori|andi|shli|shrui|shrsi)".* -> vector<([\dx]+)xi32>'
)
_MATMUL = re.compile(
    r'tpu\.matmul".* : \(vector<([\dx]+)x\w+>, vector<([\dx]+)x\w+>, .* -> vector<([\dx]+)x\w+>'
)


class KernelWork(NamedTuple):
    """Work of a kernel each time that it runs."""

    # Floating-point operations of its matmuls.
    flops: float = 0.0
    # The same with sizes below 128 padded, as matrix units compute them.
    padded_flops: float = 0.0
    # 32-bit integer operations on vectors.
    integer_ops: float = 0.0


def is_kernel(line: Instruction) -> bool:
    """Whether an instruction is a kernel."""
    return line.opcode == "custom-call" and "tpu_custom_call" in line.attributes


def kernel_estimate(line: Instruction) -> dict[str, float]:
    """Returns a kernel's own cost estimate: flops, transcendentals, bytes_accessed.

    Returns an empty dictionary if the instruction is not a kernel, or has no estimate.
    """
    if line.opcode != "custom-call":
        return {}
    text = line.attribute(r'"cost_estimate":(\{[^{}]*\})')
    if text is None:
        return {}
    return {name: float(value) for name, value in json.loads(text).items()}


def kernel_work(line: Instruction) -> KernelWork:
    """Returns the work of a kernel: its estimate, checked against its code and its grid."""
    estimated = kernel_estimate(line).get("flops", 0.0)
    at_most = grid_work(line)
    if at_most is None or not at_most.flops:
        return KernelWork(estimated, estimated)
    fraction = min(estimated / at_most.flops, 1.0)
    return KernelWork(
        at_most.flops * fraction,
        at_most.padded_flops * fraction,
        at_most.integer_ops * fraction,
    )


def grid_work(line: Instruction) -> KernelWork | None:
    """Returns the work of a kernel that skips no grid steps, or None if its code cannot be read.

    This is the work of its matmuls and integer operations, times the number of grid steps.
    """
    body = line.attribute(r'"body":"([^"]*)"')
    return _grid_work(body) if body else None


@functools.cache
def _grid_work(body: str) -> KernelWork | None:
    code = _code(body)
    bounds = re.search(r"iteration_bounds = array<i64: ([\d, ]*)>", code)
    if bounds is None or "scf.for" in code or "scf.while" in code:
        return None
    steps = math.prod(int(length) for length in bounds[1].split(","))

    flops = 0.0
    padded_flops = 0.0
    for left, right, result in _MATMUL.findall(code):
        # [m, k] x [k, n] -> [m, n]: the three sizes multiply to (m k n) squared.
        products = math.isqrt(_size(left) * _size(right) * _size(result))
        rows, columns = (int(length) for length in result.split("x"))
        contracted = products // (rows * columns)
        flops += 2 * products
        padded_flops += 2 * rows * _filled_up(columns) * _filled_up(contracted)

    integer_ops = sum(_size(shape) for shape in _INTEGER_OPERATION.findall(code))
    return KernelWork(flops * steps, padded_flops * steps, float(integer_ops * steps))


def _code(body: str) -> str:
    """Returns a kernel's code as text, or "" if this jaxlib cannot read it."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context:
        try:
            return str(ir.Module.parse(base64.b64decode(body)))
        except (ir.MLIRError, ValueError):
            return ""


def _size(shape: str) -> int:
    """Returns the number of elements of a shape such as `512x64`."""
    return math.prod(int(length) for length in shape.split("x"))


def _filled_up(length: int) -> int:
    return math.ceil(length / LANES) * LANES
