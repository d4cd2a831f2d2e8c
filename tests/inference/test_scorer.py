"""Tests of what evaluation asks of a model and tests of runs do not reach: a temperature, with biases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import Network
from txl_jax.inference.scorer import make_scorer
from txl_jax.modules.recurrent import RecurrentModel


@pytest.mark.parametrize("network", Network)
def test_logits_are_divided_with_their_biases(network):
    recurrent = RecurrentModel(tiny.model_config(network=network), tiny.V)
    model, rng = tiny.make() if network is Network.TRANSFORMER_XL else recurrent, np.random.default_rng(0)
    params = tiny_run.params(model)
    params["softmax"]["bias"] = rng.normal(size=tiny.V).astype(np.float32)
    hidden, targets = rng.normal(size=(2, 5, tiny.D)).astype(np.float32), rng.integers(tiny.V, size=(2, 5))
    logits = (hidden @ params["embedding"]["table_0"].T + params["softmax"]["bias"]) / 1.7
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1)[..., 0]
    reader = make_scorer(model, dataclasses.replace(tiny_run.CONFIG.eval, temperature=1.7))
    found = jax.jit(reader.nll)(jax.jit(reader.prepare_params)(params), jnp.asarray(hidden), jnp.asarray(targets))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
