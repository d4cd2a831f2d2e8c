r"""Checks attention on this device: correctness of each path, speed, and the best tiles.

Run it first on a new kind of device.

    python -m experiments.bench.device
    python -m experiments.bench.device --configs=enwik8_24l --tasks=training --batch_size=16 \
        --dtype=bfloat16
    python -m experiments.bench.device --paths=reference,interpreted --shrink=8  # Kernels, on a CPU

Please attach the page (device.md and device.csv in --out) to bug reports. It measures one layer at
the sizes of published configurations, with random arrays. Training is forward and backward,
evaluation is forward over a full KV cache. Output and gradients of each path are compared with the
reference in float32, on one row with the same dropout mask. If a path differs, it is not timed and
the command fails at the end. Timings are interleaved. The table shows each path's median, its
speedup over the reference, the operations per second on visible pairs with their fraction of the
data sheet's bfloat16 peak, and the scratch memory reported by the compiler.
"""

import collections
import dataclasses
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
# Without position keys.
PLAIN = "plain"
PATHS = ("reference", "tiled", "stored", "fused", PLAIN)
INTERPRETED = "interpreted"
# A timing repeats the call until it takes this long, up to a maximum number of calls.
_SECONDS = 0.02
_MOST_RUNS = 50
# Columns that the rows of one case have in common, and the columns of the case's table.
_COLUMNS_OF_CASE = ("configuration", "task", "sizes")
_COLUMNS_OF_PATH = (
    "path",
    "difference",
    "time",
    "slowest",
    "fastest",
    "speedup",
    "operations/s",
    "share of peak",
    "scratch",
)
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
        f"Paths to compare, of {', '.join((*PATHS, INTERPRETED))}. plain is fused without position "
        "keys, otherwise tiled, or stored on a GPU. interpreted is fused on any device, slowly.",
    )
    tiles: tuple[str, ...] = setting(
        ("128x512", "256x1024", "256x1536", "512x1536"),
        "Tiles (queries x keys) to try with the path that auto chooses. If empty, only its own.",
    )
    batch_size: int = setting(4, "B, training batch size on one device.", at_least=1)
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
    dtype = plan.dtype
    if dtype is None:
        dtype = DType.FLOAT32 if jax.default_backend() == "cpu" else DType.BFLOAT16
    cases = []
    for name in plan.configs:
        for task in plan.tasks:
            config = job.config_of_flagfile(name)
            cases.append(
                make_case(
                    name, config, task, batch=plan.batch_size, dtype=dtype, shrink=plan.shrink
                )
            )
    storage.make_folder(plan.out)
    path = os.path.join(plan.out, "device.md")
    page: list[str] = []

    def show(*lines: str) -> None:
        print("\n".join(lines), flush=True)
        page.extend(lines)
        # Written each time, because a compiler may abort the process.
        storage.write(path, "\n".join([*page, ""]).encode())

    origin = [f"    {line}" for line in environment.origin()]
    show(f"# Attention on {timing.machine()}", "", *origin)
    show(f"    platform  {' '.join(jax.devices()[0].client.platform_version.split())}", "", _LEGEND)
    rows: list[dict[str, str]] = []
    notes = Notes()
    for case in cases:
        rows_of_case = measure(case, plan, notes)
        for row in rows_of_case:
            rows.append(
                {"configuration": case.config, "task": case.task, "sizes": case.sizes, **row}
            )
        show(
            "",
            f"## {case.config}, {case.task}: {case.sizes} (rows x heads x queries x keys, width)",
            "",
        )
        show(*_table(rows_of_case))
    for title, lines in notes.sections().items():
        show("", f"## {title}", "", *(f"- {line}" for line in lines))

    columns = [*_COLUMNS_OF_CASE, *_COLUMNS_OF_PATH]
    storage.write(os.path.join(plan.out, "device.csv"), run_tables.csv_file(columns, rows))
    print(f"\npage      {path}")
    require(
        not notes.errors, f"{len(notes.errors)} comparisons failed. Attach {path} to a bug report."
    )


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yields a table of the columns that have a cell, each padded to the same width."""
    columns = []
    cells_by_column = []
    for name in _COLUMNS_OF_PATH:
        cells = [row.get(name, "") for row in rows]
        if any(cells):
            width = max(len(text) for text in [name, *cells])
            columns.append(name.ljust(width))
            cells_by_column.append([text.ljust(width) for text in cells])
    return environment.table(columns, list(zip(*cells_by_column, strict=True)))


@dataclasses.dataclass
class Notes:
    """Notes of the page below its tables."""

    # Number of implementations within rounding of the reference.
    equal: int = 0
    # Implementations that differ by more.
    errors: list[str] = dataclasses.field(default_factory=list)
    # Fastest tile by case.
    tiles: list[str] = dataclasses.field(default_factory=list)
    # Cases by the reason why a path was not measured.
    refused: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def sections(self) -> dict[str, list[str]]:
        """Returns lists by title."""
        compared = f"{self.equal} within rounding, {len(self.errors)} wrong"
        not_measured = [f"{reason} ({', '.join(cases)})" for reason, cases in self.refused.items()]
        sections = {
            "Compared with the reference": [compared, *self.errors],
            "Fastest tiles": self.tiles,
            "Not measured": not_measured,
            "Library calls whose gradients have not been seen on an accelerator": list(_UNSEEN),
        }
        return {title: lines for title, lines in sections.items() if lines}


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
        # Keys that are not after the query.
        seen = range(self.mem_len + 1, self.mem_len + self.segment_len + 1)
        pairs = sum(min(keys, self.window or keys) for keys in seen)
        # Scores by content, weighted values, and scores by distance.
        products = 3 if self.n_positions else 2
        passes = 1 if self.cached else 3
        return 2 * self.d_head * self.batch * self.n_head * pairs * products * passes


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
    if task == "training":
        call = training_call(config, mesh)
        mem_len = config.train.mem_len
    else:
        call = evaluation_call(config, mesh)
        mem_len = config.eval.mem_len
    fields = vars(call) | {"cache_dtype": None}
    return Case(**fields, config=name, mem_len=mem_len)


def find_implementation(path: str, problem: AttentionCall) -> Implementation:
    """Returns the implementation of a path, as --paths describes it.

    Raises `UserError` if it does not support the problem.
    """
    if path == INTERPRETED:
        problem = dataclasses.replace(problem, platform="tpu", device_kind="")
        kernel = geometry.kernel_of(problem)
        return Implementation("fused", kernel, geometry.default_tile(problem), interpret=True)
    candidates: tuple[str, ...] = (path,)
    if path == PLAIN:
        candidates = ("fused", "stored" if problem.platform == "gpu" else "tiled")
    for name in candidates:
        refusal = choose.refusal(name, problem)
        if refusal is None:
            return choose.choose(name, problem)[0]
    raise UserError(f"no {path}, because {refusal}")


class Candidate(NamedTuple):
    """An implementation to measure."""

    name: str  # Name in the table.
    case: Case  # The case, of PLAIN without position keys.
    implementation: Implementation


def implementations(case: Case, plan: Plan, notes: Notes) -> Iterator[Candidate]:
    """Yields implementations to measure, and notes why the other paths are not available."""
    auto = choose.choose(choose.AUTO, case)[0]
    for path in plan.paths:
        case_of_path = case
        if path == PLAIN:
            case_of_path = dataclasses.replace(case, n_positions=0)
        try:
            implementation = find_implementation(path, case_of_path)
        except UserError as error:
            notes.refused[str(error)].append(f"{case.config} {case.task}")
            continue
        name = f"{PLAIN}: {implementation}" if path == PLAIN else str(implementation)
        yield Candidate(name, case_of_path, implementation)

        # The path that auto chooses is tried with other tiles too.
        if path == auto.path and auto.tile is not None:
            for tile in _other_tiles(case, plan, auto.tile):
                implementation = dataclasses.replace(auto, tile=tile)
                yield Candidate(str(implementation), case, implementation)


def _other_tiles(case: Case, plan: Plan, tile: Tile) -> list[Tile]:
    """Returns the tiles of --tiles that differ from one on a case's scores.

    No tile is larger than the scores, so larger sizes are the same tile.
    """
    scores = (case.segment_len, case.n_keys)
    seen = {tuple(map(min, tile, scores))}
    others = []
    for size in plan.tiles:
        other = Tile(*map(int, size.split("x")))
        effective = tuple(map(min, other, scores))
        if effective not in seen:
            seen.add(effective)
            others.append(other)
    return others


def measure(case: Case, plan: Plan, notes: Notes) -> list[dict[str, str]]:
    """Checks, compiles and times the implementations of a case, and returns their rows.

    Other results are added to `notes`.
    """
    tasks: dict[str, Task] = {}
    rows: dict[str, dict[str, str]] = {}
    operations: dict[str, float] = {}
    for name, case_of_path, implementation in implementations(case, plan, notes):
        try:
            problem, difference = check(implementation, case_of_path)
            if not problem:
                arrays = make_inputs(case_of_path, [case_of_path.mem_len] * case_of_path.batch)
                function = make_function(implementation, case_of_path)
                tasks[name] = make_task(name, function, arrays)
                operations[name] = case_of_path.flops()
        except Exception as error:  # noqa: BLE001
            # Whatever a compiler raises, the other paths are still measured.
            reason = f"{name} does not compile or run: {first_line(error)}"
            notes.refused[reason].append(f"{case.config} {case.task}")
            continue
        rows[name] = {"path": name, "difference": difference}
        if problem:
            notes.errors.append(f"{case.config}, {case.task}, {name}: {problem}")
        elif difference:
            notes.equal += 1

    timing.time_in_turns(list(tasks.values()), warmup=0, calls=plan.calls)
    auto = choose.choose(choose.AUTO, case)[0]
    for name, task in tasks.items():
        rows[name] |= _timings(task, operations[name], tasks.get("reference"))
    # Different tiles of the path that auto chooses.
    tiled = {name: task for name, task in tasks.items() if name.startswith(f"{auto.path} ")}
    if len(tiled) > 1 and str(auto) in tiled:
        notes.tiles.append(f"{case.config}, {case.task}: {_compare_tiles(tiled, str(auto))}")
    return list(rows.values())


def _timings(task: Task, operations: float, reference: Task | None) -> dict[str, str]:
    """Returns the columns of a task that was timed.

    `operations` is the number for one run. The speedup is over `reference`, if it is not None.
    """
    seconds = [call_seconds / task.tokens for call_seconds in task.seconds]
    median = statistics.median(seconds)
    row = {
        "time": _milliseconds(median),
        "slowest": _milliseconds(max(seconds)),
        "fastest": _milliseconds(min(seconds)),
    }
    if reference is not None:
        row["speedup"] = f"{task.speedup(reference):.2f}"
    rate = operations / median
    peak = flops.device_peak(environment.device_kind())
    row["operations/s"] = environment.brief_number(rate)
    row["share of peak"] = f"{rate / peak:.1%}" if peak else ""
    row["scratch"] = environment.megabytes(task.memory_bytes)
    return row


def _milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds, rounded to three digits."""
    rounded = float(f"{1e3 * seconds:.3g}")
    return f"{rounded:,g} ms"


