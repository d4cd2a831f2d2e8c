"""Tests the learning-rate schedule, update rules against numpy and optax, and the mean of the
weights.

The mean: by hand, in the training step, and when it begins.
"""

import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import tiny_run
from txl_jax.config import (
    AverageConfig,
    ExperimentConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    ScheduleOffset,
    TrainConfig,
)
from txl_jax.config.training import ADAM_B1
from txl_jax.training import weight_averaging
from txl_jax.training.optimizer import learning_rate, make_optimizer

PEAK, WARMUP, STEPS, MIN_RATIO = 0.5, 8, 20, 0.1


def config_of(steps: int = STEPS, others: dict | None = None, **own) -> ExperimentConfig:
    """A config with the optimizer's own settings, and groups of `others`."""
    return ExperimentConfig(
        optimizer=OptimizerConfig(**own), train=TrainConfig(steps=steps), **(others or {})
    )


# It is frozen.
def rates(*, multiple=1.0, average=AverageConfig(), **own) -> list[float]:  # noqa: B008
    """The rate of updates 0 .. STEPS + 1, from one compiled call as in training."""
    own = {"learning_rate": PEAK, "warmup_steps": WARMUP, "min_lr_ratio": MIN_RATIO} | own
    schedule = learning_rate(config_of(others={"average": average}, **own), multiple=multiple)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(STEPS + 2))).tolist()


def rate_by_hand(
    count: int,
    *,
    warmup: int = WARMUP,
    first: int = WARMUP,
    last: int = STEPS,
    peak: float = PEAK,
    at_once: bool = False,
):
    """A line from 0 to the peak, then a cosine whose peak is at `first` and whose minimum is at
    `last` and after it. `at_once`: update 0 is at the peak.
    """
    if at_once and count == 0:
        return peak
    if count < warmup:
        return peak * count / warmup
    progress, lowest = min((count - first) / (last - first), 1), MIN_RATIO * PEAK
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({}, {}),
        ({"schedule_offset": ScheduleOffset.ORIGINAL}, {"first": 0, "at_once": True}),
        ({"warmup_steps": 0}, {"warmup": 0, "first": 0}),
        (
            {"warmup_steps": 0, "schedule_offset": ScheduleOffset.ORIGINAL},
            {"warmup": 0, "first": 0},
        ),
        ({"decay_steps": 14}, {"last": 14}),
        ({"multiple": 3.0}, {"peak": 3 * PEAK}),  # The minimum is the same.
    ],
)
def test_a_linear_warm_up_and_a_cosine(changes, by_hand):
    expected = [rate_by_hand(count, **by_hand) for count in range(STEPS + 2)]
    # Near the minimum 1 + cos(x) cancels in float32, so that the error is a rounding of the peak,
    # not of the rate.
    rounding = by_hand.get("peak", PEAK) * 2**-23
    assert rates(**changes) == pytest.approx(expected, abs=rounding)


@pytest.mark.parametrize("multiple", [1.0, 3.0])
def test_a_linear_warm_up_and_a_line(multiple):
    corners = [0, WARMUP, STEPS], [0, multiple * PEAK, MIN_RATIO * PEAK]
    expected = np.interp(range(STEPS + 2), *corners)
    np.testing.assert_allclose(
        rates(schedule=Schedule.LINEAR, multiple=multiple), expected, rtol=1e-6
    )


def test_the_rate_is_multiplied_while_weights_are_averaged():
    found, without = rates(average=AverageConfig(start_step=16, lr_scale=0.5)), rates()
    assert found == pytest.approx(without[:16] + [rate / 2 for rate in without[16:]])


