"""Tests docs/examples/memory_policy.py, and the gates of benchmarks/memory_policy.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from benchmarks import memory_policy as benchmark

pytestmark = pytest.mark.full

KEYS = jax.random.split(jax.random.key(0), 8)


@pytest.fixture(scope="module")
def example():
    """The script as a module."""
    return benchmark.load_example()


def with_random_parameters(policy, memory):
    """Parameters that make the actions and values depend on the past."""
    params = policy.init(KEYS[0], jnp.zeros((len(memory.valid), 1, 4)), memory)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(KEYS[1], len(leaves))
    noisy = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)


@pytest.mark.parametrize(
    ("mem_len", "gated"),
    [
        pytest.param(13, False, id="to the start of each episode"),
        pytest.param(5, True, id="shorter, with gates"),
        pytest.param(0, False, id="no memory"),
    ],
)
def test_a_window_computes_what_the_rollout_computed(example, mem_len, gated):
    """Log probabilities, values and the memory after the window, of the second window of a rollout.

    Without the ends of episodes, log probabilities differ.
    """
    core_class = benchmark.GatedTransformerXL if gated else txl_jax.TransformerXL
    policy = example.Policy(core_class(example.CONFIG, vocab_size=1))
    memory = policy.core.init_memory(batch_size=example.ROWS, mem_len=mem_len)
    params = with_random_parameters(policy, memory)
    play = jax.jit(functools.partial(example.play, policy))
    maze, before, _, _ = play(params, example.start_maze(KEYS[2]), memory, KEYS[3])
    _, after, steps, _ = play(params, maze, before, KEYS[4])
    assert steps.ended.sum() > 2 * example.ROWS, "episodes end within the windows"

    logits, values, memory = policy.apply(params, steps.observation, before, steps.ended)

    log_prob = example.log_prob_of(logits, steps.action)
    np.testing.assert_allclose(log_prob, steps.log_prob, rtol=0, atol=5e-6)
    np.testing.assert_allclose(values, steps.value, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(memory.valid, after.valid)
    np.testing.assert_allclose(memory.hidden, after.hidden, rtol=0, atol=5e-6)

    if mem_len:
        logits, _, _ = policy.apply(params, steps.observation, before)
        log_prob = example.log_prob_of(logits, steps.action)
        assert np.abs(log_prob - steps.log_prob).max() > 0.01


def test_gradients_reach_back_to_the_start_of_the_window_or_episode(example):
    policy = example.Policy()
    memory = policy.core.init_memory(batch_size=1, mem_len=13)
    params = with_random_parameters(policy, memory)
    observations = jax.random.normal(KEYS[5], (1, 10, 4))

    def last_value(observations, ended):
        _, values, _ = policy.apply(params, observations, memory, ended)
        return values[0, -1]

    ended = np.zeros((1, 10), bool)
    gradient = jax.grad(last_value)(observations, ended)
    assert np.all(np.abs(gradient).max(axis=2) > 1e-6)

    ended[0, 3] = True
    gradient = jax.grad(last_value)(observations, ended)
    assert np.all(gradient[0, :4] == 0)
    assert np.all(np.abs(gradient[0, 4:]).max(axis=1) > 1e-6)


def test_a_policy_remembers_as_many_steps_as_its_layers_have_memory_together(example):
    """N * M = 16 steps, in a window of 20 steps from an empty memory of 8."""
    policy = example.Policy()
    memory = policy.core.init_memory(batch_size=1, mem_len=8)
    params = with_random_parameters(policy, memory)

    def last_value(observations):
        _, values, _ = policy.apply(params, observations, memory)
        return values[0, -1]

    gradient = jax.grad(last_value)(jax.random.normal(KEYS[5], (1, 20, 4)))

    depends = np.abs(gradient).max(axis=(0, 2)) > 0
    assert depends.tolist() == [False] * 3 + [True] * 17  # 16 steps before the last, and itself.


def test_advantages_are_sums_of_discounted_errors(example):
    """As the definition says, from each step to the end of its episode or window."""
    rng = np.random.default_rng(0)
    value, reward = rng.normal(size=(2, 3, 7))
    last_value = rng.normal(size=3)
    ended = rng.random((3, 7)) < 0.3
    ended[0] = False
    steps = example.Steps(None, None, None, value, reward, ended)

    advantages = example.estimate_advantages(steps, last_value)

    next_value = np.concatenate([value[:, 1:], last_value[:, None]], axis=1)
    error = reward + example.DISCOUNT * np.where(ended, 0, next_value) - value
    for row in range(3):
        for step in range(7):
            expected = 0
            for later in range(step, 7):
                expected += (example.DISCOUNT * example.TRACE) ** (later - step) * error[row, later]
                if ended[row, later]:
                    break
            assert advantages[row, step] == pytest.approx(expected, abs=1e-5)


def test_returns_are_sums_over_whole_episodes(example):
    """Rewards come at any step, and episodes begin in the steps before."""
    reward = jnp.asarray([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    ended = jnp.asarray([[False, True, False], [False, False, False]])
    steps = example.Steps(None, None, None, None, reward, ended)

    mean, earlier = example.mean_return(steps, jnp.asarray([100.0, 200.0]))
    assert mean == 103
    np.testing.assert_array_equal(earlier, [4, 256])

    none_ended = steps._replace(ended=jnp.zeros((2, 3), bool))
    mean, _ = example.mean_return(none_ended, earlier)
    assert np.isnan(mean)


def test_rows_are_chosen_in_fields_of_any_shape(example):
    """With as many rows as columns too, where a mask [B] would choose columns."""
    new = (jnp.ones(2), jnp.ones((2, 2)))
    chosen = example.choose_rows(jnp.asarray([True, False]), new, jax.tree.map(jnp.zeros_like, new))
    np.testing.assert_array_equal(chosen[0], [1, 0])
    np.testing.assert_array_equal(chosen[1], [[1, 1], [0, 0]])


def test_minibatches_have_whole_windows(example):
    """Rows of every array, the memory's among them."""
    hidden = jnp.broadcast_to(jnp.arange(6.0)[None, :, None, None], (2, 6, 3, 4))
    rows = jnp.arange(6)
    memory = txl_jax.Memory(hidden=hidden, valid=rows)
    windows = example.Windows(memory, example.Steps(*[rows] * 6), rows)

    taken = example.take_rows(windows, jnp.asarray([4, 1]))

    np.testing.assert_array_equal(taken.memory.hidden[0, :, 0, 0], [4, 1])
    assert taken.memory.hidden.shape == (2, 2, 3, 4)
    for array in (taken.memory.valid, *taken.steps, taken.advantage):
        np.testing.assert_array_equal(array, [4, 1])


