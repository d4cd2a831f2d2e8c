"""Tests of the policy with a memory: the maze, resets in the rollout, and what each policy learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from experiments.examples import memory_policy
from experiments.examples.memory_policy import CORRIDOR, JUNCTION, LEFT, LONGEST, MEM_LEN, RIGHT, ROWS, SHORTEST, Maze


def episode(maze: Maze, action: int):
    """Observations and rewards of row 0 up to its end."""
    seen, rewards, ended = [], [], False
    while not ended:
        seen.append(int(maze.observe()[0].argmax()))
        maze, reward, ends = maze.step(jax.random.key(len(seen)), jnp.full(len(maze.light), action))
        rewards.append(float(reward[0]))
        ended = bool(ends[0])
    return seen, rewards, maze


@pytest.mark.parametrize("light", [LEFT, RIGHT])
def test_an_episode_is_a_light_a_corridor_and_a_junction(light):
    maze = Maze.start(jax.random.key(0), 1)._replace(light=jnp.asarray([light]))
    steps = int(maze.left[0]) - 1
    assert SHORTEST <= steps <= LONGEST
    seen, rewards, after = episode(maze, light)
    assert seen == [light, *[CORRIDOR] * steps, JUNCTION]
    assert rewards == [0.0] * (steps + 1) + [1.0]
    assert int(after.time[0]) == 0  # It begins anew.
    assert episode(maze, 1 - light)[1][-1] == 0


@pytest.mark.full
def test_a_row_whose_episode_ends_forgets_it():
    core = txl_jax.TransformerXL(memory_policy.CONFIG, txl_jax.CompatConfig(), vocab_size=1)
    memory = core.init_memory(batch_size=ROWS, mem_len=MEM_LEN)
    params = memory_policy.Policy().init(jax.random.key(0), jnp.zeros((ROWS, 4)), memory)["params"]
    assert set(params["core"]) == {"stack", "final_norm"}  # No table of tokens.
    state = Maze.start(jax.random.key(2), ROWS), memory
    (maze, memory), rollout = jax.jit(memory_policy.play)(params, state, jax.random.key(3))
    assert rollout.ended.sum() > ROWS
    np.testing.assert_array_equal(memory.valid, np.minimum(maze.time, MEM_LEN))


def test_returns_stop_at_the_end_of_an_episode():
    reward = jnp.asarray([[0.0], [1.0], [0.0]])
    ended = jnp.asarray([[False], [True], [False]])
    rollout = memory_policy.Rollout(reward, reward, reward, reward, ended)
    gamma = memory_policy.DISCOUNT
    np.testing.assert_allclose(
        memory_policy.returns_of(rollout, jnp.asarray([5.0]))[:, 0], [gamma, 1.0, 5 * gamma], rtol=1e-6
    )


@pytest.mark.nightly(part="long")
def test_memory_solves_what_no_policy_without_it_can():
    curves = [memory_policy.train(mem_len, updates=300, seed=1, log=print) for mem_len in (MEM_LEN, 0)]
    assert np.mean(curves[0][-3:]) > 0.97
    # 0.5 in the mean; 30 updates are some 5,500 episodes, whose mean has a standard deviation of 0.007.
    assert np.mean(curves[1][-3:]) == pytest.approx(0.5, abs=0.03)