@pytest.mark.parametrize(("l2", "clip_eps"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.01)])
def test_updates_are_those_of_a_numpy_adam_after_clipping(l2, clip_eps, x64):
    adam = {"adam_b2": 0.95, "adam_eps": 1e-3}
    clipping = {"clip_norm": 0.7, "clip_eps": clip_eps}
    whole = config_of(10, learning_rate=0.1, warmup_steps=2, l2=l2, **clipping, **adam)
    config, schedule = whole.optimizer, learning_rate(whole)
    optimizer = make_optimizer(whole)
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(2, 3)), "vector": rng.normal(size=4)}
    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    first, second = (
        {name: np.zeros(value.shape) for name, value in params.items()} for _ in range(2)
    )
    clipped = 0
    for count, size in enumerate((5.0, 0.05, 0.6, 1.0), start=1):
        gradient = {name: size * rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = optimizer.update(gradient, state, params)

        norm = math.sqrt(sum((value**2).sum() for value in gradient.values()))
        clipped += norm > config.clip_norm
        for name, value in params.items():
            g = gradient[name] * min(1, config.clip_norm / (norm + clip_eps)) + l2 * value
            first[name] = ADAM_B1 * first[name] + (1 - ADAM_B1) * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            mean, square = first[name] / (1 - ADAM_B1**count), second[name] / (1 - 0.95**count)
            expected = -float(schedule(count - 1)) * mean / (np.sqrt(square) + 1e-3)
            np.testing.assert_allclose(updates[name], expected, rtol=1e-6, atol=0)
    assert 0 < clipped < 4  # Both sides of the limit were seen.


def test_the_embedding_has_a_rate_of_its_own():
    optimizer = make_optimizer(
        config_of(learning_rate=0.1, clip_norm=1e9, embedding_lr_multiplier=3.0)
    )
    params = jax.tree.map(jnp.ones_like, drawn(0))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    for path, leaf in flax.traverse_util.flatten_dict(updates, sep="/").items():
        np.testing.assert_allclose(
            leaf, -0.3 if path == "embedding/table_0" else -0.1, rtol=1e-4, err_msg=path
        )


# Rules that treat each layer's matrices by themselves. Their state on meshes:
# tests/sharding/test_mesh.py.

RATE = 0.1
N, D, H, E, F, V = 2, 128, 4, 33, 130, 140  # Sides of 128 and more are factored by Adafactor.
SHAPES = {
    "embedding": {"table_0": (V, D)},
    "softmax": {"bias": (V,)},
    "stack": {
        "biases": {"content": (H, E), "position": (H, E)},
        "layers": {
            "attention": {"query": (N, D, H, E), "output": (N, H, E, D)},
            "feed_forward": {"inner_kernel": (N, D, F), "inner_bias": (N, F)},
            "attention_norm": {"scale": (N, D), "bias": (N, D)},
        },
    },
}


def drawn(seed, *, scale=1.0):
    """A tree of numbers of `SHAPES`, in the type of the test."""
    rng = np.random.default_rng(seed)
    is_leaf = {"is_leaf": lambda leaf: isinstance(leaf, tuple)}
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), float), SHAPES, **is_leaf
    )


def unstacked(tree):
    """The tensors by name, one for each layer, and attention's as matrices."""
    found = {
        "table": tree["embedding"]["table_0"],
        "bias": tree["softmax"]["bias"],
        "u": tree["stack"]["biases"],
    }
    for i in range(N):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], tree["stack"]["layers"])
        attention = layer["attention"]
        found[f"query {i}"] = attention["query"].reshape(D, H * E)
        found[f"output {i}"] = attention["output"].reshape(H * E, D)
        found |= {f"feed_forward {i}": layer["feed_forward"], f"norm {i}": layer["attention_norm"]}
    return found


def updated(optimizer, params):
    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, found = optimizer.init(params), []
    for i in range(3):
        grads = drawn(i + 1, scale=0.1)
        grads = grads if "stack" in params else unstacked(grads)
        params, state = step(params, state, grads)
        found.append(params)
    return found


def is_decayed(params):
    """Mask of the decay, in the tree of `unstacked`: matrices."""
    of_kernels = {"inner_kernel": True, "inner_bias": False}
    return {
        name: of_kernels if "feed_forward" in name else name.split()[0] not in ("bias", "u", "norm")
        for name in params
    }


def muon():
    """Muon for the layers' matrices in the tree of `unstacked`, and Adam for the rest."""

    def rule(path, leaf):
        return (
            "muon"
            if path[0].key.startswith(("query", "output")) or path[-1].key == "inner_kernel"
            else "adam"
        )

    adam = optax.adamw(RATE, weight_decay=0.3, mask=is_decayed)
    rules = {"muon": optax.contrib.muon(RATE, consistent_rms=0.2, weight_decay=0.3), "adam": adam}
    return optax.partition(rules, lambda params: jax.tree.map_with_path(rule, params))


