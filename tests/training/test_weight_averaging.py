"""Tests of the mean of the weights: by hand, in the training step, and when it begins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny_run
from txl_jax.config import AverageConfig
from txl_jax.training import weight_averaging

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
        # After two updates: the third weight is the first that counts; before that, the weights themselves.
        ({"start_step": 2}, None, [1.0, 5.0, 2.0, np.mean([2, 8]), np.mean([2, 8, 4]), np.mean([2, 8, 4, 6])]),
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
        average = weight_averaging.add(average, {"w": jnp.asarray(weight)}, jnp.asarray(step), config)
        found.append(average.params["w"])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_mean_begins_once_and_of_an_ensemble_one_members():
    average = weight_averaging.init({"w": jnp.zeros(())}, AverageConfig(nt_asgd_patience=5))
    assert not weight_averaging.has_begun(average) and weight_averaging.has_begun(weight_averaging.begin(average, 0))
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
    np.testing.assert_allclose(state.average.params["embedding"]["table_0"], expected, rtol=1e-5, atol=1e-7)
    assert np.abs(expected - state.params["embedding"]["table_0"]).max() > 1e-4