def _compare_tiles(tasks: Mapping[str, Task], auto: str) -> str:
    """Describes how fast the tile that auto chooses is, among all timed tiles."""
    speedup, best = max((task.speedup(tasks[auto]), name) for name, task in tasks.items())
    fastest = "it is the fastest"
    if best != auto:
        fastest = f"{best} is {speedup:.2f} times as fast"
    return f"of {len(tasks)} tiles auto takes {auto}; {fastest}"


def check(implementation: Implementation, case: Case) -> tuple[str, str]:
    """Compares one row with the reference, with two thirds of its memory filled.

    Returns (error or "", difference for the table).
    """
    if implementation.path == "reference":
        return "", ""
    single_row = dataclasses.replace(case, batch=1)
    inputs = make_inputs(single_row, [case.mem_len * 2 // 3])
    array, difference = largest_difference(implementation, single_row, inputs)
    problem = describe_error(array, difference, case)
    if problem:
        return problem, f"WRONG {difference:.0e}"
    return "", f"{difference:.0e}"


def make_task(path: str, function: Callable[..., Any], inputs: Any) -> Task:
    """Compiles a path into a task with as many runs (not tokens) as fit into `_SECONDS`."""
    compiled = jax.jit(function).lower(inputs).compile()
    jax.block_until_ready(compiled(inputs))
    start = time.perf_counter()
    jax.block_until_ready(compiled(inputs))
    seconds = time.perf_counter() - start
    runs = min(max(math.ceil(_SECONDS / seconds), 1), _MOST_RUNS)

    def call() -> None:
        for _ in range(runs):
            result = compiled(inputs)
        jax.block_until_ready(result)

    sizes: Any = compiled.memory_analysis()
    return Task(path, runs, call, memory_bytes=sizes.temp_size_in_bytes)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("model", "train", "eval"))
