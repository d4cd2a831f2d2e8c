"""Tests of position weights and of the weighted sum of losses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax import losses
from txl_jax.config import LossPart


@pytest.mark.parametrize("expected", [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [1]])
def test_position_weights(expected):
    np.testing.assert_array_equal(losses.position_weights(len(expected), LossPart.HALF), expected)
    np.testing.assert_array_equal(losses.position_weights(len(expected), LossPart.FULL), np.ones(len(expected)))


def test_half_loss_has_no_gradient_in_the_first_half():
    def half(nll):
        nats, tokens = losses.weighted_sum(nll, losses.position_weights(7, LossPart.HALF)[None])
        return nats / tokens

    np.testing.assert_allclose(jax.grad(half)(jnp.arange(14.0).reshape(2, 7)), [[0, 0, 0] + [1 / 4] * 4] * 2)


def test_weighted_sums_are_of_scored_positions():
    """Only a scored position shows that it is not finite."""
    nll = jnp.asarray([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    nats, count = losses.weighted_sum(nll, jnp.asarray([[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]))
    assert (float(nats), float(count)) == (1 + 2 + 16 + 32, 3.5)
    for unscored in (math.nan, math.inf):
        nats, count = losses.weighted_sum(jnp.asarray([[unscored, 3.0]]), jnp.asarray([[0.0, 1.0]]))
        assert (float(nats), float(count)) == (3, 1)
    nats, _ = losses.weighted_sum(jnp.asarray([[math.nan, 3.0]]), jnp.asarray([[1.0, 1.0]]))
    assert math.isnan(nats)
    nats, count = losses.weighted_sum(jnp.ones((2, 3)), jnp.zeros((2, 3)))
    assert (float(nats), float(count)) == (0, 0)


def test_activation_penalties_by_hand():
    outputs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    square = sum(float(x) ** 2 for x in outputs.ravel()) / outputs.size
    change = [float(outputs[b, i + 1, d] - outputs[b, i, d]) ** 2 for b in range(2) for i in range(3) for d in range(3)]
    found = losses.activation_penalty(jnp.asarray(outputs), activation=0.2, temporal=0.1)
    assert found == pytest.approx(0.2 * square + 0.1 * np.mean(change), rel=1e-5)
    assert losses.activation_penalty(jnp.ones((2, 1, 3)), activation=0.0, temporal=1.0) == 0
