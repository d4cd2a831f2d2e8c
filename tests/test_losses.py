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


def test_the_adversarial_loss_is_that_of_the_moved_logit():
    """Against all logits, with the target's own changed; one target's logit is negative and stays."""
    rng, size = np.random.default_rng(0), 0.1
    hidden, table, bias = rng.normal(size=(2, 3, 4)), rng.normal(size=(7, 4)), rng.normal(size=7)
    targets = rng.integers(7, size=(2, 3))
    plain, expected = np.zeros((2, 3)), np.zeros((2, 3))
    for where in np.ndindex(2, 3):
        h, t = hidden[where], targets[where]
        logits = table @ h + bias
        plain[where] = np.log(np.exp(logits).sum()) - logits[t]
        if table[t] @ h > 0:
            logits[t] -= size * np.linalg.norm(table[t]) * np.linalg.norm(h)
        expected[where] = np.log(np.exp(logits).sum()) - logits[t]
    found = losses.adversarial_nll(*map(jnp.asarray, (plain, hidden, table[targets])), size)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (expected > plain + 1e-3).any() and (expected == plain).any()


def test_the_adversarial_loss_at_its_limits():
    """What is certain is finite, vectors get no gradient, and a hidden state of zeros has a finite one."""
    hidden, vectors = jnp.ones((1, 2, 4)), jnp.full((1, 2, 4), 3.0)
    nll = jnp.asarray([[0.0, 1e-8]])
    limit = np.full((1, 2), 24 + math.log(1e-7 + math.exp(-24)))
    assert losses.adversarial_nll(nll, hidden, vectors, 2.0) == pytest.approx(limit, rel=1e-3)
    slopes = jax.grad(lambda h, w: losses.adversarial_nll(jnp.ones((1, 2)), h, w, 0.1).sum(), argnums=(0, 1))
    of_hidden, of_vectors = slopes(hidden, vectors)
    assert of_hidden.all() and not of_vectors.any()
    of_zeros, _ = slopes(0 * hidden, vectors)
    assert np.isfinite(of_zeros).all()
