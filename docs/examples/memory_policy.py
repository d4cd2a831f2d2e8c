"""PPO with a memory: a policy that must remember its first observation.

    python docs/examples/memory_policy.py

The task is a T-maze (Bakker, 2001). The first observation shows a light, left or right. Then comes
a corridor of 4 to 12 steps whose observations are all the same, and a junction where the reward is
1 for turning to the side of the light. The observation at the junction is the same in all episodes,
so a policy without memory turns left with one probability p whatever the light was. Half of the
lights are left: its mean reward is p / 2 + (1 - p) / 2 = 0.5.

The policy is a Transformer-XL that reads vectors instead of tokens. It acts one step at a time. To
train by PPO (Schulman et al., 2017), it reads windows of L steps at once, from the memory that was
stored at the start of each window.

Letters: B episodes side by side, L steps of a window, M steps of the memory, O numbers of an
observation, A actions.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import txl_jax
from txl_jax import AttentionWindow, CompatConfig, ModelConfig, NormPlace

CONFIG = ModelConfig(
    n_layer=2,
    d_model=32,
    n_head=2,
    d_head=16,
    d_inner=64,
    init_std=0.1,
    layer_norm=NormPlace.PRE,
    # With same_length, a step of a window attends to itself and the M steps before it, like a step
    # that is read alone with a memory of M steps.
    compat=CompatConfig(same_length_window=AttentionWindow.MEM_LEN_PLUS_ONE),
)
ROWS = 64  # B
STEPS = 32  # L
SHORTEST = 4  # Steps in the corridor.
LONGEST = 12
MEM_LEN = LONGEST + 1  # M, from the junction back to the light.

LEARNING_RATE = 2e-3
DISCOUNT = 0.97  # gamma
TRACE = 0.95  # lambda of generalized advantage estimation.
EPOCHS = 3
MINIBATCHES = 4  # Each has ROWS / MINIBATCHES whole windows.
CLIP = 0.2
VALUE_WEIGHT = 0.5
ENTROPY_WEIGHT = 0.01

# Observations, one-hot. The first two are also the actions at the junction.
LEFT, RIGHT, CORRIDOR, JUNCTION = range(4)
N_OBSERVATION = 4  # O
N_ACTION = 2  # A


# The environment


class Maze(NamedTuple):
    """State of the episodes. Fields are [B] here, and may have more axes: [B, ...]."""

    light: jax.Array  # int, LEFT or RIGHT.
    distance: jax.Array  # int, steps to the junction.
    time: jax.Array  # int, steps since the start.


def start_maze(key, shortest=SHORTEST, longest=LONGEST):
    """Returns new episodes."""
    light_key, length_key = jax.random.split(key)
    return Maze(
        light=jax.random.randint(light_key, (ROWS,), LEFT, RIGHT + 1),
        distance=1 + jax.random.randint(length_key, (ROWS,), shortest, longest + 1),
        time=jnp.zeros(ROWS, jnp.int32),
    )


def observe(maze):
    """Returns the observations: floats [B, O]."""
    place = jnp.where(maze.distance == 0, JUNCTION, CORRIDOR)
    return jax.nn.one_hot(jnp.where(maze.time == 0, maze.light, place), N_OBSERVATION)


def choose_rows(rows, new, old):
    """Returns `new` in some rows, bool [B], and `old` in the others. Both have fields [B, ...]."""
    # vmap takes one row of each field at a time, so fields may have any shape after B.
    return jax.tree.map(lambda a, b: jax.vmap(jnp.where)(rows, a, b), new, old)


def step_maze(maze, action, fresh):
    """Returns the next state, rewards [B] and which episodes have ended, bool [B].

    Ended episodes continue with those of `fresh`, a Maze.
    """
    ended = maze.distance == 0
    reward = jnp.where(ended & (action == maze.light), 1.0, 0.0)
    moved = maze._replace(distance=maze.distance - 1, time=maze.time + 1)
    return choose_rows(ended, fresh, moved), reward, ended


# The policy


class Policy(nn.Module):
    """Logits of the actions and the values of states, from observations and the memory."""

    core: nn.Module = txl_jax.TransformerXL(CONFIG, vocab_size=1)  # It gets no tokens.

    @nn.compact
    def __call__(self, observations, memory, ended=None):
        """Reads L steps. One step (L = 1) is a window too.

        Args:
          observations: [B, L, O].
          memory: Memory of the M steps before.
          ended: bool [B, L], steps that end an episode. Later steps do not attend to them.

        Returns:
          Logits [B, L, A], values [B, L] and the memory after the steps.
        """
        embedded = nn.Dense(CONFIG.d_model, name="observation")(observations)
        hidden, memory = self.core(embedded, memory, same_length=True, ended=ended)
        heads = nn.Dense(N_ACTION + 1, name="heads")(hidden)
        return heads[..., :N_ACTION], heads[..., N_ACTION], memory


class Steps(NamedTuple):
    """Steps of all episodes: [B, ...] for one step, [B, L, ...] for windows."""

    observation: jax.Array  # [B, L, O]
    action: jax.Array  # int [B, L]
    log_prob: jax.Array  # [B, L], of the action when it was taken.
    value: jax.Array  # [B, L], as estimated when the action was taken.
    reward: jax.Array  # [B, L]
    ended: jax.Array  # bool [B, L], whether the step was the last of its episode.


def log_prob_of(logits, action):
    """Returns the log probabilities of actions: [..., A] and int [...] -> [...]."""
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def play(policy, params, maze, memory, key, new_maze=start_maze):
    """Plays STEPS steps in all rows, one at a time.

    Returns:
      The maze and the memory after the steps, the steps [B, L], and the value [B] of the state
      after them.
    """

    def step(state, key):
        maze, memory = state
        action_key, maze_key = jax.random.split(key)
        observation = observe(maze)
        logits, value, memory = policy.apply(params, observation[:, None], memory)
        action = jax.random.categorical(action_key, logits[:, 0])
        maze, reward, ended = step_maze(maze, action, new_maze(maze_key))
        # A new episode begins with an empty memory.
        memory = txl_jax.reset_memory(memory, ended)
        played = Steps(
            observation=observation,
            action=action,
            log_prob=log_prob_of(logits[:, 0], action),
            value=value[:, 0],
            reward=reward,
            ended=ended,
        )
        return (maze, memory), played

    (maze, memory), steps = jax.lax.scan(step, (maze, memory), jax.random.split(key, STEPS))
    _, last_value, _ = policy.apply(params, observe(maze)[:, None], memory)
    # The scan has stacked the steps as [L, B].
    steps = jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), steps)
    return maze, memory, steps, last_value[:, 0]


# Learning


class Windows(NamedTuple):
    """What PPO learns from: rows of L steps."""

    memory: txl_jax.Memory  # The memory before the first step, [N, B, M, D].
    steps: Steps  # [B, L]
    advantage: jax.Array  # [B, L]


def estimate_advantages(steps, last_value):
    """Computes advantages [B, L] (Schulman et al., 2016). Nothing flows across episode ends.

    They are not normalized: once every episode is solved they are tiny, and dividing by their
    standard deviation would make full-sized steps of them.
    """

    def step(carry, now):
        next_value, next_advantage = carry
        value, reward, ended = now
        continues = jnp.where(ended, 0.0, 1.0)
        error = reward + DISCOUNT * continues * next_value - value
        advantage = error + DISCOUNT * TRACE * continues * next_advantage
        return (value, advantage), advantage

    end = (last_value, jnp.zeros_like(last_value))
    in_time = (steps.value.T, steps.reward.T, steps.ended.T)
    _, advantages = jax.lax.scan(step, end, in_time, reverse=True)
    return advantages.T


def ppo_loss(params, policy, windows):
    """Computes the loss of a minibatch. The windows' memory is a constant."""
    steps = windows.steps
    logits, values, _ = policy.apply(params, steps.observation, windows.memory, steps.ended)

    # The clipped objective of the policy.
    ratio = jnp.exp(log_prob_of(logits, steps.action) - steps.log_prob)
    clipped_ratio = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * windows.advantage, clipped_ratio * windows.advantage).mean()

    returns = windows.advantage + steps.value
    value_loss = jnp.square(returns - values).mean()

    log_probs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return -gain + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy


def take_rows(windows, rows):
    """Returns the windows of some rows, int [b]."""
    return Windows(
        memory=txl_jax.Memory(
            hidden=windows.memory.hidden[:, rows],
            valid=windows.memory.valid[rows],
        ),
        steps=jax.tree.map(lambda array: array[rows], windows.steps),
        advantage=windows.advantage[rows],
    )


def learn(policy, optimizer, params, moments, windows, key):
    """Takes EPOCHS * MINIBATCHES optimizer steps. Returns parameters and the optimizer's state."""

    def step(state, rows):
        params, moments = state
        gradients = jax.grad(ppo_loss)(params, policy, take_rows(windows, rows))
        changes, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, changes), moments), None

    # Each epoch has all rows once, in another order.
    epoch_keys = jax.random.split(key, EPOCHS)
    orders = jax.vmap(jax.random.permutation, in_axes=(0, None))(epoch_keys, ROWS)
    minibatches = orders.reshape(EPOCHS * MINIBATCHES, ROWS // MINIBATCHES)
    (params, moments), _ = jax.lax.scan(step, (params, moments), minibatches)
    return params, moments


def mean_return(steps, earlier):
    """Computes the mean return (undiscounted sum of rewards) of the episodes that ended.

    Args:
      steps: Steps [B, L].
      earlier: [B], rewards that the current episode of each row got before these steps.

    Returns:
      The mean, which is nan if no episode ended, and `earlier` for the next steps.
    """

    def step(earlier, now):
        reward, ended = now
        total = earlier + reward
        return jnp.where(ended, 0.0, total), jnp.where(ended, total, 0.0)

    earlier, totals = jax.lax.scan(step, earlier, (steps.reward.T, steps.ended.T))
    return totals.sum() / steps.ended.sum(), earlier


def train(policy, *, mem_len, updates, learning_rate=LEARNING_RATE, seed=0, new_maze=start_maze):
    """Trains a policy on `updates` rollouts of ROWS * STEPS steps.

    Returns:
      The parameters, and the mean return of the episodes that ended in each rollout, [updates]. A
      rollout in which none ended has nan.
    """
    init_key, maze_key, key = jax.random.split(jax.random.key(seed), 3)
    memory = policy.core.init_memory(batch_size=ROWS, mem_len=mem_len)
    maze = new_maze(maze_key)
    params = policy.init(init_key, observe(maze)[:, None], memory)
    # Gradients are tiny once the policy solves every episode. With Adam's usual eps of 1e-8, they
    # would still make full steps.
    adam = optax.adam(learning_rate, eps=1e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), adam)

    def update(state, key):
        params, moments, maze, memory, earlier = state
        play_key, learn_key = jax.random.split(key)
        maze, next_memory, steps, last_value = play(
            policy, params, maze, memory, play_key, new_maze
        )

        # The memory before the rollout is stored with it.
        windows = Windows(memory, steps, estimate_advantages(steps, last_value))
        params, moments = learn(policy, optimizer, params, moments, windows, learn_key)
        reward, earlier = mean_return(steps, earlier)
        return (params, moments, maze, next_memory, earlier), reward

    state = (params, optimizer.init(params), maze, memory, jnp.zeros(ROWS))
    (params, *_), rewards = jax.lax.scan(update, state, jax.random.split(key, updates))
    return params, rewards


def main(updates=40):
    """Prints and returns the mean reward of both policies in the last 20 updates."""
    compiled = jax.jit(train, static_argnames=("policy", "mem_len", "updates"))
    reward = {}
    for name, mem_len in {"with memory": MEM_LEN, "without memory": 0}.items():
        _, rewards = compiled(Policy(), mem_len=mem_len, updates=updates)
        reward[name] = round(float(rewards[-20:].mean()), 3)
    print(f"mean reward in the last 20 of {updates} updates, at best 0.5 without memory: {reward}")
    return reward


if __name__ == "__main__":
    main()