PEERS = {
    OptimizerName.LAMB: lambda: optax.lamb(RATE, eps=1e-8, weight_decay=0.3, mask=is_decayed),
    OptimizerName.ADAFACTOR: lambda: optax.adafactor(
        RATE, weight_decay_rate=0.3 * RATE, weight_decay_mask=is_decayed
    ),
    OptimizerName.LION: lambda: optax.lion(RATE, weight_decay=0.3, mask=is_decayed),
    OptimizerName.MUON: muon,
}


@pytest.mark.parametrize("name", PEERS)
def test_updates_are_those_of_optax_on_each_layers_matrices(name, x64):
    params = drawn(0)
    params["softmax"]["bias"] *= 0  # As it begins.
    constant = config_of(
        10, name=name, learning_rate=RATE, min_lr_ratio=1.0, clip_norm=1e9, weight_decay=0.3
    )
    found = updated(make_optimizer(constant), params)
    expected = updated(PEERS[name](), unstacked(params))
    tiny_run.assert_close([*map(unstacked, found)], expected, rtol=1e-9, atol=1e-12)


WEIGHTS = [1.0, 5.0, 2.0, 8.0, 4.0, 6.0]


def exponential(least: float) -> list[float]:
    """All updates count alike until each has this weight."""
    found = [0.0]
    for count, weight in enumerate(WEIGHTS, start=1):
        found.append(found[-1] + max(1 / count, least) * (weight - found[-1]))
    return found[1:]


@pytest.mark.parametrize(
    ("settings", "begin_at", "expected"),
    [
        # After two updates: the third weight is the first that counts; before that, the weights
        # themselves.
        (
            {"start_step": 2},
            None,
            [1.0, 5.0, 2.0, np.mean([2, 8]), np.mean([2, 8, 4]), np.mean([2, 8, 4, 6])],
        ),
        ({"start_step": 0, "ema_decay": 0.75}, None, exponential(0.25)),
        ({"nt_asgd_patience": 5}, 4, [1.0, 5.0, 2.0, 8.0, 4.0, 5.0]),
    ],
    ids=["uniform", "exponential", "begun later"],
)
def test_means_by_hand(settings, begin_at, expected):
    """After each of six updates to `WEIGHTS`."""
    config = AverageConfig(**settings)
    average, found = weight_averaging.init({"w": jnp.zeros(())}, config), []
    for step, weight in enumerate(WEIGHTS):
        if step == begin_at:
            average = weight_averaging.begin(average, step)
        average = weight_averaging.add(
            average, {"w": jnp.asarray(weight)}, jnp.asarray(step), config
        )
        found.append(average.params["w"])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_mean_begins_once_and_of_an_ensemble_one_members():
    average = weight_averaging.init({"w": jnp.zeros(())}, AverageConfig(nt_asgd_patience=5))
    assert not weight_averaging.has_begun(average) and weight_averaging.has_begun(
        weight_averaging.begin(average, 0)
    )
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), average)
    begun = weight_averaging.begin(both, 7, 1)
    assert not weight_averaging.has_begun(begun, 0) and weight_averaging.has_begun(begun, 1)
    assert begun.begun.tolist() == [average.begun, 7]


def test_it_is_due_when_validation_stops_improving():
    for losses, due in (
        ([5.0], False),
        ([5.0, 4.0, 3.0, 6.0], False),  # Of three before, all are among the last three.
        ([5.0, 6.0, 6.0, 6.0, 5.5], True),
        ([5.0, 6.0, 6.0, 6.0, 4.9], False),
        ([4.0, 3.0, 2.0, 1.0, 3.5], False),  # Better than the 4 of long ago.
    ):
        assert weight_averaging.is_due(losses, 3) is due, losses


def test_the_step_keeps_the_mean_of_its_updates():
    state, _ = tiny_run.train(7, average__start_step=4)
    # Each update's parameters, from a run that stops there.
    each = [tiny_run.train(updates, average__start_step=4)[0].params for updates in range(5, 8)]
    expected = np.mean([params["embedding"]["table_0"] for params in each], axis=0)
    np.testing.assert_allclose(
        state.average.params["embedding"]["table_0"], expected, rtol=1e-5, atol=1e-7
    )
    assert np.abs(expected - state.params["embedding"]["table_0"]).max() > 1e-4
