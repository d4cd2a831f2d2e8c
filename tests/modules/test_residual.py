"""Tests of residual connections: GTrXL's gate against its formula, and what a new gate passes on."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit as sigmoid

from support import tiny
from txl_jax.config import DType, NormPlace, Residual
from txl_jax.modules.residual import ResidualConnection

CONFIG = tiny.model_config(layer_norm=NormPlace.PRE, residual=Residual.GATED, dtype=DType.FLOAT64)


def test_a_gate_is_the_papers_gru_cell(x64):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, tiny.B, 4, tiny.D))
    w, u, candidate = (rng.normal(size=(n, tiny.D, tiny.D)) for n in (3, 2, 1))  # Each x W, for r, z and h.
    bias = rng.normal(size=tiny.D)
    params = {
        "branch_kernel": w.swapaxes(0, 1),
        "input_kernel": u.swapaxes(0, 1),
        "reset_kernel": candidate[0],
        "bias": bias,
    }
    y_read = np.maximum(y, 0)
    r = sigmoid(y_read @ w[0] + x @ u[0])
    z = sigmoid(y_read @ w[1] + x @ u[1] - bias)
    h = np.tanh(y_read @ w[2] + (r * x) @ candidate[0])
    found = ResidualConnection(CONFIG).apply({"params": params}, x, y)
    np.testing.assert_allclose(found, (1 - z) * x + z * h, rtol=0, atol=1e-13)


def test_a_new_gate_passes_most_of_its_input_on():
    connection = ResidualConnection(tiny.model_config(layer_norm=NormPlace.PRE, residual=Residual.GATED, init_std=0.0))
    x = jnp.ones((1, 1, tiny.D))
    variables = connection.init(jax.random.key(0), x, x)
    np.testing.assert_allclose(connection.apply(variables, x, 9 * x), 1 - sigmoid(-2), rtol=1e-6)
