"""Reinforcement learning with a memory: a policy that must remember its first observation.

    python docs/examples/memory_policy.py

The task is a T-maze (Bakker, 2001). The first observation shows a light, left or right. Then comes
a corridor of 4 to 12 steps whose observations are all the same, and a junction where the reward is
1 for turning to the side of the light. The observation at the junction is the same in all episodes,
so a policy without memory turns left with one probability p whatever the light was. Half of the
lights are left: its mean reward is p / 2 + (1 - p) / 2 = 0.5.

The policy is a Transformer-XL that reads vectors instead of tokens. Rollouts are a `lax.scan` over
single steps with the memory as carried state; rows whose episode has ended are reset in the same
scan. It is trained by advantage actor-critic (A2C).
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import txl_jax
from txl_jax import ModelConfig, NormPlace

SIZES = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
CONFIG = ModelConfig(**SIZES, init_std=0.1, layer_norm=NormPlace.PRE)
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
    def start(key):
        """Returns new episodes."""
        light, length = jax.random.split(key)
        return Maze(
            light=jax.random.randint(light, (ROWS,), LEFT, RIGHT + 1),
            left=jax.random.randint(length, (ROWS,), SHORTEST, LONGEST + 1) + 1,
            time=jnp.zeros(ROWS, jnp.int32),
        )

    def observe(self):
        """Returns the observations: floats [B, 4]."""
        seen = jnp.where(self.time == 0, self.light, jnp.where(self.left == 0, JUNCTION, CORRIDOR))
        return jax.nn.one_hot(seen, 4)

    def step(self, key, action):
        """Returns the next state, rewards [B] and which episodes have ended, bool [B].

        Ended ones start again.
        """
        ended = self.left == 0
        reward = jnp.where(ended & (action == self.light), 1.0, 0.0)
        after = self._replace(left=self.left - 1, time=self.time + 1)
        return (
            jax.tree.map(lambda new, old: jnp.where(ended, new, old), Maze.start(key), after),
            reward,
            ended,
        )


class Policy(nn.Module):
    """Logits of the two turns and the value of a state, from an observation and the memory."""

    def setup(self):
        """Creates the layers."""
        self.observation = nn.Dense(CONFIG.d_model)
        self.core = txl_jax.TransformerXL(CONFIG, vocab_size=1)  # It gets no tokens.
        self.heads = nn.Dense(3)

    def __call__(self, observation, memory):
        """Computes logits [B, 2], values [B] and the memory after one observation [B, 4]."""
        hidden, memory = self.core(self.observation(observation)[:, None], memory)
        heads = self.heads(hidden[:, 0])
        return heads[:, :2], heads[:, 2], memory


def play(params, state, key):
    """Plays STEPS steps in all rows.

    Returns the state, and [STEPS, B]: log prob, entropy, value, reward, ended.
    """

    def step(state, key):
        maze, memory = state
        logits, value, memory = Policy().apply(params, maze.observe(), memory)
        turn, fresh = jax.random.split(key)
        action = jax.random.categorical(turn, logits)
        maze, reward, ended = maze.step(fresh, action)
        log_probs = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
        return (maze, txl_jax.reset_memory(memory, ended)), (taken, entropy, value, reward, ended)

    return jax.lax.scan(step, state, jax.random.split(key, STEPS))


def actor_critic_loss(params, state, key):
    """Computes the A2C loss, and the state after the rollout with its mean reward per episode."""

    def discount(after, now):
        reward, ended = now
        total = reward + DISCOUNT * jnp.where(ended, 0, after)
        return total, total

    state, (taken, entropy, value, reward, ended) = play(params, state, key)
    _, last, _ = Policy().apply(params, state[0].observe(), state[1])
    returns = jax.lax.stop_gradient(jax.lax.scan(discount, last, (reward, ended), reverse=True)[1])
    advantage = returns - jax.lax.stop_gradient(value)
    loss = jnp.mean(0.5 * (returns - value) ** 2 - advantage * taken - 0.01 * entropy)
    return loss, (state, reward.sum() / ended.sum())


def train(mem_len, *, updates, seed=0):
    """Trains a policy. Returns the mean reward of the episodes that ended in each update."""
    init_key, maze_key, key = jax.random.split(jax.random.key(seed), 3)
    core = txl_jax.TransformerXL(CONFIG, vocab_size=1)
    memory = core.init_memory(batch_size=ROWS, mem_len=mem_len)
    params = Policy().init(init_key, jnp.zeros((ROWS, 4)), memory)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2e-3))

    def update(carry, key):
        params, moments, state = carry
        grads, (state, reward) = jax.grad(actor_critic_loss, has_aux=True)(params, state, key)
        changes, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, changes), moments, state), reward

    carry = params, optimizer.init(params), (Maze.start(maze_key), memory)
    return jax.jit(jax.lax.scan, static_argnums=0)(update, carry, jax.random.split(key, updates))[1]


def main(updates=300):
    """Prints and returns the mean reward of both policies in the last 30 updates."""
    memories = {"with memory": MEM_LEN, "without memory": 0}
    reward = {
        name: float(train(mem_len, updates=updates)[-30:].mean())
        for name, mem_len in memories.items()
    }
    print(f"reward of the last 30 of {updates} updates, 0.5 at best without memory: {reward}")
    return reward


if __name__ == "__main__":
    main()
