"""Cost of a compiled program: arithmetic, bytes in HBM, collectives, and the roofline sum.

Everything is counted from the program's text, for one device, with the rounds of its loops, and
divided by the number of steps in a call of the program (a training step, a segment, a token). The
other modules of this package define what is counted: `execution`, `work`, `traffic`, `collectives`,
`kernels`.

The roofline sum adds up, over all instructions that run, the longest of

    bytes in HBM / bandwidth of HBM
    FLOPs / peak of matmuls, of kernels with heads filled up to 128 features
    32-bit integer operations / their peak

as if no instructions overlapped, and none had a fixed cost. Collectives are not included. A real
step overlaps some of the instructions, reaches less than the peaks, and waits for things that are
not counted: the sum is a bound for comparing two programs, not a prediction.
"""

import collections
import dataclasses
import functools
from typing import NamedTuple

from experiments.bench.compiled.collectives import Collective, collectives_of
from experiments.bench.compiled.execution import Execution, Loop, executions
from experiments.bench.compiled.hlo import Array, Instruction, Program, parse
from experiments.bench.compiled.kernels import is_kernel, kernel_work
from experiments.bench.compiled.stacks import FilledArray, stacks_of
from experiments.bench.compiled.traffic import Traffic, TrafficOf
from experiments.bench.compiled.work import WorkOf


class Peaks(NamedTuple):
    """Peak rates of a device per second, from its data sheet."""

    # Floating-point operations of matmuls in bfloat16.
    flops: float
    # Bytes to and from HBM.
    hbm_bytes: float
    # 32-bit integer operations.
    integer_ops: float


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction that runs, and its cost each time."""

    line: Instruction
    # How often it runs in a step.
    times: float
    flops: float
    # The same, but for kernels as matrix units compute them, in tiles of 128.
    padded_flops: float
    integer_ops: float
    traffic: Traffic
    is_kernel: bool
    # Whether it is in a loop whose number of rounds was assumed.
    is_assumed: bool
    # File and line of Python code, or "" if unknown to the compiler.
    source: str
    # JAX's name: modules, transformations, operation.
    op_name: str

    def seconds(self, peaks: Peaks) -> float:
        """Returns the minimum time of the operation in a step."""
        each_time = max(
            self.padded_flops / peaks.flops,
            self.traffic.total / peaks.hbm_bytes,
            self.integer_ops / peaks.integer_ops,
        )
        return self.times * each_time


@dataclasses.dataclass(frozen=True)
class SentBytes:
    """Collectives of one kind in a step."""

    # How often they run.
    times: float = 0.0
    # Bytes that a device sends.
    sent: float = 0.0
    # Largest array among them.
    largest: Array | None = None


@dataclasses.dataclass(frozen=True)
class Mover:
    """The operations of one line of Python code."""

    # File and line, or "" for operations that the compiler added.
    source: str
    # JAX's name of the operation with the most bytes, without the scopes around the model.
    op_name: str
    hbm_bytes: float


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of a step on each device."""

    operations: list[Operation]
    # Each collective, and how often it runs in a step.
    collectives: list[tuple[Collective, float]]
    # Arrays that loops store for other loops to read.
    stacks: list[FilledArray]
    # Loops whose rounds depend on data, so that their number was assumed.
    assumed_loops: list[Loop]

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of matmuls, kernels included."""
        return sum(operation.times * operation.flops for operation in self.operations)

    @functools.cached_property
    def kernel_flops(self) -> float:
        """Floating-point operations of kernels."""
        return sum(
            operation.times * operation.flops
            for operation in self.operations
            if operation.is_kernel
        )

    @functools.cached_property
    def integer_ops(self) -> float:
        """32-bit integer operations, kernels included."""
        return sum(operation.times * operation.integer_ops for operation in self.operations)

    @functools.cached_property
    def hbm_bytes(self) -> float:
        """Bytes read from HBM and written to it, without collectives."""
        return sum(operation.times * operation.traffic.total for operation in self.operations)

    @functools.cached_property
    def sent_bytes(self) -> float:
        """Bytes that a device sends to others."""
        return sum(times * collective.sent for collective, times in self.collectives)

    @functools.cached_property
    def collective_hbm_bytes(self) -> float:
        """Bytes that collectives read from HBM and write to it."""
        return sum(times * collective.hbm_bytes for collective, times in self.collectives)

    def roofline_seconds(self, peaks: Peaks) -> float:
        """Returns the roofline sum."""
        return sum(operation.seconds(peaks) for operation in self.operations)

    def bound(self, peaks: Peaks) -> str:
        """Returns which peak limits the program most: compute, memory or integer."""
        seconds = {
            "compute": self.flops / peaks.flops,
            "memory": self.hbm_bytes / peaks.hbm_bytes,
            "integer": self.integer_ops / peaks.integer_ops,
        }
        return max(seconds, key=lambda name: seconds[name])

    def sent_by_kind(self) -> dict[str, SentBytes]:
        """Returns the collectives by kind, in descending order of bytes sent."""
        kinds: dict[str, SentBytes] = {}
        for collective, times in self.collectives:
            before = kinds.get(collective.kind, SentBytes())
            largest = before.largest
            if largest is None or collective.array.num_bytes > largest.num_bytes:
                largest = collective.array
            kinds[collective.kind] = SentBytes(
                before.times + times, before.sent + times * collective.sent, largest
            )
        return dict(sorted(kinds.items(), key=lambda item: -item[1].sent))

    def movers(self, count: int) -> list[Mover]:
        """Returns the lines of Python code whose operations move the most bytes in HBM."""
        total: dict[str, float] = collections.defaultdict(float)
        largest: dict[str, tuple[float, str]] = {}
        for operation in self.operations:
            moved = operation.times * operation.traffic.total
            total[operation.source] += moved
            name = (moved, operation.op_name)
            largest[operation.source] = max(largest.get(operation.source, name), name)
        sources = sorted(total, key=lambda source: -total[source])
        return [Mover(source, largest[source][1], total[source]) for source in sources[:count]]


def cost_of(text: str, *, steps: int = 1, rounds: int = 1) -> ProgramCost:
    """Counts the cost of a step of a compiled program.

    Args:
      text: The program, as `compiled.as_text()` returns it.
      steps: Steps in a call of the program. All costs are divided by it.
      rounds: Assumed rounds of the outermost loops whose number of rounds depends on data.
    """
    program = parse(text)
    work = WorkOf(program)
    traffic = TrafficOf(program)
    operations: list[Operation] = []
    collectives: list[tuple[Collective, float]] = []
    stacks: list[FilledArray] = []
    assumed_loops: list[Loop] = []
    for run in executions(program, rounds=rounds):
        if isinstance(run, Loop):
            stacks.extend(stacks_of(program, run))
            if run.is_assumed:
                assumed_loops.append(run)
            continue

        operations.append(_operation(program, work, traffic, run, steps))
        for collective in collectives_of(program, run.line, run.computation):
            collectives.append((collective, run.times / steps))
    return ProgramCost(operations, collectives, stacks, assumed_loops)


def _operation(
    program: Program, work: WorkOf, traffic: TrafficOf, run: Execution, steps: int
) -> Operation:
    source, op_name = program.source_of(run.line, run.computation)
    flops = work.flops(run.line, run.computation)
    padded_flops = kernel_work(run.line).padded_flops if is_kernel(run.line) else flops
    return Operation(
        run.line,
        run.times / steps,
        flops,
        padded_flops,
        work.integer_ops(run.line),
        traffic(run.line, run.computation),
        is_kernel(run.line),
        run.is_assumed,
        source,
        op_name,
    )
