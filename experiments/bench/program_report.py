"""Prints the cost of a compiled program, for `experiments.bench.estimate`."""

import re
from collections.abc import Iterator

import jax.numpy as jnp

from experiments.bench.chips import Chip
from experiments.bench.compiled.cost import ProgramCost
from experiments.bench.timing import print_table
from txl_jax.runs.build import Built

# Name of a step of each task.
_STEPS = {"training": "training step", "evaluation": "segment", "generation": "token"}
_NUM_MOVERS = 5
# Parts of JAX's names that tell how a program is run, not what it computes.
_RUNNING = ("while", "body", "cond", "branch_1_fun", "closed_call", "checkpoint", "remat")


def print_cost(cost: ProgramCost, built: Built, task: str, chip: Chip) -> None:
    """Prints a table with the cost of a task's step, and the lines that move the most bytes."""
    step = _STEPS[task]
    print()
    print_table(f"a {step}, per device | amount | least time", _rows(cost, built, task, chip))
    print()
    print_table("most bytes in memory | line | operation", _mover_rows(cost))
    if cost.assumed_loops and task != "generation":
        print(
            f"\nLoops whose rounds depend on data, with one round counted for each: "
            f"{len(cost.assumed_loops)}."
        )
    print(flush=True)


def textbook_sent_bytes(built: Built) -> float:
    """Returns the bytes that a device sends in a training step according to the textbook.

    On `fsdp`, weights are gathered twice (forward, backward) and gradients are scattered once, in
    the compute dtype. On `data`, the gradients are then all-reduced. On `tensor`, the activations
    [B, L, D] are all-reduced twice in each layer and direction.
    """
    config = built.config
    itemsize = jnp.dtype(config.model.dtype).itemsize
    sizes = dict(built.mesh.shape)
    data = sizes["data"]
    fsdp = sizes["fsdp"]
    tensor = sizes["tensor"]

    parameter_bytes = itemsize * built.num_parameters / tensor
    sent = 3 * parameter_bytes * (fsdp - 1) / fsdp
    sent += 2 * parameter_bytes / fsdp * (data - 1) / data

    tokens = config.train.batch_size * config.train.segment_len / (data * fsdp)
    activation_bytes = itemsize * tokens * config.model.d_model
    sent += 4 * config.model.n_layer * 2 * activation_bytes * (tensor - 1) / tensor
    return sent


def _rows(cost: ProgramCost, built: Built, task: str, chip: Chip) -> Iterator[list[str]]:
    peaks = chip.peaks
    matmuls = f"{_amount(cost.flops)}FLOP"
    if cost.kernel_flops:
        matmuls += f", {_amount(cost.kernel_flops)}FLOP of them in kernels"
    yield ["matmuls", matmuls, _ms(cost.flops / peaks.flops)]
    seconds = cost.hbm_bytes / peaks.hbm_bytes
    yield ["bytes in memory", f"{_amount(cost.hbm_bytes)}B", _ms(seconds)]
    seconds = cost.integer_ops / peaks.integer_ops
    yield ["integer operations", _amount(cost.integer_ops).strip(), _ms(seconds)]
    yield ["roofline sum", f"bound: {cost.bound(peaks)}", _ms(cost.roofline_seconds(peaks))]

    kept = [stack.array for stack in cost.stacks if not stack.is_backward]
    if kept:
        total = sum(array.stored_bytes for array in kept)
        largest = max(kept, key=lambda array: array.stored_bytes)
        yield ["kept by forward loops", f"{_amount(total)}B, the largest {largest}", ""]
    if built.mesh.size > 1:
        yield from _sent_rows(cost, built, task)


def _sent_rows(cost: ProgramCost, built: Built, task: str) -> Iterator[list[str]]:
    sent = f"{_amount(cost.sent_bytes)}B"
    if task == "training":
        textbook = textbook_sent_bytes(built)
        sent += f", {cost.sent_bytes / textbook:.2f} x the textbook's {_amount(textbook)}B"
    yield ["sent to other devices", sent, ""]
    for kind, total in cost.sent_by_kind().items():
        amount = f"{_amount(total.sent)}B in {total.times:,.0f}, the largest {total.largest}"
        yield [f"- {kind}", amount, ""]


def _mover_rows(cost: ProgramCost) -> Iterator[list[str]]:
    for mover in cost.movers(_NUM_MOVERS):
        source = mover.source or "added by the compiler"
        yield [f"{_amount(mover.hbm_bytes)}B", source, _brief(mover.op_name)]


def _brief(op_name: str) -> str:
    """Returns JAX's name of an operation without the function, and without loops and calls."""
    parts = re.sub(r"^jit\([^/]*\)/", "", op_name).split("/")
    return "/".join(part for part in parts if part not in _RUNNING)


def _amount(number: float) -> str:
    """Formats a number with three digits and a prefix, such as "28.4 G"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            # The alternate form keeps zeros, and a point behind a whole number.
            digits = f"{number / size:#.3g}".rstrip(".")
            return f"{digits} {prefix}"
    return f"{number:.0f} "


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
