r"""Checks attention on this device: whether each path is right, its speed, and the best tiles.

It is the first command to run on a device.

    python -m experiments.bench.device
    python -m experiments.bench.device --configs=enwik8_24l --tasks=training --batch_size=16 \
        --dtype=bfloat16
    python -m experiments.bench.device --paths=reference,interpreted --shrink=8  # Kernels, on a CPU

The page (device.md in --out, and device.csv) belongs in a bug report. It has one layer at the sizes
of configurations. Training is forward and backward, evaluation forward over a full KV cache. Arrays
are random. Output and gradients of each path are compared with the reference in float32, on one row
with the same dropout mask. A path that differs is not timed, and the command fails at the end.
Timings are interleaved. The table shows each path's median, its speedup over the reference, the
operations per second on visible pairs with their fraction of the data sheet's peak in bfloat16, and
scratch as reported by the compiler.
"""

import collections
import dataclasses
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax import cli, flops
from txl_jax.config import DType, Encoding, ExperimentConfig, MeshConfig, Network, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import UserError, first_line
from txl_jax.ops.attention import AttentionCall, Implementation, Tile, choose
from txl_jax.ops.attention.tpu import geometry
from txl_jax.runs import run_tables
from txl_jax.runs.attention_check import (
    describe_error,
    largest_difference,
    make_function,
    make_inputs,
)
from txl_jax.runs.attention_choice import evaluation_call, training_call
from txl_jax.runtime import environment, storage
from txl_jax.sharding.mesh import make_mesh

