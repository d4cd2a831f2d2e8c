"""Tests the learning-rate schedule against its formula, and clipping and Adam against numpy."""

import math

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.config import AverageConfig, ExperimentConfig, OptimizerConfig, ScheduleOffset, TrainConfig
from txl_jax.config.training import ADAM_B1
from txl_jax.training.optimizer import learning_rate, make_optimizer

PEAK, WARMUP, STEPS, MIN_RATIO = 0.5, 8, 20, 0.1


def config_of(steps: int = STEPS, others: dict | None = None, **own) -> ExperimentConfig:
    """A config with the optimizer's own settings, and groups of `others`."""
    return ExperimentConfig(optimizer=OptimizerConfig(**own), train=TrainConfig(steps=steps), **(others or {}))


def rates(*, multiple=1.0, average=AverageConfig(), **own) -> list[float]:  # noqa: B008  # It is frozen.
    """The rate of updates 0 .. STEPS + 1, from one compiled call as in training."""
    own = {"learning_rate": PEAK, "warmup_steps": WARMUP, "min_lr_ratio": MIN_RATIO} | own
    schedule = learning_rate(config_of(others={"average": average}, **own), multiple=multiple)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(STEPS + 2))).tolist()


def rate_by_hand(count: int, *, warmup: int = WARMUP, first: int = WARMUP, last: int = STEPS, peak: float = PEAK):
    """A line from 0 to the peak, then a cosine whose peak is at `first` and whose minimum is at `last` and after it."""
    if count < warmup:
        return peak * count / warmup
    progress, lowest = min((count - first) / (last - first), 1), MIN_RATIO * PEAK
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({}, {}),
        ({"schedule_offset": ScheduleOffset.ORIGINAL}, {"first": 0}),
        ({"warmup_steps": 0}, {"warmup": 0, "first": 0}),
        ({"warmup_steps": 0, "schedule_offset": ScheduleOffset.ORIGINAL}, {"warmup": 0, "first": 0}),
        ({"decay_steps": 14}, {"last": 14}),
        ({"multiple": 3.0}, {"peak": 3 * PEAK}),  # The minimum is the same.
    ],
)
def test_a_linear_warm_up_and_a_cosine(changes, by_hand):
    assert rates(**changes) == pytest.approx([rate_by_hand(count, **by_hand) for count in range(STEPS + 2)])


def test_the_rate_is_multiplied_while_weights_are_averaged():
    found, without = rates(average=AverageConfig(start_step=16, lr_scale=0.5)), rates()
    assert found == pytest.approx(without[:16] + [rate / 2 for rate in without[16:]])


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_updates_are_those_of_a_numpy_adam_after_clipping(l2, x64):
    adam = {"adam_b2": 0.95, "adam_eps": 1e-3}
    whole = config_of(10, learning_rate=0.1, warmup_steps=2, clip_norm=0.7, l2=l2, **adam)
    config, schedule = whole.optimizer, learning_rate(whole)
    optimizer = make_optimizer(whole)
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(2, 3)), "vector": rng.normal(size=4)}
    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    first = {name: np.zeros(value.shape) for name, value in params.items()}
    second = {name: np.zeros(value.shape) for name, value in params.items()}
    clipped = 0
    for count, size in enumerate((5.0, 0.05, 0.6, 1.0)):
        gradient = {name: size * rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = optimizer.update(gradient, state, params)

        norm = math.sqrt(sum((value**2).sum() for value in gradient.values()))
        clipped += norm > config.clip_norm
        rate = float(schedule(count))
        for name, value in params.items():
            g = gradient[name] * min(1, config.clip_norm / norm) + l2 * value
            first[name] = ADAM_B1 * first[name] + (1 - ADAM_B1) * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            mean, square = first[name] / (1 - ADAM_B1 ** (count + 1)), second[name] / (1 - 0.95 ** (count + 1))
            np.testing.assert_allclose(updates[name], -rate * mean / (np.sqrt(square) + 1e-3), rtol=1e-6, atol=0)
    assert 0 < clipped < 4  # Both sides of the limit were seen.


TWOS = np.full((2, 2), 2.0, np.float32)
PARAMS = {
    "embedding": {"table_0": TWOS},
    "softmax": {"bias": TWOS[0]},
    "stack": {
        "biases": {"content": TWOS, "position": TWOS},
        "layers": {"attention": {"query": TWOS}, "attention_norm": {"scale": TWOS[0], "bias": TWOS[0]}},
    },
}


def first_update(gradient: float, *, boxed: bool = False, **settings) -> dict[str, float]:
    """The change of each parameter by name, for a gradient of this size everywhere."""
    optimizer, params = make_optimizer(config_of(learning_rate=0.1, clip_norm=1e9, **settings)), PARAMS
    if boxed:  # As when the state is made.
        params = jax.tree.map(lambda leaf: nn.LogicallyPartitioned(leaf, (None,) * leaf.ndim), PARAMS)
    state = optimizer.init(params)
    gradients = jax.tree.map(lambda leaf: np.full_like(leaf, gradient), PARAMS)
    updates, _ = optimizer.update(gradients, nn.unbox(state), PARAMS)
    return {"/".join(path): float(leaf.ravel()[0]) for path, leaf in flax.traverse_util.flatten_dict(updates).items()}


@pytest.mark.parametrize("boxed", [False, True])
def test_decay_shrinks_matrices_and_nothing_else(boxed):
    found = first_update(0.0, weight_decay=0.5, boxed=boxed)
    matrices = {"embedding/table_0", "stack/layers/attention/query"}
    assert found == {name: pytest.approx(-0.1 * 0.5 * 2 if name in matrices else 0) for name in found}
    assert len(found) == 7


def test_the_embedding_has_a_rate_of_its_own():
    found = first_update(1.0, embedding_lr_multiplier=3.0)
    assert found == {name: pytest.approx(-0.3 if name == "embedding/table_0" else -0.1, rel=1e-4) for name in found}
