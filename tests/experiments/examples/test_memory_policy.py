"""Tests of the policy with a memory: resets in the rollout, and what each policy learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from experiments.examples import memory_policy
from experiments.examples.memory_policy import MEM_LEN, ROWS, Maze


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


@pytest.mark.nightly(part="long")
def test_memory_solves_what_no_policy_without_it_can():
    curves = [memory_policy.train(mem_len, updates=300, seed=1, log=print) for mem_len in (MEM_LEN, 0)]
    assert np.mean(curves[0][-3:]) > 0.97
    # 0.5 in the mean; 30 updates are some 5,500 episodes, whose mean has a standard deviation of 0.007.
    assert np.mean(curves[1][-3:]) == pytest.approx(0.5, abs=0.03)
