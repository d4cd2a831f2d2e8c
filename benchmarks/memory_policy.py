"""Compares memory policies on T-mazes: with GTrXL's gates, without gates, and without memory.

    for maze in short long; do
        python -m benchmarks.memory_policy --maze=$maze --out=benchmarks/memory_policy.csv
    done
    python -m benchmarks.memory_policy --summary

The policies are trained by docs/examples/memory_policy.py. GTrXL (Parisotto et al., 2019) replaces
the sum of each residual connection by a gate like a GRU's. Otherwise its layers are pre-norm, as in
the example, with a ReLU before each gate.

Policies with memory are trained with three learning rates and five seeds each.
"""

import argparse
import csv
import functools
import importlib.metadata
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import txl_jax
from benchmarks import records
from txl_jax.config import ModelConfig
from txl_jax.modules.attention import Attention, LayerContext
from txl_jax.modules.block import FeedForward, Stack, layer_norm
from txl_jax.modules.dropout import dropout
from txl_jax.modules.positions import encoding_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "memory_policy.py"
TABLE = ROOT / "benchmarks" / "memory_policy.csv"
COLUMNS = (
    "machine",
    "date",
    "versions",
    "command",
    "maze",
    "policy",
    "memory",
    "parameters",
    "learning rate",
    "seed",
    "reward",  # In the last tenth of the updates.
    "steps to 0.95",  # Empty if the policy did not reach it.
    "CPU seconds",  # Of training the seeds of this rate together, divided by their number.
    "curve",  # Rewards after each update, 2,048 environment steps each.
)
SEEDS = 5
POLICIES = ("no gates", "GTrXL's gates", "no memory")
RATES = (1e-3, 3e-3, 1e-2)
GOAL = 0.95
# Updates over which the reward is averaged, some 1,000 episodes of the short maze.
SMOOTHING = 5


class Task(NamedTuple):
    """A maze, and the memory of the policies."""

    shortest: int
    longest: int
    mem_len: int
    updates: int


TASKS = {
    "short": Task(4, 12, mem_len=13, updates=30),
    "long": Task(20, 40, mem_len=41, updates=50),
}


class Gate(nn.Module):
    """GTrXL's gate like a GRU's, which takes the place of x + y.

    At first it is close to x, because its bias is 2.
    """

    bias: float = 2.0

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Computes the gate of a layer's input x and its branch's output y, [B, L, D] each."""
        dense = functools.partial(nn.Dense, x.shape[-1], use_bias=False)
        bias = nn.initializers.constant(-self.bias)
        update_x = nn.Dense(x.shape[-1], bias_init=bias, name="update_x")
        reset = nn.sigmoid(dense(name="reset_y")(y) + dense(name="reset_x")(x))
        update = nn.sigmoid(dense(name="update_y")(y) + update_x(x))
        candidate = jnp.tanh(dense(name="candidate_y")(y) + dense(name="candidate_x")(reset * x))
        return (1 - update) * x + update * candidate


class GatedBlock(nn.Module):
    """A pre-norm layer whose residual connections are gates."""

    config: ModelConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, memory: jax.Array, context: LayerContext) -> jax.Array:
        """Applies the layer: [B, L, D], memory [B, M, D] -> [B, L, D]."""
        c = self.config
        parameters = encoding_of(c).layer_parameters(context.parameters)
        context = context.replace(parameters=parameters)
        mem_len = memory.shape[1]
        normed = layer_norm("attention_norm", c)(jnp.concatenate([memory, inputs], axis=1))
        states = (normed[:, :mem_len], normed[:, mem_len:])
        attended = Attention(c, name="attention")(states[1], states, context)
        middle = Gate(name="attention_gate")(inputs, nn.relu(attended))

        normed = layer_norm("feed_forward_norm", c)(middle)
        fed = FeedForward(c, name="feed_forward")(normed, deterministic=context.deterministic)
        return Gate(name="feed_forward_gate")(middle, nn.relu(fed))


class GatedStack(Stack):
    """N layers with gates."""

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies all layers like `Stack`."""
        context = context.replace(parameters=encoding_of(self.config).shared_parameters())
        hidden = inputs
        layer_inputs = []
        for number in range(self.config.n_layer):
            layer_inputs.append(hidden)
            layer = GatedBlock(self.config, name=f"layer_{number}")
            hidden = layer(hidden, memory[number], context)
        return hidden, jnp.stack(layer_inputs)


class GatedTransformerXL(txl_jax.TransformerXL):
    """A Transformer-XL with gates, for vectors instead of tokens."""

    def setup(self) -> None:
        """Creates the submodules."""
        self.stack = GatedStack(self.config)
        self.final_norm = layer_norm("final_norm", self.config)
        self.drop_input = dropout(self.config, 0.0)
        self.drop_output = dropout(self.config, 0.0)


