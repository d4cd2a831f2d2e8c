"""Reinforcement learning with a memory: a policy that must remember its first observation.

    python -m experiments.examples.memory_policy --out=runs/memory_policy

The task is a T-maze (Bakker, 2001). The first observation shows a light, left or right. Then comes a corridor of 4 to
12 steps whose observations are all the same, and a junction where the reward is 1 for turning to the side of the
light. The observation at the junction is the same in all episodes, so a policy without memory turns left with one
probability p whatever the light was. Half of the lights are left: its mean reward is p / 2 + (1 - p) / 2 = 0.5.

The policy is a Transformer-XL with gated residuals (GTrXL; Parisotto et al., 2019) that reads vectors in place of
tokens. Rollouts are a `lax.scan` over single steps with the memory as carried state; rows whose episode has ended are
reset in the same scan. It is trained by advantage actor-critic (A2C) against the same policy without memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import txl_jax
from experiments.examples import comparison
from txl_jax import CompatConfig, ModelConfig, NormPlace, Residual, cli
from txl_jax.cli import setting

CONFIG = ModelConfig(
    n_layer=2,
    d_model=32,
    n_head=2,
    d_head=16,
    d_inner=64,
    init_std=0.1,
    layer_norm=NormPlace.PRE,
    residual=Residual.GATED,
)
ROWS, STEPS, DISCOUNT = 64, 32, 0.97  # Episodes side by side, steps of a rollout.
SHORTEST, LONGEST = 4, 12  # Steps in the corridor.
MEM_LEN = LONGEST + 1  # From the junction back to the light.
LEFT, RIGHT, CORRIDOR, JUNCTION = range(4)  # Observations, one-hot.


class Maze(NamedTuple):
    """State of the episodes [B]."""

    light: jax.Array  # int, LEFT or RIGHT.
    left: jax.Array  # int, steps to the junction.
    time: jax.Array  # int, steps since the start.

    @staticmethod
    def start(key: jax.Array, rows: int) -> "Maze":
        """Returns new episodes."""
        light, length = jax.random.split(key)
        return Maze(
            light=jax.random.randint(light, (rows,), LEFT, RIGHT + 1),
            left=jax.random.randint(length, (rows,), SHORTEST, LONGEST + 1) + 1,
            time=jnp.zeros(rows, jnp.int32),
        )

    def observe(self) -> jax.Array:
        """Returns what the policy sees: floats [B, 4]."""
        seen = jnp.where(self.time == 0, self.light, jnp.where(self.left == 0, JUNCTION, CORRIDOR))
        return jax.nn.one_hot(seen, 4)

    def step(self, key: jax.Array, action: jax.Array) -> tuple["Maze", jax.Array, jax.Array]:
        """Returns the next state, rewards [B], and which episodes have ended, bool [B]; those begin anew."""
        ended = self.left == 0
        reward = jnp.where(ended & (action == self.light), 1.0, 0.0)
        after = self._replace(left=self.left - 1, time=self.time + 1)
        fresh = Maze.start(key, len(action))
        return jax.tree.map(lambda new, old: jnp.where(ended, new, old), fresh, after), reward, ended


class Policy(nn.Module):
    """Logits of the two turns and the value of a state, from an observation and the memory."""

    def setup(self) -> None:
        """Creates the parts."""
        self.observation = nn.Dense(CONFIG.d_model)
        self.core = txl_jax.TransformerXL(CONFIG, CompatConfig(), vocab_size=1)  # It gets no tokens.
        self.heads = nn.Dense(3)

    def __call__(self, observation: jax.Array, memory: txl_jax.Memory) -> tuple[jax.Array, jax.Array, txl_jax.Memory]:
        """Computes logits [B, 2], values [B] and the memory after one observation [B, 4]."""
        hidden, memory = self.core(self.observation(observation)[:, None], memory)
        heads = self.heads(hidden[:, 0])
        return heads[:, :2], heads[:, 2], memory


def act(params: Any, observation: jax.Array, memory: txl_jax.Memory) -> tuple[jax.Array, jax.Array, txl_jax.Memory]:
    """Applies the policy."""
    logits_value_memory: Any = Policy().apply({"params": params}, observation, memory)
    return tuple(logits_value_memory)


class Rollout(NamedTuple):
    """Arrays [STEPS, B] that a rollout collects."""

    log_prob: jax.Array  # Of the turns taken.
    entropy: jax.Array
    value: jax.Array
    reward: jax.Array
    ended: jax.Array


State = tuple[Maze, txl_jax.Memory]


def play(params: Any, state: State, key: jax.Array) -> tuple[State, Rollout]:
    """Plays STEPS steps in all rows with one scan, the memory carried past each step and emptied where one ends."""

    def step(state: State, key: jax.Array) -> tuple[State, Rollout]:
        maze, memory = state
        logits, value, memory = act(params, maze.observe(), memory)
        turn, fresh = jax.random.split(key)
        action = jax.random.categorical(turn, logits)
        maze, reward, ended = maze.step(fresh, action)
        log_probs = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
        return (maze, txl_jax.reset_memory(memory, ended)), Rollout(taken, entropy, value, reward, ended)

    return jax.lax.scan(step, state, jax.random.split(key, STEPS))


def returns_of(rollout: Rollout, last: jax.Array) -> jax.Array:
    """Returns the discounted sums of rewards [STEPS, B]; `last` [B] is the value of the state after the rollout."""

    def back(after: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, ended = now
        total = reward + DISCOUNT * jnp.where(ended, 0, after)
        return total, total

    return jax.lax.scan(back, last, (rollout.reward, rollout.ended), reverse=True)[1]


def actor_critic_loss(params: Any, state: State, key: jax.Array) -> tuple[jax.Array, tuple[State, Rollout]]:
    """Computes the loss of A2C, and the state after the rollout with what it collected."""
    state, rollout = play(params, state, key)
    _, last, _ = act(params, state[0].observe(), state[1])
    returns = jax.lax.stop_gradient(returns_of(rollout, last))
    advantage = returns - jax.lax.stop_gradient(rollout.value)
    loss = jnp.mean(0.5 * (returns - rollout.value) ** 2 - advantage * rollout.log_prob - 0.01 * rollout.entropy)
    return loss, (state, rollout)


def train(mem_len: int, *, updates: int, seed: int, log: Callable[[str], None]) -> list[float]:
    """Trains a policy; returns the mean reward of the episodes that ended, per 10 updates."""
    init_key, maze_key, key = jax.random.split(jax.random.key(seed), 3)
    core = txl_jax.TransformerXL(CONFIG, CompatConfig(), vocab_size=1)
    memory = core.init_memory(batch_size=ROWS, mem_len=mem_len)
    params = Policy().init(init_key, jnp.zeros((ROWS, 4)), memory)["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2e-3))

    @jax.jit
    def ten_updates(params: Any, moments: Any, state: State, key: jax.Array) -> Any:
        def update(carry: Any, key: jax.Array) -> Any:
            params, moments, state = carry
            grads, (state, rollout) = jax.grad(actor_critic_loss, has_aux=True)(params, state, key)
            changes, moments = optimizer.update(grads, moments)
            return (optax.apply_updates(params, changes), moments, state), (rollout.reward.sum(), rollout.ended.sum())

        carry, (rewards, episodes) = jax.lax.scan(update, (params, moments, state), jax.random.split(key, 10))
        return *carry, rewards.sum() / episodes.sum()

    moments, state = optimizer.init(params), (Maze.start(maze_key, ROWS), memory)
    curve: list[float] = []
    for number in range(updates // 10):
        params, moments, state, reward = ten_updates(params, moments, state, jax.random.fold_in(key, number))
        curve.append(float(reward))
        if (number + 1) % 10 == 0:
            log(f"memory {mem_len:2}  update {10 * (number + 1):4}  reward {np.mean(curve[-10:]):.3f}")
    return curve


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The folder, and how long it takes."""

    out: str = setting("runs/memory_policy", "Folder of the result and the picture.", path=True)
    updates: int = setting(300, "Updates of each of the two policies.", at_least=10)
    seed: int = setting(0, "Seed of weights, mazes and turns.")


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the example."""
    del job
    rewards = {
        name: train(mem_len, updates=plan.updates, seed=plan.seed, log=print)
        for name, mem_len in (("with memory", MEM_LEN), ("without memory", 0))
    }
    comparison.write(
        plan.out,
        rewards,
        measure="reward",
        bounds="best possible 1, without memory 0.5",
        title="Turning to the light seen 5 to 13 steps ago",
    )


if __name__ == "__main__":
    cli.main(run, Plan)