CONFIGS = ("enwik8_12l", "enwik8_24l", "wt103_base", "wt103_large")
TASKS = ("training", "evaluation")
PLAIN = "plain"  # Without position keys.
PATHS = ("reference", "tiled", "stored", "fused", PLAIN)
INTERPRETED = "interpreted"
_SECONDS = 0.02  # A timing calls so often in a row that it takes this long.
COLUMNS = [
    "configuration",
    "task",
    "sizes",
    "path",
    "difference",
    "time",
    "slowest",
    "fastest",
    "speedup",
]
COLUMNS += ["operations/s", "share of peak", "scratch"]
_LEGEND = """Difference: from the reference, of its largest element. Speedup: over the reference.
Operations: on visible pairs, and their fraction of the data sheet's peak in bfloat16."""
_UNSEEN = (
    (
        "fused, a kernel: pltpu.roll with a stride, jnp.take_along_axis on lanes, sums in "
        "blocks that steps share"
    ),
    (
        "stored and tiled, in XLA: jnp.einsum with preferred_element_type, optimization_barrier, "
        "fori_loop in place"
    ),
    (
        "reference, by JAX: jnp.einsum with preferred_element_type, jax.nn.softmax, the shift "
        "as a reshape"
    ),
    (
        "all, on several devices: jax.shard_map with check_vma=False, which sums gradients of "
        "position keys and biases"
    ),
    (
        "the rest of an update: jnp.take, "
        "optax.softmax_cross_entropy_with_integer_labels, nn.scan, nn.remat"
    ),
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    configs: tuple[str, ...] = setting(
        CONFIGS, "Published configurations or flagfiles, separated by commas."
    )
    tasks: tuple[str, ...] = setting(
        TASKS, f"Tasks to time, of {', '.join(TASKS)}: forward and backward, or forward."
    )
    paths: tuple[str, ...] = setting(
        PATHS,
        f"Of {', '.join((*PATHS, INTERPRETED))}. plain is fused without position keys, or else "
        "tiled, on a GPU stored. interpreted is fused on any device, slowly.",
    )
    tiles: tuple[str, ...] = setting(
        ("128x512", "256x1024", "256x1536", "512x1536"),
        "Tiles, queries x keys, to try with the path that auto chooses. If empty, only its own.",
    )
    batch_size: int = setting(4, "B, rows of training on one device.", at_least=1)
    shrink: int = setting(
        1, "Divisor of the lengths of segments and memories, for a quick look.", at_least=1
    )
    dtype: DType | None = setting(
        None, "Dtype of queries, keys and values. none means bfloat16, or float32 on a CPU."
    )
    calls: int = setting(7, "Timings of each path, interleaved.", at_least=1)
    out: str = setting(
        "device", "Directory for device.md and device.csv. Created if missing.", path=True
    )

    def validate(self) -> None:
        """Raises `UserError` for unknown names."""
        super().validate()
        require(
            self.configs,
            f"configs must name one configuration or more, such as {CONFIGS[0]}, got none",
        )
        timing.check_names("tasks", self.tasks, TASKS)
        timing.check_names("paths", self.paths, (*PATHS, INTERPRETED))
        for tile in self.tiles:
            require(
                re.fullmatch(r"[1-9]\d*x[1-9]\d*", tile),
                f"tiles must look like 128x256, got {tile!r}",
            )


def run(plan: Plan, job: cli.Job) -> None:
    """Checks and times the paths of each configuration and task; prints the page and writes it."""
    dtype = plan.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cases = [
        make_case(
            name,
            job.config_of_flagfile(name),
            task,
            batch=plan.batch_size,
            dtype=dtype,
            shrink=plan.shrink,
        )
        for name, task in itertools.product(plan.configs, plan.tasks)
    ]
    storage.make_folder(plan.out)
    path = os.path.join(plan.out, "device.md")
    page = list[str]()
    rows = list[dict[str, str]]()
    notes = Notes()

    def show(*lines: str) -> None:
        print("\n".join(lines), flush=True)
        page.extend(lines)
        # Each time, as a compiler may end the process.
        storage.write(path, "\n".join([*page, ""]).encode())

    show(
        f"# Attention on {timing.machine()}", "", *(f"    {line}" for line in environment.origin())
    )
    show(f"    platform  {' '.join(jax.devices()[0].client.platform_version.split())}", "", _LEGEND)
    for case in cases:
        found = measure(case, plan, notes)
        rows += [
            {"configuration": case.config, "task": case.task, "sizes": case.sizes} | row
            for row in found
        ]
        columns = [name for name in COLUMNS[3:] if any(row.get(name) for row in found)]
        widths = {
            name: max(len(row.get(name, "")) for row in [{name: name}, *found]) for name in columns
        }
        cells = [
            [row.get(name, "").ljust(width) for name, width in widths.items()] for row in found
        ]
        show(
            "",
            f"## {case.config}, {case.task}: {case.sizes} (rows x heads x queries x keys, width)",
            "",
        )
        show(*environment.table([name.ljust(width) for name, width in widths.items()], cells))
    for title, lines in notes.sections().items():
        show("", f"## {title}", "", *(f"- {line}" for line in lines))
    storage.write(os.path.join(plan.out, "device.csv"), run_tables.csv_file(COLUMNS, rows))
    print(f"\npage      {path}")
    require(
        not notes.wrong, f"{len(notes.wrong)} comparisons failed. Attach {path} to a bug report."
    )


@dataclasses.dataclass
class Notes:
    """What the page says below its tables."""

    equal: int = 0  # Implementations within rounding of the reference.
    wrong: list[str] = dataclasses.field(default_factory=list)
    tiles: list[str] = dataclasses.field(default_factory=list)
    # Cases, by path and reason.
    refused: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def sections(self) -> dict[str, list[str]]:
        """Returns lists by title."""
        found = {
            "Compared with the reference": [
                f"{self.equal} within rounding, {len(self.wrong)} wrong",
                *self.wrong,
            ]
        }
        found["Fastest tiles"] = self.tiles
        found["Not measured"] = [
            f"{reason} ({', '.join(names)})" for reason, names in self.refused.items()
        ]
        found["Library calls whose gradients have not been seen on an accelerator"] = list(_UNSEEN)
        return {title: lines for title, lines in found.items() if lines}


@dataclasses.dataclass(frozen=True)
class Case(AttentionCall):
    """Attention of one layer of a configuration, in training or over a KV cache."""

    config: str = ""  # Its name.
    mem_len: int = 0  # M.

    @property
    def task(self) -> str:
        """Which of `TASKS` it is."""
        return "evaluation" if self.cached else "training"

    @property
    def sizes(self) -> str:
        """Describes the sizes."""
        return f"{self.batch} x {self.n_head} x {self.segment_len} x {self.n_keys}, {self.d_head}"

    def flops(self) -> float:
        """Returns the operations on visible pairs. Backward does each twice."""
        # Keys that are not behind a query.
        seen = range(self.mem_len + 1, self.mem_len + self.segment_len + 1)
        # Scores by content, weighted values, and scores by distance.
        dot_products = sum(min(keys, self.window or keys) for keys in seen) * (
            3 if self.n_positions else 2
        )
        return 2 * self.d_head * self.batch * self.n_head * dot_products * (1 if self.cached else 3)


def make_case(
    name: str, config: ExperimentConfig, task: str, *, batch: int, dtype: str, shrink: int = 1
) -> Case:
    """Returns a configuration's sizes on the first device.

    Raises `UserError` if the configuration's attention is not a Transformer-XL's with
    `model.encoding=relative`.
    """
    model = config.model
    is_relative = model.network is Network.TRANSFORMER_XL and model.encoding is Encoding.RELATIVE
    require(
        is_relative,
        f"{name} must have model.encoding=relative, got {model.network} with {model.encoding}",
    )
    changes: dict[str, Any] = {"train.batch_size": batch, "train.grad_accum_steps": 1}
    changes |= {"model.dtype": dtype, "eval.cache_dtype": None}
    for group, sizes in (("train", config.train), ("eval", config.eval)):
        changes[f"{group}.segment_len"] = -(-sizes.segment_len // shrink)
        changes[f"{group}.mem_len"] = sizes.mem_len // shrink
    config = config_tree.replace(config, changes)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    problem = training_call(config, mesh) if task == "training" else evaluation_call(config, mesh)
    mem_len = config.train.mem_len if task == "training" else config.eval.mem_len
    return Case(**vars(problem) | {"cache_dtype": None}, config=name, mem_len=mem_len)


def find_implementation(path: str, problem: AttentionCall) -> Implementation:
    """Returns what a path is, as --paths describes it.

    Raises `UserError` if it cannot serve the problem.
    """
    if path == INTERPRETED:
        problem = dataclasses.replace(problem, platform="tpu", device_kind="")
        return Implementation(
            "fused", geometry.kernel_of(problem), geometry.default_tile(problem), interpret=True
        )
    for name in (
        ("fused", "stored" if problem.platform == "gpu" else "tiled") if path == PLAIN else (path,)
    ):
        refusal = choose.refusal(name, problem)
        if refusal is None:
            return choose.choose(name, problem)[0]
    raise UserError(f"no {path}, as {refusal}")


def implementations(
    case: Case, plan: Plan, notes: Notes
) -> Iterator[tuple[str, Case, Implementation]]:
    """Yields what to measure, as (name, case, implementation); notes why paths cannot serve."""
    auto, most = choose.choose(choose.AUTO, case)[0], (case.segment_len, case.n_keys)
    for path in plan.paths:
        given = dataclasses.replace(case, n_positions=0) if path == PLAIN else case
        try:
            found = find_implementation(path, given)
        except UserError as error:
            notes.refused[str(error)].append(f"{case.config} {case.task}")
            continue
        yield f"{PLAIN}: {found}" if path == PLAIN else str(found), given, found
        if path == auto.path and auto.tile is not None:
            different = {tuple(map(min, auto.tile, most)): auto.tile}
            for size in plan.tiles:
                tile = Tile(*map(int, size.split("x")))
                # No tile is larger than the scores.
                different.setdefault(tuple(map(min, tile, most)), tile)
            for tile in list(different.values())[1:]:
                other = dataclasses.replace(auto, tile=tile)
                yield str(other), case, other


def measure(case: Case, plan: Plan, notes: Notes) -> list[dict[str, str]]:
    """Checks, compiles and times the implementations of a case, and returns their rows.

    Whatever else is found is added to `notes`.
    """
    tasks, rows, operations = dict[str, Task](), dict[str, dict[str, str]](), dict[str, float]()
    for name, given, implementation in implementations(case, plan, notes):
        try:
            wrong, difference = check(implementation, given)
            if not wrong:
                arrays = make_inputs(given, [case.mem_len] * case.batch)
                tasks[name] = make_task(name, make_function(implementation, given), arrays)
                operations[name] = given.flops()
        except Exception as error:  # noqa: BLE001
            # Whatever a compiler raises, the other paths are of interest.
            notes.refused[f"{name} does not compile or run: {first_line(error)}"].append(
                f"{case.config} {case.task}"
            )
            continue
        rows[name] = {"path": name, "difference": difference}
        notes.equal += bool(difference and not wrong)
        if wrong:
            notes.wrong.append(f"{case.config}, {case.task}, {name}: {wrong}")
    timing.time_in_turns(list(tasks.values()), warmup=0, calls=plan.calls)
    peak, auto = flops.device_peak(environment.device_kind()), choose.choose(choose.AUTO, case)[0]
    for name, task in tasks.items():
        seconds = [each / task.tokens for each in task.seconds]
        median = statistics.median(seconds)
        row, rate = rows[name], operations[name] / median
        times = zip(
            ("time", "slowest", "fastest"), (median, max(seconds), min(seconds)), strict=True
        )
        row |= {column: f"{float(f'{1e3 * each:.3g}'):,g} ms" for column, each in times}
        if "reference" in tasks:
            row["speedup"] = f"{task.speedup(tasks['reference']):.2f}"
        row |= {
            "operations/s": environment.brief_number(rate),
            "share of peak": f"{rate / peak:.1%}" if peak else "",
        }
        row["scratch"] = environment.megabytes(task.memory_bytes)
    tiled = [name for name in tasks if name.startswith(f"{auto.path} ")]
    if len(tiled) > 1 and (own := str(auto)) in tiled:
        speedup, best = max((tasks[name].speedup(tasks[own]), name) for name in tiled)
        fastest = "it is the fastest" if best == own else f"{best} is {speedup:.2f} times as fast"
        notes.tiles.append(
            f"{case.config}, {case.task}: of {len(tiled)} tiles auto takes {own}; {fastest}"
        )
    return list(rows.values())


def check(implementation: Implementation, case: Case) -> tuple[str, str]:
    """Compares one row with the reference, with two thirds of its memory filled.

    Returns (error or "", difference for the table).
    """
    if implementation.path == "reference":
        return "", ""
    one = dataclasses.replace(case, batch=1)
    array, difference = largest_difference(
        implementation, one, make_inputs(one, [case.mem_len * 2 // 3])
    )
    wrong = describe_error(array, difference, case)
    return wrong, f"WRONG {difference:.0e}" if wrong else f"{difference:.0e}"


def make_task(path: str, function: Callable[..., Any], inputs: Any) -> Task:
    """Compiles a path into a task of so many runs (not tokens) that a timing takes `_SECONDS`."""
    compiled = jax.jit(function).lower(inputs).compile()
    jax.block_until_ready(compiled(inputs))
    start = time.perf_counter()
    jax.block_until_ready(compiled(inputs))
    runs = min(max(math.ceil(_SECONDS / (time.perf_counter() - start)), 1), 50)

    def call() -> None:
        for _ in range(runs):
            result = compiled(inputs)
        jax.block_until_ready(result)

    sizes: Any = compiled.memory_analysis()
    return Task(path, runs, call, memory_bytes=sizes.temp_size_in_bytes)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("model", "train", "eval"))
