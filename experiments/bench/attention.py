"""Attention of one layer at the sizes of configurations: each path, and what it is without position keys.

    python -m experiments.bench.attention
    python -m experiments.bench.attention --configs=enwik8_24l --tasks=training --batch_size=16 --dtype=bfloat16

Training is forward and backward, evaluation forward over a full KV cache. Arrays are random. Each path's output and
gradients are first compared with the reference in float32, on one row with the same dropout mask. Then timings are
interleaved. The table shows each path's median, its speedup over the reference, its time as a multiple of only the
matmuls of all pairs, the operations per second on visible pairs, and scratch by the compiler's account.
"""

import collections
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import timing
from experiments.bench.timing import Task
from txl_jax import cli, sharding
from txl_jax.config import DType, Encoding, ExperimentConfig, MeshConfig, Network, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import first_line
from txl_jax.ops.attention import CachedVisibility, Visibility, attention, cached_attention, choose
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Implementation, Problem
from txl_jax.runs.build import evaluation_problem, training_problem
from txl_jax.runtime.environment import megabytes

CONFIGS = ("enwik8_12l", "enwik8_24l", "wt103_base", "wt103_large")
TASKS = ("training", "evaluation")
PLAIN = "plain"  # Without position keys.
PATHS = ("reference", "tiled", "stored", "fused", PLAIN)
PRODUCTS = "products"  # The row of only the matmuls.
Arrays = dict[str, jax.Array]
# Relative differences beyond which an implementation is wrong, not rounded: in float32, and in 16 bits, where tiles
# differ from the reference in float32 by 0.7 % at the sizes of enwik8_24l.
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 2e-2
_SECONDS = 0.02  # A timing calls so often in a row that it takes this long.
# The inputs and their axes, by the letters of `Case.lengths`.
_INPUTS = {
    "training": "query:bhle key:bhke value:bhke position_key:hpe content_bias:he position_bias:he cotangent:bhle",
    "evaluation": (
        "query:bhle key:bhle value:bhle stored_key:bher stored_value:bhre position_query:bhle position_key:hep"
    ),
}
_DIFFERENTIATED = ("query", "key", "value", "position_key", "content_bias", "position_bias")
_COLUMNS = (
    "configuration | task | rows x heads x queries x keys, width | path | difference | time | slowest | fastest | "
    "speedup | times the products | operations/s | scratch"
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the benchmark."""

    configs: tuple[str, ...] = setting(CONFIGS, "Published configurations or flagfiles, with commas.")
    tasks: tuple[str, ...] = setting(TASKS, f"Of {', '.join(TASKS)}, with commas: forward and backward, or forward.")
    paths: tuple[str, ...] = setting(
        PATHS,
        f"Of {', '.join(PATHS)}, with commas. plain is fused without position keys, or else tiled, on a GPU stored.",
    )
    batch_size: int = setting(4, "B, rows of training on one device.", at_least=1)
    dtype: DType | None = setting(None, "Type of queries, keys and values; none: bfloat16, on a CPU float32.")
    calls: int = setting(7, "Timings of each path, interleaved.", at_least=1)

    def validate(self) -> None:
        """Raises `UserError` for unknown names."""
        super().validate()
        require(self.configs, f"configs must name one configuration or more, such as {CONFIGS[0]}, got none")
        timing.check_names("tasks", self.tasks, TASKS)
        timing.check_names("paths", self.paths, PATHS)


def run(plan: Plan, job: cli.Job) -> None:
    """Checks and times the paths of each configuration and task, and prints a table."""
    dtype = plan.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cases = [
        make_case(name, job.config_of_flagfile(name), task, batch=plan.batch_size, dtype=dtype)
        for name, task in itertools.product(plan.configs, plan.tasks)
    ]
    print(f"{timing.machine()}\n")
    refused: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    timing.print_table(_COLUMNS, (row for case in cases for row in measure(case, plan, refused)))
    for (path, reason), names in refused.items():
        print(f"\nno {path}: {reason} ({', '.join(names)})")


@dataclasses.dataclass(frozen=True)
class Case(Problem):
    """Attention of one layer of a configuration, in training or over a KV cache."""

    config: str = ""  # Its name.
    mem_len: int = 0  # M.
    dropout_rate: float = 0.0  # Of the probabilities in training.

    @property
    def task(self) -> str:
        """Which of `TASKS` it is."""
        return "evaluation" if self.cached else "training"

    def lengths(self, axes: str) -> tuple[Any, ...]:
        """Returns the lengths of axes by letters: as in `Problem`, and M for the segment's own keys over a cache."""
        sizes = {"b": self.batch, "h": self.n_head, "l": self.segment_len, "m": self.segment_len, "k": self.n_keys}
        sizes |= {"p": self.n_positions, "e": self.d_head, "r": self.capacity or 0}
        return tuple(sizes[axis] for axis in axes)

    def flops(self, path: str) -> float:
        """Returns the operations on visible pairs, or on all pairs for `PRODUCTS`. Backward does each product twice."""
        if path == PRODUCTS:
            dot_products = self.segment_len * (2 * self.n_keys + self.n_positions)
        else:  # Scores by content, scores by distance, and weighted values.
            seen = range(self.mem_len + 1, self.mem_len + self.segment_len + 1)  # Keys that are not behind a query.
            dot_products = sum(min(keys, self.window or keys) for keys in seen) * (2 if path == PLAIN else 3)
        return 2 * self.d_head * self.batch * self.n_head * dot_products * (1 if self.cached else 3)


def make_case(name: str, config: ExperimentConfig, task: str, *, batch: int, dtype: str) -> Case:
    """Returns a configuration's sizes on the first device, or raises `UserError` if it has another attention."""
    model = config.model
    require(
        model.network is Network.TRANSFORMER_XL and model.encoding is Encoding.RELATIVE,
        f"{name} has the network {model.network} with the encoding {model.encoding}; "
        "the benchmark is of attention with model.encoding=relative",
    )
    rows = {"train.batch_size": batch, "train.grad_accum_steps": 1}
    config = config_tree.replace(config, {**rows, "model.dtype": dtype, "eval.cache_dtype": None})
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    if task == "training":
        problem, mem_len, rate = training_problem(config, mesh), config.train.mem_len, float(model.dropout.attention)
    else:
        problem, mem_len, rate = evaluation_problem(config, mesh), config.eval.mem_len, 0.0
    sizes = vars(problem) | {"cache_dtype": None}
    return Case(**sizes, config=name, mem_len=mem_len, dropout_rate=rate)


class NotHereError(Exception):
    """A path does not exist on this device, for this case."""


def find_implementation(case: Case, path: str) -> Implementation:
    """Returns what a path is, as --paths describes it; raises `NotHereError` if it cannot serve the case."""
    given = dataclasses.replace(case, n_positions=0) if path == PLAIN else case
    for name in ("fused", "stored" if case.platform == "gpu" else "tiled") if path == PLAIN else (path,):
        refusal = choose.refusal(name, given)
        if refusal is None:
            return choose.choose(name, given)[0]
    raise NotHereError(refusal)


def measure(case: Case, plan: Plan, refused: dict[tuple[str, str], list[str]]) -> Iterator[list[str]]:
    """Checks, compiles and times the paths of a case, and yields their rows; adds why others are `refused`."""
    tasks, names, differences = {}, {PRODUCTS: PRODUCTS}, {"reference": "", PRODUCTS: ""}
    for path in plan.paths:
        try:
            implementation = find_implementation(case, path)
            if path != "reference":
                differences[path] = f"{largest_difference(case, path, implementation):.0e}"
            function = make_function(case, implementation, positions=path != PLAIN)
            tasks[path] = _task(path, function, make_inputs(case))
            names[path] = path if str(implementation) == path else f"{path} ({implementation})"
        except NotHereError as error:
            refused[path, str(error)].append(f"{case.config} {case.task}")
    tasks[PRODUCTS] = _task(PRODUCTS, *products(case))
    timing.time_in_turns(list(tasks.values()), warmup=0, calls=plan.calls)
    sizes = f"{case.batch} x {case.n_head} x {case.segment_len} x {case.n_keys}, {case.d_head}"
    for path, task in tasks.items():
        seconds = [each / task.tokens for each in task.seconds]
        median = statistics.median(seconds)
        times = (f"{1e3 * each:.3g} ms" for each in (median, max(seconds), min(seconds)))
        # Ratios are medians over timings of the same round.
        speedup = f"{statistics.median(task.speedups(tasks['reference'])):.2f}" if "reference" in tasks else ""
        multiple = f"{statistics.median(tasks[PRODUCTS].speedups(task)):.2f}"
        rate, scratch = f"{case.flops(path) / median / 1e9:,.0f} G", megabytes(task.memory_bytes)
        yield [case.config, case.task, sizes, names[path], differences[path], *times, speedup, multiple, rate, scratch]


def largest_difference(case: Case, path: str, implementation: Implementation) -> float:
    """Returns the largest relative difference from the reference in float32, of one row: output and all gradients.

    An array's difference is its elements' largest, divided by the reference's largest element. Raises `UserError` if it
    is too large to be rounding.
    """
    case = dataclasses.replace(case, batch=1)
    tolerance = _TOLERANCE if case.dtype == "float32" else _TOLERANCE_OF_16_BITS
    inputs, positions = make_inputs(case), path != PLAIN
    in_float32 = {name: array if name == "valid" else array.astype(jnp.float32) for name, array in inputs.items()}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(make_function(case, "reference", positions=positions))(in_float32)
        outputs = jax.jit(make_function(case, implementation, positions=positions))(inputs)
    differences = {
        name: float(jnp.max(jnp.abs(outputs[name] - array)) / jnp.max(jnp.abs(array)))
        for name, array in expected.items()
    }
    worst = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
    require(
        differences[worst] <= tolerance,
        f"{case.config}, {case.task}: the {worst} of {path} ({implementation}) must be the reference's to "
        f"{tolerance:.0e} of its largest element, in {case.dtype}, got a difference of {differences[worst]:.1e}",
    )
    return differences[worst]


def _task(path: str, function: Callable[..., Any], inputs: Any) -> Task:
    """Compiles a path into a task of so many runs (not tokens) that a timing takes `_SECONDS`."""
    try:
        compiled = jax.jit(function).lower(inputs).compile()
        jax.block_until_ready(compiled(inputs))
    except jax.errors.JaxRuntimeError as error:
        raise NotHereError(first_line(error)) from None
    start = time.perf_counter()
    jax.block_until_ready(compiled(inputs))
    runs = min(max(math.ceil(_SECONDS / (time.perf_counter() - start)), 1), 50)

    def call() -> None:
        for _ in range(runs):
            result = compiled(inputs)
        jax.block_until_ready(result)

    sizes: Any = compiled.memory_analysis()
    return Task(path, runs, call, memory_bytes=sizes.temp_size_in_bytes)


def make_inputs(case: Case) -> Arrays:
    """Returns random arrays: keys and values of unit variance, as behind a layer norm, and biases a fifth of that."""
    axes_of = dict(each.split(":") for each in _INPUTS[case.task].split())
    keys = jax.random.split(jax.random.key(0), len(axes_of))
    arrays = {
        name: (0.2 if name.endswith("bias") else 1.0) * jax.random.normal(key, case.lengths(axes))
        for key, (name, axes) in zip(keys, axes_of.items(), strict=True)
    }
    if case.cached:
        arrays["query"] *= case.d_head**-0.5
        arrays["position_query"] *= case.d_head**-0.5
    found = {name: array.astype(case.dtype) for name, array in arrays.items()}
    return found | {"valid": jnp.full((case.batch,), case.mem_len, jnp.int32)}


def make_function(
    case: Case, implementation: Implementation | str, *, positions: bool = True
) -> Callable[[Arrays], dict[str, jax.Array]]:
    """Returns the function of a case, with or without position keys: inputs -> output, in training with gradients."""
    names = _DIFFERENTIATED if positions else _DIFFERENTIATED[:3]

    def training(inputs: Arrays) -> dict[str, jax.Array]:
        visibility = Visibility(inputs["valid"], case.segment_len, case.mem_len, case.window)
        dropout = Dropout(case.dropout_rate, jnp.uint32(7), case.n_head) if case.dropout_rate else None

        def forward(given: Any) -> jax.Array:
            return attention(**given, visibility=visibility, dropout=dropout, implementation=implementation)

        output, pull_back = jax.vjp(forward, {name: inputs[name] for name in names})
        [gradients] = pull_back(inputs["cotangent"])
        return {"output": output} | {f"gradient of {name}": each for name, each in gradients.items()}

    def evaluation(inputs: Arrays) -> dict[str, jax.Array]:
        assert case.capacity
        # The seam of the ring is in the middle, at a segment's border, as after some segments.
        write_index = jnp.int32(case.capacity // 2 // case.segment_len * case.segment_len)
        visibility = CachedVisibility(inputs["valid"], write_index, case.segment_len, case.capacity, case.window)
        position = (inputs["position_query"], inputs["position_key"], None) if positions else None
        own = (inputs["query"], inputs["key"], inputs["value"])
        ring = (inputs["stored_key"], inputs["stored_value"])
        return {"output": cached_attention(*own, ring, position, visibility, implementation=implementation)}

    return evaluation if case.cached else training


# Operands with the letters of `Case.lengths`. Scores ("by_") are the same for all heads, in the order of reading.
_PRODUCTS = {
    "training": (
        "query:le key:ke, query:le position_key:pe, by_key:lk value:ke, by_query:kl cotangent:le, "
        "cotangent:le value:ke, by_key:lk key:ke, by_query:kl query:le, by_distance:lp position_key:pe, "
        "by_query_of_distance:pl query:le"
    ),
    "evaluation": (
        "query:le stored_key:er, query:le key:me, query:le position_key:ep, by_stored_key:lr stored_value:re, "
        "by_key:lm value:me"
    ),
}


def products(case: Case) -> tuple[Callable[..., list[jax.Array]], tuple[Arrays, Arrays]]:
    """Returns the matrix products of all pairs, which no implementation omits: a function and random inputs.

    On a CPU each head's results stay in the cache (512 x 1024 scores of 16 heads took 2.5 times as long in memory).
    Other devices do all rows and heads in one product.
    """
    pairs = [[operand.split(":") for operand in product.split()] for product in _PRODUCTS[case.task].split(", ")]
    heads = case.batch * case.n_head
    group = 1 if case.platform == "cpu" else heads
    arrays: tuple[Arrays, Arrays] = {}, {}  # Of each group, and scores.
    for number, (name, axes) in enumerate(dict(itertools.chain(*pairs)).items()):
        shared = name.startswith("by_")
        shape = (*(() if shared else (heads // group,)), group, *case.lengths(axes))
        arrays[shared][name] = jax.random.normal(jax.random.key(number), shape, case.dtype)

    def all_groups(inputs: tuple[Arrays, Arrays]) -> list[jax.Array]:
        per_group, scores = inputs

        def of_group(own: Arrays) -> list[jax.Array]:
            found, results = own | scores, []
            for (left, a), (right, b) in pairs:
                result = "".join(axis for axis in a + b if (axis in a) != (axis in b))
                results.append(jnp.einsum(f"g{a},g{b}->g{result}", found[left], found[right]))
            return results

        empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_group, {k: each[0] for k, each in per_group.items()}))
        # The last group's results are what is returned; a loop's state is overwritten in place.
        return jax.lax.scan(lambda _, own: (of_group(own), None), empty, per_group)[0]

    return all_groups, arrays


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("model", "train", "eval"))
