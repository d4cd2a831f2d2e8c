"""Attention of one layer: the reference, tiles, fused kernels and plain attention, at the sizes of configurations.

    python -m experiments.bench.attention
    python -m experiments.bench.attention --configs=enwik8_24l --tasks=training --batch_size=16 --dtype=bfloat16

Training is forward and backward, evaluation forward over a full KV cache. Arrays are random. Each path is first
compared with the reference, on one row with the same dropout mask, in float32 or, if the path has no float32, in the
type that is timed: the table has the largest difference of the output and all gradients. Then timings are interleaved:
one of each path in turn. Of a path the table has the median, its speedup over the reference, its time as a multiple of
what the matrix products of all pairs take alone, the operations per second on visible pairs and, in bfloat16, their
share of the device's peak. Scratch is the compiler's account.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax import cli, flops
from txl_jax.bench import attention_products
from txl_jax.bench.attention_cases import (
    TASKS,
    Case,
    find_implementation,
    has_positions,
    make_case,
    make_function,
    make_inputs,
)
from txl_jax.config import DType, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write_json

CONFIGS = ("enwik8_12l", "enwik8_24l", "wt103_base", "wt103_large")
PATHS = ("reference", "tiled", "fused", "plain", "cudnn")
PRODUCTS = "products"  # The row of the matrix products alone.
# Relative differences beyond which an implementation is wrong, not rounded: in float32, and in 16 bits, where tiles
# differ from the reference in float32 by 0.7 % at the sizes of enwik8_24l.
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 2e-2
_SECONDS = 0.02  # A timing calls so often in a row that it takes this long.
_HEAD = (
    "| configuration | task | rows x heads x queries x keys, width | path | difference | time | slowest | fastest | "
    "speedup | times the products | operations/s | share of peak | scratch |"
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    configs: tuple[str, ...] = setting(CONFIGS, "Published configurations or flagfiles, with commas.")
    tasks: tuple[str, ...] = setting(TASKS, f"Of {', '.join(TASKS)}, with commas: forward and backward, or forward.")
    paths: tuple[str, ...] = setting(
        PATHS,
        f"Of {', '.join(PATHS)}, with commas. plain: the fused (else the tiled) one without position keys; cudnn: "
        "jax.nn.dot_product_attention without position keys and mask, on GPUs.",
    )
    batch_size: int | None = setting(
        4, "B, rows of training on one device; none: the whole batch that was published.", at_least=1
    )
    dtype: DType | None = setting(None, "Type of queries, keys and values; none: bfloat16, on a CPU float32.")
    calls: int = setting(7, "Timings of each path, interleaved.", at_least=1)
    json: str | None = setting(None, "File for all figures; none: only the table.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for an unknown task or path."""
        check_fields(self, "")
        require(self.configs, f"configs is empty; it must name configurations, such as {','.join(CONFIGS)}")
        for name, given, known in (("tasks", self.tasks, TASKS), ("paths", self.paths, PATHS)):
            require(given, f"{name} is empty; it must be of {', '.join(known)}")
            for one in given:
                near = config_tree.did_you_mean(one, known)
                require(one in known, f"{name} has {one!r}; it must be of {', '.join(known)}{near}")

    def cases(self, configs: Mapping[str, ExperimentConfig], *, dtype: str) -> Iterator[Case]:
        """Yields the cases: each task of each configuration."""
        for name, config in configs.items():
            for task in self.tasks:
                yield make_case(name, config, task, batch=self.batch_size, dtype=self.dtype or dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled path of a case."""

    path: str  # Its name in the plan.
    implementation: str  # What the path is here.
    start: Callable[[], Any]  # Starts it, and returns its result.
    scratch_bytes: int  # Memory besides arguments and results, by the compiler's account.


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark with the configurations of the plan."""
    benchmark({name: job.config_of_flagfile(name) for name in plan.configs}, plan)


def benchmark(configs: Mapping[str, ExperimentConfig], plan: Plan) -> list[dict[str, Any]]:
    """Checks and times the paths of each case; prints a table, writes the JSON file and returns its rows.

    Raises:
      UserError: If a configuration is without this attention, or a path computes other numbers than the reference.
    """
    facts, records, refused = environment.describe(), [], collections.defaultdict(list)
    print(f"{facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    print(f"{_HEAD}\n|{'---|' * _HEAD.count(' | ')}---|")
    for case in plan.cases(configs, dtype="float32" if jax.default_backend() == "cpu" else "bfloat16"):
        rows, refusals = measure(case, plan)
        records += rows
        for path, reason in refusals.items():
            refused[path, reason].append(f"{case.config} {case.task}")
    for (path, reason), names in refused.items():
        print(f"\nno {path}: {reason} ({', '.join(names)})")
    if plan.json:
        write_json(plan.json, {**facts, "plan": config_tree.to_dict(plan), "rows": records})
        print(f"\nresults   {plan.json}")
    return records


def measure(case: Case, plan: Plan) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Checks, compiles and times the paths of a case; prints their rows, returns them and why others are not there."""
    programs, differences, refusals = [], {}, {}
    for path in plan.paths:
        try:
            differences[path] = largest_difference(case, path)
            programs.append(_compile(case, path))
        except _NotHereError as error:
            refusals[path] = str(error)
    programs.append(_compile_products(case))
    seconds = _time_interleaved(programs, plan.calls)
    rows = [_record(case, program, seconds, differences.get(program.path)) for program in programs]
    for row in rows:
        print(format_row(row), flush=True)
    return rows, refusals


def largest_difference(case: Case, path: str) -> float | None:
    """Returns the largest relative difference from the reference, of one row: output and all gradients.

    The path computes in float32 where it can, else in the type of the case; the reference in float32, of the same
    numbers. The difference of an array is the largest of its elements' differences, divided by the reference's largest
    element.

    Raises:
      UserError: If it is too large to be rounding.
    """
    if path in ("reference", "cudnn"):
        return None
    small, implementation = _checked(case, path)
    tolerance = _TOLERANCE if small.dtype == "float32" else _TOLERANCE_OF_16_BITS
    inputs, positions = make_inputs(small), has_positions(path)
    exact = {name: array if name == "valid" else array.astype(jnp.float32) for name, array in inputs.items()}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(make_function(small, "reference", positions=positions))(exact)
        found = jax.jit(make_function(small, implementation, positions=positions))(inputs)
    differences = {
        name: float(jnp.max(jnp.abs(found[name] - array)) / jnp.max(jnp.abs(array))) for name, array in expected.items()
    }
    worst = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    if not differences[worst] <= tolerance:
        raise UserError(
            f"{case.config}, {case.task}: the {worst} of {path} ({implementation}) differs from the reference's by "
            f"{differences[worst]:.1e} of its largest element, in {small.dtype}; at most {tolerance:.0e} is rounding"
        )
    return differences[worst]


def format_row(row: Mapping[str, Any]) -> str:
    """Formats the table row of a path."""

    def known(value: Any, form: Callable[[Any], str]) -> str:
        return "" if value is None else form(value)

    cells = [
        row["config"],
        row["task"],
        row["shape"],
        row["path"] if row["implementation"] in ("", row["path"]) else f"{row['path']} ({row['implementation']})",
        known(row["difference"], "{:.0e}".format),
        *(f"{1e3 * row[name]:.3g} ms" for name in ("median_seconds", "slowest_seconds", "fastest_seconds")),
        known(row["speedup"], "{:.2f}".format),
        known(row["times_products"], "{:.2f}".format),
        f"{row['flops_per_second'] / 1e9:,.0f} G",
        known(row["share_of_peak"], "{:.1%}".format),
        environment.megabytes(row["scratch_bytes"]),
    ]
    return f"| {' | '.join(cells)} |"


class _NotHereError(Exception):
    """A path does not exist on this device, for this case."""


def _checked(case: Case, path: str) -> tuple[Case, Implementation]:
    """Returns what is compared with the reference: one row, by what is timed or its like in float32.

    Kernels for GPUs are for 16 bits only, and of float32 fewer position keys fit into a TPU's VMEM.
    """
    one_row = dataclasses.replace(case, batch=1)
    timed, exact = _implementation(one_row, path), dataclasses.replace(one_row, dtype="float32")
    try:
        found = _implementation(exact, path)
    except _NotHereError:
        return one_row, timed
    return (exact, found) if found.path == timed.path else (one_row, timed)


def _implementation(case: Case, path: str) -> Implementation:
    """Returns the implementation of a path on the first device; raises `_NotHereError`."""
    device = jax.devices()[0]
    found, reason = find_implementation(case, path, device.platform, device.device_kind)
    if found is None:
        raise _NotHereError(reason)
    return found


def _compile(case: Case, path: str) -> Program:
    inputs = make_inputs(case)
    if path == "cudnn":
        if jax.default_backend() != "gpu" or case.capacity is not None or case.dtype != "bfloat16":
            raise _NotHereError("it is only timed in training on GPUs, in bfloat16")
        return _program(path, "", _cudnn, inputs)
    implementation = _implementation(case, path)
    function = make_function(case, implementation, positions=has_positions(path))
    return _program(path, str(implementation), function, inputs)


def _compile_products(case: Case) -> Program:
    inputs = attention_products.make_inputs(case, platform=jax.default_backend())
    return _program(PRODUCTS, "", attention_products.products(case), inputs)


def _program(path: str, implementation: str, function: Callable[..., Any], inputs: Any) -> Program:
    try:
        compiled = jax.jit(function).lower(inputs).compile()
        jax.block_until_ready(compiled(inputs))
    except jax.errors.JaxRuntimeError as error:
        raise _NotHereError(str(error).partition("\n")[0][:200]) from None
    sizes: Any = compiled.memory_analysis()
    return Program(path, implementation, lambda: compiled(inputs), sizes.temp_size_in_bytes)


def _cudnn(inputs: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Computes plain attention of all pairs by cuDNN, and its gradients."""

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        lengths_first = (array.swapaxes(1, 2) for array in (query, key, value))
        return jax.nn.dot_product_attention(*lengths_first, implementation="cudnn").swapaxes(1, 2)

    output, pull_back = jax.vjp(forward, inputs["query"], inputs["key"], inputs["value"])
    return [output, *pull_back(inputs["cotangent"])]


def _time_interleaved(programs: list[Program], calls: int) -> dict[str, list[float]]:
    """Returns the seconds of a call in each timing by path; one timing of each in turn, after one to warm up."""
    repeats = {}
    for program in programs:
        start = time.perf_counter()
        jax.block_until_ready(program.start())
        repeats[program.path] = min(max(math.ceil(_SECONDS / (time.perf_counter() - start)), 1), 50)
    seconds: dict[str, list[float]] = {program.path: [] for program in programs}
    for _ in range(calls):
        for program in programs:
            repeat = repeats[program.path]
            start = time.perf_counter()
            for _ in range(repeat):
                result = program.start()
            jax.block_until_ready(result)
            seconds[program.path].append((time.perf_counter() - start) / repeat)
    return seconds


def _record(
    case: Case, program: Program, seconds: Mapping[str, list[float]], difference: float | None
) -> dict[str, Any]:
    """Returns the values of a row; ratios are medians over timings, each beside that of the same round."""
    own = seconds[program.path]

    def ratio(of: list[float] | None, to: list[float] | None) -> float | None:
        return None if of is None or to is None else statistics.median(a / b for a, b in zip(of, to, strict=True))

    median = statistics.median(own)
    visible = case.flops(positions=has_positions(program.path))
    rate = (case.flops_of_products if program.path == PRODUCTS else visible) / median
    peak = flops.device_peak(jax.devices()[0].device_kind)
    return {
        **dataclasses.asdict(case),
        "shape": case.shape,
        "path": program.path,
        "implementation": program.implementation,
        "difference": difference,
        "median_seconds": median,
        "slowest_seconds": max(own),
        "fastest_seconds": min(own),
        "seconds": own,
        "speedup": ratio(seconds.get("reference"), own),
        "times_products": ratio(own, seconds[PRODUCTS]),
        "flops_per_second": rate,
        "share_of_peak": rate / peak if peak and case.dtype == "bfloat16" else None,
        "scratch_bytes": program.scratch_bytes,
    }


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("model", "train", "eval"))
