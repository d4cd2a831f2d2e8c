"""Tests of the functions for `jax.export`: their scores and samples. `test_exported.py` has the files."""

import jax
import numpy as np

from support import tiny
from txl_jax.config import EvalConfig
from txl_jax.inference.scorer import make_scorer
from txl_jax.interop.exported import _sample, functions_of

LOG_P = np.log(np.array([0.1, 0.4, 0.4, 0.1], np.float32))


def test_each_row_is_sampled_at_its_own_temperature():
    """At 0 it is the lowest id of the most likely."""
    n, temperatures = 4000, np.array([0.5, 2.0, 0.0], np.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"), 3 * n))
    drawn = np.asarray(jax.jit(_sample)(np.tile(LOG_P, (3 * n, 1)), keys, np.tile(temperatures, n)))
    assert drawn.dtype == np.int32 and set(drawn[2::3]) == {1}
    for i in range(2):
        expected = np.exp(LOG_P / temperatures[i])
        found = np.bincount(drawn[i::3], minlength=4) / n
        np.testing.assert_allclose(found, expected / expected.sum(), atol=4 * 0.5 / n**0.5)


def test_generation_steps_have_the_scores_of_scoring():
    model, lengths = tiny.make(), EvalConfig(batch_size=tiny.B, segment_len=1, mem_len=6, clamp_len=None)
    weights = make_scorer(model, lengths).prepare_params(tiny.variables(model)["params"])
    flat = functions_of(model, lengths, jax.device_get(weights), generates=True)
    assert len(flat.weights) < len(jax.tree.leaves(weights))  # The tied table is named once.
    score, generate = (jax.jit(flat.functions[name].call) for name in ("score", "generate"))
    scored = written = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in flat.memory.items()}
    key, temperature, text = np.zeros((tiny.B, 2), np.uint32), np.zeros(tiny.B, np.float32), tiny.text(5)
    for i in range(4):
        token, target, reset = text[:, i : i + 1], text[:, i + 1 : i + 2], np.full(tiny.B, i == 0)
        nats, scored = score(flat.weights, scored, token, target, reset)
        drawn, log_p, written = generate(flat.weights, written, token[:, 0], key, temperature, reset)
        np.testing.assert_allclose(-np.take_along_axis(log_p, target, 1), nats, rtol=1e-5)
        np.testing.assert_array_equal(drawn, np.argmax(log_p, axis=1))