def test_the_maze_rewards_the_side_of_the_light(example):
    maze = example.start_maze(KEYS[6])
    fresh = example.start_maze(KEYS[7])
    light = maze.light
    assert set(np.asarray(light)) == {example.LEFT, example.RIGHT}
    lengths = np.asarray(maze.distance)
    assert set(lengths) == set(range(example.SHORTEST + 1, example.LONGEST + 2))
    # Half of the rows turn to the right side.
    is_right_turn = np.arange(example.ROWS) % 2 == 0
    action = jnp.where(is_right_turn, light, 1 - light)

    for step in range(example.SHORTEST + 2):
        seen = np.asarray(example.observe(maze).argmax(axis=1))
        if step == 0:
            np.testing.assert_array_equal(seen, light)
        else:
            expected = np.where(step == lengths, example.JUNCTION, example.CORRIDOR)
            np.testing.assert_array_equal(seen, expected)
        maze, reward, ended = example.step_maze(maze, action, fresh)
        np.testing.assert_array_equal(ended, step == lengths)
        np.testing.assert_array_equal(reward, (step == lengths) & is_right_turn)
    # Rows whose episode has ended have the new one.
    assert ended.any()
    np.testing.assert_array_equal(maze.time[ended], 0)
    np.testing.assert_array_equal(maze.distance[ended], fresh.distance[ended])


# The benchmark


def test_a_gate_is_close_to_its_input_at_first():
    """The bias of 2 closes the update to about 0.12, without the matrices."""
    x = jax.random.normal(KEYS[0], (2, 3, 4))
    y = jax.random.normal(KEYS[1], (2, 3, 4))
    gate = benchmark.Gate()
    params = gate.init(KEYS[2], x, y)
    zero = jax.tree.map(jnp.zeros_like, params)
    zero["params"]["update_x"]["bias"] = params["params"]["update_x"]["bias"]

    np.testing.assert_allclose(gate.apply(zero, x, y), (1 - 0.1192) * x, rtol=1e-3)


def test_steps_to_the_goal_are_counted_to_the_end_of_the_first_mean_that_reaches_it():
    rewards = np.array([0.5, 0.5, 1, 1, 1, 1, 1, 0.5])
    assert benchmark.steps_to_goal(rewards, 100) == 700
    assert benchmark.steps_to_goal(rewards[:6], 100) is None