def load_example() -> ModuleType:
    """Imports docs/examples/memory_policy.py."""
    spec = importlib.util.spec_from_file_location("memory_policy_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def steps_to_goal(rewards: np.ndarray, steps_per_update: int) -> int | None:
    """Returns the environment steps until the mean of SMOOTHING rewards reaches GOAL, or None."""
    means = np.convolve(rewards, np.full(SMOOTHING, 1 / SMOOTHING), mode="valid")
    reached = np.flatnonzero(means >= GOAL)
    if not reached.size:
        return None
    return int(reached[0] + SMOOTHING) * steps_per_update


def measure(task_name: str, policy_name: str) -> list[dict[str, Any]]:
    """Trains a policy on a maze with all rates and seeds. Returns the rows of the table."""
    example = load_example()
    task = TASKS[task_name]
    core_class = GatedTransformerXL if policy_name == "GTrXL's gates" else txl_jax.TransformerXL
    policy = example.Policy(core_class(example.CONFIG, vocab_size=1))
    mem_len = 0 if policy_name == "no memory" else task.mem_len
    rates = RATES if mem_len else RATES[1:2]

    def train(rate: jax.Array, seed: jax.Array) -> jax.Array:
        _, rewards = example.train(
            policy,
            mem_len=mem_len,
            updates=task.updates,
            learning_rate=rate,
            seed=seed,
            new_maze=functools.partial(
                example.start_maze, shortest=task.shortest, longest=task.longest
            ),
        )
        return rewards

    # All seeds of a rate are trained side by side.
    train_seeds = jax.jit(jax.vmap(train, in_axes=(None, 0)))
    seeds = jnp.arange(SEEDS)
    compiled = train_seeds.lower(rates[0], seeds).compile()

    memory = policy.core.init_memory(batch_size=1, mem_len=mem_len)
    observation = jnp.zeros((1, 1, example.N_OBSERVATION))
    params = jax.eval_shape(policy.init, jax.random.key(0), observation, memory)
    n_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))

    steps_per_update = example.ROWS * example.STEPS
    rows = []
    for rate in rates:
        begin = time.process_time()
        curves = np.asarray(compiled(rate, seeds))
        seconds = (time.process_time() - begin) / SEEDS
        for seed, curve in enumerate(curves):
            last_rewards = curve[-(task.updates // 10) :]
            steps = steps_to_goal(curve, steps_per_update)
            row = {
                "maze": task_name,
                "policy": policy_name,
                "memory": mem_len,
                "parameters": n_parameters,
                "learning rate": rate,
                "seed": seed,
                "reward": f"{last_rewards.mean():.3f}",
                "steps to 0.95": "" if steps is None else steps,
                "CPU seconds": f"{seconds:.1f}",
            }
            print(*row.values(), flush=True)
            row["curve"] = " ".join(f"{reward:.3f}" for reward in curve)
            rows.append(row)
    return rows


def summary(table: Path) -> list[str]:
    """Returns a line for each maze, policy and learning rate: medians and ranges over the seeds."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for (maze, policy, rate), seeds in by_rate(rows).items():
        steps = [steps_of(row) for row in seeds]
        median = statistics.median(steps)
        speed = f"{median:,.0f} steps to {GOAL} ({min(steps):,.0f} to {max(steps):,.0f})"

        rewards = [float(row["reward"]) for row in seeds]
        median = statistics.median(rewards)
        reward = f"{median:.3f} ({min(rewards):.3f} to {max(rewards):.3f})"
        lines.append(f"{maze}, {policy}, {rate}: {speed}, at the end reward {reward}")
    return lines


def by_rate(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Returns the rows of the seeds of each maze, policy and learning rate."""
    seeds: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        seeds.setdefault((row["maze"], row["policy"], row["learning rate"]), []).append(row)
    return seeds


def best_rate(
    seeds_by_rate: dict[tuple[str, str, str], list[dict[str, str]]], maze: str, policy: str
) -> list[dict[str, str]]:
    """Returns the rows of the learning rate with the lowest median of steps to GOAL.

    If medians are equal, the slowest seed decides.
    """
    rates = []
    for (rows_maze, rows_policy, _), seeds in seeds_by_rate.items():
        if (rows_maze, rows_policy) == (maze, policy):
            rates.append(seeds)

    def median_and_slowest(seeds: list[dict[str, str]]) -> tuple[float, float]:
        steps = [steps_of(row) for row in seeds]
        return statistics.median(steps), max(steps)

    return min(rates, key=median_and_slowest)


def steps_of(row: dict[str, str]) -> float:
    """Returns the steps to GOAL of a row, or infinity if it was not reached."""
    return float(row["steps to 0.95"] or math.inf)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a maze and appends rows to a table, or prints the summary of a table."""
    parser = argparse.ArgumentParser(description="Memory policies on T-mazes.")
    parser.add_argument("--maze", choices=tuple(TASKS))
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--summary", action="store_true", help="print medians of --out")
    parsed = parser.parse_args(arguments)
    if parsed.summary:
        print(*summary(parsed.out), sep="\n")
        return
    if parsed.maze is None:
        parser.error("--maze or --summary must be passed")

    command = f"python -m benchmarks.memory_policy --maze={parsed.maze} --out={parsed.out}"
    origin = records.origin(command, records.describe_versions("jax", "flax", "optax"))
    for policy_name in POLICIES:
        rows = [origin | row for row in measure(parsed.maze, policy_name)]
        records.append(parsed.out, COLUMNS, rows)


if __name__ == "__main__":
    main()
