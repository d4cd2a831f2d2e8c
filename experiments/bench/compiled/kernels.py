"""Kernels (custom calls of Pallas), which the compiler does not look into.

A kernel carries a cost estimate that its author wrote: FLOPs, transcendentals and bytes.
"""

import json

from experiments.bench.compiled.hlo import Instruction


def is_kernel(line: Instruction) -> bool:
    """Whether an instruction is a kernel."""
    return line.opcode == "custom-call" and "tpu_custom_call" in line.attributes


def kernel_cost(line: Instruction) -> dict[str, float]:
    """Returns a kernel's own cost estimate: flops, transcendentals, bytes_accessed.

    Returns an empty dictionary if the instruction is not a kernel, or has no estimate.
    """
    if line.opcode != "custom-call":
        return {}
    text = line.attribute(r'"cost_estimate":(\{[^{}]*\})')
    if text is None:
        return {}
    return {name: float(value) for name, value in json.loads(text).items()}
