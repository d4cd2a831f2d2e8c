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

PEAK = 0.5
WARMUP = 8
STEPS = 20
MIN_RATIO = 0.1


def config_of(
    steps: int = STEPS, average: AverageConfig | None = None, **settings
) -> ExperimentConfig:
    """A config with these settings of the optimizer."""
    return ExperimentConfig(
        optimizer=OptimizerConfig(**settings),
        train=TrainConfig(steps=steps),
        average=average or AverageConfig(),
    )


def rates(*, multiple=1.0, average: AverageConfig | None = None, **settings) -> list[float]:
    """The rate of updates 0 .. STEPS + 1, from one compiled call as in training."""
    usual = {"learning_rate": PEAK, "warmup_steps": WARMUP, "min_lr_ratio": MIN_RATIO}
    config = config_of(average=average, **usual | settings)
    schedule = learning_rate(config, multiple=multiple)
    return jax.jit(jax.vmap(schedule))(np.arange(STEPS + 2)).tolist()


def rate_by_hand(
    count: int,
    *,
    warmup: int = WARMUP,
    first: int = WARMUP,
    last: int = STEPS,
    peak: float = PEAK,
    at_once: bool = False,
):
    """A line from 0 to the peak, then a cosine from its peak at `first` to its minimum at `last`.

    The minimum is kept. If `at_once` is set, update 0 is at the peak.
    """
    if at_once and count == 0:
        return peak
    if count < warmup:
        return peak * count / warmup
    progress = min((count - first) / (last - first), 1)
    lowest = MIN_RATIO * PEAK
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    # Settings of the schedule, and arguments of `rate_by_hand`. Without a warm-up, both offsets are
    # the same.
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
    ids=[
        "after the warm-up",
        "original",
        "no warm-up",
        "original without warm-up",
        "decay steps",
        "multiple",
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
    corners = [0, WARMUP, STEPS]
    rates_at_corners = [0, multiple * PEAK, MIN_RATIO * PEAK]
    expected = np.interp(range(STEPS + 2), corners, rates_at_corners)

    actual = rates(schedule=Schedule.LINEAR, multiple=multiple)

    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_rate_is_multiplied_while_weights_are_averaged():
    usual = rates()

    averaged = rates(average=AverageConfig(start_step=16, lr_scale=0.5))

    assert averaged[:16] == pytest.approx(usual[:16])
    assert averaged[16:] == pytest.approx([rate / 2 for rate in usual[16:]])


# Without and with the gradient of an L2 penalty, and with a number that is added to the norm before
# the division.
@pytest.mark.parametrize(("l2", "clip_eps"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.01)])
def test_updates_match_a_numpy_adam_after_clipping(l2, clip_eps, x64):
    beta = 0.95
    epsilon = 1e-3
    limit = 0.7
    config = config_of(
        10,
        learning_rate=0.1,
        warmup_steps=2,
        l2=l2,
        clip_norm=limit,
        clip_eps=clip_eps,
        adam_b2=beta,
        adam_eps=epsilon,
    )
    schedule = learning_rate(config)
    optimizer = make_optimizer(config)
    update = jax.jit(optimizer.update)

    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(2, 3)), "vector": rng.normal(size=4)}
    state = optimizer.init(params)
    first_moment = jax.tree.map(np.zeros_like, params)
    second_moment = jax.tree.map(np.zeros_like, params)
    n_clipped = 0
    # The norms are about three times these sizes, so on both sides of the limit.
    for count, size in enumerate((5.0, 0.05, 0.6, 1.0), start=1):
        gradient = {name: size * rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = update(gradient, state, params)

        norm = math.sqrt(sum((value**2).sum() for value in gradient.values()))
        n_clipped += norm > limit
        for name, value in params.items():
            clipped = gradient[name] * min(1, limit / (norm + clip_eps)) + l2 * value
            first_moment[name] = ADAM_B1 * first_moment[name] + (1 - ADAM_B1) * clipped
            second_moment[name] = beta * second_moment[name] + (1 - beta) * clipped**2
            mean = first_moment[name] / (1 - ADAM_B1**count)
            square = second_moment[name] / (1 - beta**count)
            expected = -float(schedule(count - 1)) * mean / (np.sqrt(square) + epsilon)
            np.testing.assert_allclose(
                updates[name], expected, rtol=1e-6, atol=0, err_msg=f"{name}, update {count}"
            )
    # Both sides of the limit were seen.
    assert 0 < n_clipped < 4


def test_the_embedding_has_a_rate_of_its_own():
    """Adam's first update is the rate in each element, with the gradient's sign."""
    config = config_of(learning_rate=0.1, clip_norm=1e9, embedding_lr_multiplier=3.0)
    optimizer = make_optimizer(config)
    params = jax.tree.map(np.ones_like, drawn(0))

    @jax.jit
    def first_updates(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    updates = flax.traverse_util.flatten_dict(first_updates(params), sep="/")

    embedding = updates.pop("embedding/table_0")
    np.testing.assert_allclose(embedding, -0.3, rtol=1e-4)
    for path, leaf in updates.items():
        np.testing.assert_allclose(leaf, -0.1, rtol=1e-4, err_msg=path)


# Rules that treat each layer's matrices by themselves. Their state on meshes:
# tests/sharding/test_mesh.py.

RATE = 0.1
# Adafactor factors matrices whose sides are 128 and more, as D, H * E, F and V are. They all
# differ, so that no two axes can be mixed up.
N = 2
D = 128
H = 4
E = 33
F = 130
V = 140
SHAPES_OF_ATTENTION = {"query": (N, D, H, E), "output": (N, H, E, D)}
SHAPES_OF_LAYERS = {
    "attention": SHAPES_OF_ATTENTION,
    "feed_forward": {"inner_kernel": (N, D, F), "inner_bias": (N, F)},
    "attention_norm": {"scale": (N, D), "bias": (N, D)},
}
SHAPES_OF_BIASES = {"content": (H, E), "position": (H, E)}
SHAPES = {
    "embedding": {"table_0": (V, D)},
    "softmax": {"bias": (V,)},
    "stack": {"biases": SHAPES_OF_BIASES, "layers": SHAPES_OF_LAYERS},
}


def drawn(seed, *, scale=1.0):
    """A tree of numbers of `SHAPES`, in the dtype of the test."""
    rng = np.random.default_rng(seed)
    dtype = jnp.result_type(float)

    def draw(shape):
        return (scale * rng.normal(size=shape)).astype(dtype)

    return jax.tree.map(draw, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def unstacked(tree):
    """The tensors by name, one for each layer, and attention's as matrices."""
    tensors = {
        "table": tree["embedding"]["table_0"],
        "bias": tree["softmax"]["bias"],
        "u": tree["stack"]["biases"],
    }
    for i in range(N):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], tree["stack"]["layers"])
        attention = layer["attention"]
        tensors[f"query {i}"] = attention["query"].reshape(D, H * E)
        tensors[f"output {i}"] = attention["output"].reshape(H * E, D)
        tensors[f"feed_forward {i}"] = layer["feed_forward"]
        tensors[f"norm {i}"] = layer["attention_norm"]
    return tensors


def updated(optimizer, params, gradients):
    """The parameters after each of three updates."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    after_each = []
    for gradient in gradients:
        params, state = step(params, state, gradient)
        after_each.append(jax.device_get(params))
    return after_each


def is_decayed(params):
    """Mask of the decay, in the tree of `unstacked`: matrices."""
    mask = {}
    for name in params:
        kind = name.split()[0]
        if kind == "feed_forward":
            mask[name] = {"inner_kernel": True, "inner_bias": False}
        else:
            mask[name] = kind not in ("bias", "u", "norm")
    return mask


def muon():
    """Muon for the layers' matrices in the tree of `unstacked`, and Adam for the rest.

    Muon's updates are scaled to the root mean square of Adam's, which is about 0.2.
    """

    def rule(path, leaf):
        is_attention = path[0].key.startswith(("query", "output"))
        if is_attention or path[-1].key == "inner_kernel":
            return "muon"
        return "adam"

    rules = {
        "muon": optax.contrib.muon(RATE, consistent_rms=0.2, weight_decay=0.3),
        "adam": optax.adamw(RATE, weight_decay=0.3, mask=is_decayed),
    }
    return optax.partition(rules, lambda params: jax.tree.map_with_path(rule, params))


# Adafactor is the only one of optax's rules that does not multiply the decay by the rate.
PEERS = {
    OptimizerName.LAMB: lambda: optax.lamb(RATE, eps=1e-8, weight_decay=0.3, mask=is_decayed),
    OptimizerName.ADAFACTOR: lambda: optax.adafactor(
        RATE, weight_decay_rate=0.3 * RATE, weight_decay_mask=is_decayed
    ),
    OptimizerName.LION: lambda: optax.lion(RATE, weight_decay=0.3, mask=is_decayed),
    OptimizerName.MUON: muon,
}


@pytest.mark.parametrize("name", PEERS)
def test_updates_match_optax_on_each_layers_matrices(name, x64):
    params = drawn(0)
    # Biases of the softmax begin at 0. The steps of LAMB and Adafactor follow the size of an array,
    # and must not leave it at 0.
    params["softmax"]["bias"] *= 0
    gradients = [drawn(seed, scale=0.1) for seed in (1, 2, 3)]
    constant_rate = config_of(
        10, name=name, learning_rate=RATE, min_lr_ratio=1.0, clip_norm=1e9, weight_decay=0.3
    )

    stacked = updated(make_optimizer(constant_rate), params, gradients)

    per_layer = [unstacked(gradient) for gradient in gradients]
    expected = updated(PEERS[name](), unstacked(params), per_layer)
    actual = [unstacked(params) for params in stacked]
    tiny_run.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


WEIGHTS = [1.0, 5.0, 2.0, 8.0, 4.0, 6.0]


def exponential(least: float) -> list[float]:
    """The mean after each of `WEIGHTS`. All count alike until the newest has a share of `least`."""
    mean = 0.0
    means = []
    for count, weight in enumerate(WEIGHTS, start=1):
        share = max(1 / count, least)
        mean += share * (weight - mean)
        means.append(mean)
    return means


# After two updates: the third weight is the first that counts. Before that the mean is the weights
# themselves.
FROM_THE_THIRD = [1.0, 5.0, 2.0, (2 + 8) / 2, (2 + 8 + 4) / 3, (2 + 8 + 4 + 6) / 4]
FROM_THE_FIFTH = [1.0, 5.0, 2.0, 8.0, 4.0, (4 + 6) / 2]


@pytest.mark.parametrize(
    ("settings", "begin_at", "expected"),
    [
        pytest.param({"start_step": 2}, None, FROM_THE_THIRD, id="uniform"),
        pytest.param(
            {"start_step": 0, "ema_decay": 0.75}, None, exponential(0.25), id="exponential"
        ),
        pytest.param({"nt_asgd_patience": 5}, 4, FROM_THE_FIFTH, id="begun later"),
    ],
)
def test_means_by_hand(settings, begin_at, expected):
    """After each of six updates, whose only parameter is set to the next of `WEIGHTS`.

    `begin_at` is the step, from 0, before which validation lets the mean begin, or None if its
    settings let it begin.
    """
    config = AverageConfig(**settings)
    average = weight_averaging.init({"w": jnp.zeros(())}, config)
    means = []
    for step, weight in enumerate(WEIGHTS):
        if step == begin_at:
            average = weight_averaging.begin(average, step)
        params = {"w": jnp.asarray(weight)}
        average = weight_averaging.add(average, params, jnp.asarray(step), config)
        means.append(average.params["w"])

    np.testing.assert_allclose(means, expected, rtol=1e-6)


def test_a_mean_that_waits_for_validation_has_not_begun_before_it_is_told():
    average = weight_averaging.init({"w": jnp.zeros(())}, AverageConfig(nt_asgd_patience=5))
    assert not weight_averaging.has_begun(average)

    begun = weight_averaging.begin(average, 0)

    assert weight_averaging.has_begun(begun)


def test_the_mean_of_one_member_of_an_ensemble_begins_without_the_others():
    average = weight_averaging.init({"w": jnp.zeros(())}, AverageConfig(nt_asgd_patience=5))
    of_two_members = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), average)

    begun = weight_averaging.begin(of_two_members, 7, 1)

    assert not weight_averaging.has_begun(begun, 0)
    assert weight_averaging.has_begun(begun, 1)
    # The step of the second member's beginning. The first one has kept the step that never comes.
    assert begun.begun.tolist() == [average.begun, 7]


@pytest.mark.parametrize(
    # With a patience of 3 the newest loss is compared with the best, not counting the last three
    # before it.
    ("losses", "is_due"),
    [
        pytest.param([5.0], False, id="first"),
        pytest.param([5.0, 4.0, 3.0, 6.0], False, id="all earlier losses are among the last three"),
        pytest.param([5.0, 6.0, 6.0, 6.0, 5.5], True, id="worse than the best"),
        pytest.param([5.0, 6.0, 6.0, 6.0, 4.9], False, id="better than the best"),
        pytest.param([4.0, 3.0, 2.0, 1.0, 3.5], False, id="better than the 4 of long ago"),
    ],
)
def test_averaging_is_due_when_validation_stops_improving(losses, is_due):
    assert weight_averaging.is_due(losses, 3) is is_due


def test_the_step_keeps_the_mean_of_its_updates():
    # These settings are also test_schedule_lengths.py's, so that they are compiled once.
    settings = {"average__start_step": 4, "model__dropout__rate": 0.0}
    state, _ = tiny_run.train(7, **settings)

    # The parameters after each update that counts, the fifth to the seventh, from a run that stops
    # there.
    tables = []
    for updates in (5, 6, 7):
        stopped, _ = tiny_run.train(updates, **settings)
        tables.append(stopped.params["embedding"]["table_0"])
    expected = np.mean(tables, axis=0)
    mean = state.average.params["embedding"]["table_0"]
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)
    last = state.params["embedding"]["table_0"]
    assert np.abs(expected - last).max() > 1e-4, "the mean is not the last parameters"
